"""One file a family: the torch module, its config and its first weights."""

from __future__ import annotations

__all__: list[str] = []
