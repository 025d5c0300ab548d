"""What a key of config.json can do that the table of contracts does not know.

`config_names.txt` holds every name that vLLM 0.31.0 may read off a config, for any model;
`scripts/write_config_names.py` collects it. A key with no such name has no effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from importlib import resources

__all__ = ["find_misspelled", "is_read_by_vllm"]

_MAX_LENGTH = 64
_ALIKE = 0.85


@cache
def _read_names() -> frozenset[str]:
    text = (resources.files("paceline.draft") / "config_names.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.splitlines() if not line.startswith("#"))


def is_read_by_vllm(key: str) -> bool:
    """True when code of vLLM reads a key of this name, for whatever model."""
    return key in _read_names()


def find_misspelled(key: str, absent: Iterable[str]) -> str | None:
    """The key of the family that is absent and that this one is spelled like, if any."""
    if len(key) > _MAX_LENGTH:
        return None
    folded = {name.replace("_", "").lower(): name for name in absent}
    near = difflib.get_close_matches(key.replace("_", "").lower(), list(folded), n=1, cutoff=_ALIKE)
    return folded[near[0]] if near else None
