"""What each room lets out is pinned here: a name is public only on purpose."""

from __future__ import annotations

import importlib

import pytest

NAMES: dict[str, list[str]] = {}


@pytest.mark.parametrize("room", sorted(NAMES))
def test_public_names(room: str) -> None:
    module = importlib.import_module(f"paceline.{room}")
    assert sorted(module.__all__) == NAMES[room]
    assert list(module.__all__) == sorted(module.__all__), "keep __all__ sorted"
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing
