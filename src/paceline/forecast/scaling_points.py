"""POINTS.toml: measured acceptance lengths along tokens, layers or parameters."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.problems import show_value

__all__ = ["AXES", "ScalingPoint", "ScalingPoints", "parse_scaling_points", "read_scaling_points"]

AXES = ("tokens", "layers", "parameters")
_KEYS = ("axis", "target", "family", "num_speculative_tokens", "predict", "points")
_POINT = ("x", "acceptance_length", "low", "high", "draws")
_MIN_DRAWS = 40  # fewer do not reach a 95 % interval's ends


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One served run. low, high: its 95 % interval; None where it has none.

    draws: its length on prompts drawn again; draw i is of the same prompts in every point.
    """

    x: float
    acceptance_length: float
    low: float | None
    high: float | None
    draws: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScalingPoints:
    """predict: places to foresee. All points share target, family and K."""

    name: str
    axis: str
    target: str
    family: str
    num_speculative_tokens: int
    predict: tuple[float, ...]
    points: tuple[ScalingPoint, ...]


def read_scaling_points(path: str | Path) -> ScalingPoints:
    """Raises DataError for a file that cannot be read or means nothing."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "is not UTF-8 text"
        raise DataError(f"the points cannot be read: {why}", where=str(path)) from None
    return parse_scaling_points(text, where=str(path))


def parse_scaling_points(text: str, *, where: str = "points") -> ScalingPoints:
    """Raises DataError for a key or value that means nothing."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise DataError(f"is not valid TOML: {problem}", where=where) from None
    _require_keys(table, _KEYS, _KEYS, where)
    k = table["num_speculative_tokens"]
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise DataError(f"num_speculative_tokens is {show_value(k)}", where=where, expected="K")
    if table["axis"] not in AXES:
        raise DataError(
            f"axis is {show_value(table['axis'])}", where=where, expected=f"one of {AXES}"
        )
    for key in ("target", "family"):
        if not isinstance(table[key], str):
            raise DataError(f"{key} is {show_value(table[key])}", where=where, expected="a name")
    listed, predict = table["points"], table["predict"]
    if not isinstance(listed, list) or not isinstance(predict, list):
        raise DataError("points and predict are lists", where=where, expected="[[points]] tables")
    points = [_point(one, k, f"{where}: points {n}") for n, one in enumerate(listed, 1)]
    counts = sorted({len(point.draws) for point in points})
    if len(counts) > 1:
        raise DataError(
            f"the points have {' and '.join(map(str, counts))} draws",
            where=where,
            expected="as many in every point, each of the same prompts",
        )
    return ScalingPoints(
        name=where,
        axis=table["axis"],
        target=table["target"],
        family=table["family"],
        num_speculative_tokens=k,
        predict=tuple(_number(one, 0.0, math.inf, f"{where}: predict") for one in predict),
        points=tuple(points),
    )


def _point(table: object, k: int, where: str) -> ScalingPoint:
    if not isinstance(table, dict):
        raise DataError("is not a table", where=where, expected="x and acceptance_length")
    _require_keys(table, _POINT, ("x", "acceptance_length"), where)
    if ("low" in table) != ("high" in table):
        raise DataError("has half an interval", where=where, expected="low and high, or neither")
    length = _number(table["acceptance_length"], 1.0, k + 1.0, f"{where}: acceptance_length")
    low = high = None
    if "low" in table:
        low = _number(table["low"], 1.0, length, f"{where}: low")
        high = _number(table["high"], length, k + 1.0, f"{where}: high")
    x = _number(table["x"], 0.0, math.inf, f"{where}: x")
    return ScalingPoint(
        x=x,
        acceptance_length=length,
        low=low,
        high=high,
        draws=_draws(table.get("draws", []), k, f"{where}: draws"),
    )


def _draws(value: object, k: int, where: str) -> tuple[float, ...]:
    if not isinstance(value, list) or 0 < len(value) < _MIN_DRAWS:
        raise DataError(
            f"is {show_value(value)}", where=where, expected=f"a list of {_MIN_DRAWS} or more"
        )
    return tuple(_number(one, 1.0, k + 1.0, where) for one in value)


def _require_keys(
    table: dict[str, Any], known: tuple[str, ...], needed: tuple[str, ...], where: str
) -> None:
    for key in table:
        if key not in known:
            raise DataError(
                f"key '{show_value(key)}' is unknown", where=where, expected=", ".join(known)
            )
    for key in needed:
        if key not in table:
            raise DataError(f"key '{key}' is missing", where=where)


def _number(value: object, low: float, high: float, where: str) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if good else math.nan  # type: ignore[arg-type]
    if not math.isfinite(number) or not low <= number <= high or (low == 0 and number == 0):
        wanted = f"from {low:g} to {high:g}" if high < math.inf else "above 0"
        raise DataError(f"is {show_value(value)}", where=where, expected=f"a number {wanted}")
    return number
