"""Reading a result record: a missing fact is None, a fact of the wrong kind is a ResultError."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ResultError

__all__ = [
    "RESULT_FORMAT",
    "list_arms",
    "pick",
    "pick_dict",
    "pick_list",
    "pick_number",
    "pick_text",
    "require_format",
]

RESULT_FORMAT = "paceline-result/1"
_ARM_ORDER = ("candidate", "baseline", "plain")


def pick(record: Mapping[str, Any], *keys: str) -> Any | None:
    """The value at a path of keys, or None where any of them is absent or null."""
    value: Any = record
    for depth, key in enumerate(keys):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise _wrong_kind(keys[:depth], value, "an object")
        value = value.get(key)
    return value


def pick_number(record: Mapping[str, Any], *keys: str) -> float | None:
    """A finite number, or None. true and false are not numbers."""
    value = pick(record, *keys)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_kind(keys, value, "a number or null")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong_kind(keys, value, "a finite number or null")
    return number


def pick_text(record: Mapping[str, Any], *keys: str) -> str | None:
    """A string, or None."""
    value = pick(record, *keys)
    if value is not None and not isinstance(value, str):
        raise _wrong_kind(keys, value, "a string or null")
    return value


def pick_list(record: Mapping[str, Any], *keys: str) -> Sequence[Any]:
    """A list; empty where it is absent."""
    value = pick(record, *keys)
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _wrong_kind(keys, value, "a list or null")
    return value


def pick_dict(record: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """An object; empty where it is absent."""
    value = pick(record, *keys)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong_kind(keys, value, "an object or null")
    return value


def list_arms(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the measured arms: candidate, baseline, plain, then any other by name."""
    arms = pick_dict(result, "arms")
    present = [name for name in arms if pick_dict(result, "arms", name)]
    known = [name for name in _ARM_ORDER if name in present]
    return (*known, *sorted(name for name in present if name not in _ARM_ORDER))


def require_format(result: Mapping[str, Any]) -> None:
    """Raises ResultError unless the record says it is a result that this version reads."""
    found = result.get("format")
    if found != RESULT_FORMAT:
        raise ResultError(
            f"the record's format is {found!r}",
            where="result.json: format",
            expected=repr(RESULT_FORMAT),
            fix="Point at a run folder written by `paceline eval`.",
        )


def _wrong_kind(keys: Sequence[str], value: object, expected: str) -> ResultError:
    return ResultError(
        f"has the value {str(value)[:60]!r}",
        where=f"result.json: {'.'.join(keys)}",
        expected=expected,
        fix="Run `paceline eval` again, or restore the file.",
    )
