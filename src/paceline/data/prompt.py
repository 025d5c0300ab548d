"""One prompt, as every other file of this room passes it around."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Prompt"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation. messages: {"role", "content"} each; line: its place in the source, from 1."""

    prompt_id: str
    category: str
    messages: tuple[dict[str, str], ...]
    line: int
