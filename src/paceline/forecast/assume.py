"""What a user believes of acceptance before any training, as a table a design can be asked of.

An assumption, never a result: every search prints it. The likelihood of position i, given that all
before it held, is 1 - (1 - first * decay**(i-1)) * (size / own size)**(-size_power), times a factor
for each setting that costs acceptance. `size` counts the parameters of the draft's layers, for
medusa those of one head, against the family's own design of the target's sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import RecipeError
from paceline.problems import show_value

__all__ = ["FACTOR_KEYS", "Assumption", "expected_length", "parse_assumption"]

# Settings that make a draft cheaper and never better: a space that varies one must say its price.
FACTOR_KEYS = (
    "draft_vocab_size",
    "weights",
    "window",
    "kv_dtype",
    "num_taps",
    "one_head",
    "parallel",
)


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """first: share of steps whose first drafted token holds. decay: of that share, for each later
    position. size_power: 0 where size is believed to change nothing. factors: setting -> value (as
    text) -> factor on every position's share.
    """

    first: float
    decay: float
    size_power: float = 0.0
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def shares(self, num_speculative_tokens: int, *, size: float, factor: float) -> list[float]:
        """Conditional share of each position. size: layer parameters over the family's own."""
        shrink = size ** (-self.size_power) if self.size_power else 1.0
        found = []
        for position in range(num_speculative_tokens):
            missed = 1.0 - self.first * self.decay**position
            found.append(max(0.0, 1.0 - min(1.0, missed * shrink)) * factor)
        return found

    def factor(self, settings: Mapping[str, Any], *, where: str) -> float:
        """Product over the settings that have a price. Raises RecipeError for a value without."""
        total = 1.0
        for key, prices in self.factors.items():
            if key not in settings:
                continue
            value = spell(settings[key])
            if value not in prices:
                raise RecipeError(
                    f"no factor for {key} = {show_value(value)}",
                    where=where,
                    expected=f"one of {', '.join(prices)}, or a factor for it",
                )
            total *= prices[value]
        return total


def expected_length(shares: list[float]) -> float:
    """Acceptance length, bonus token included: 1 + sum of the products of conditional shares."""
    held, total = 1.0, 1.0
    for share in shares:
        held *= share
        total += held
    return total


def spell(value: Any) -> str:
    """A setting's value as a key of a factor table: true, 32768, w4a16."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_assumption(table: object, *, where: str) -> Assumption:
    """One [acceptance.FAMILY] table. Raises RecipeError for a key or number that means nothing."""
    if not isinstance(table, dict):
        raise RecipeError("is not a table", where=where, expected="first, decay, size_power")
    for key in table:
        if key not in ("first", "decay", "size_power", "factors"):
            raise RecipeError(
                f"key '{show_value(key)}' is unknown",
                where=where,
                expected="first, decay, size_power, factors",
            )
    first = _number(table, "first", where, high=1.0)
    decay = _number(table, "decay", where, high=1.0)
    power = _number({"size_power": 0.0, **table}, "size_power", where, high=2.0)
    factors = table.get("factors", {})
    if not isinstance(factors, dict):
        raise RecipeError("is not a table", where=f"{where}.factors")
    prices: dict[str, dict[str, float]] = {}
    for key, values in factors.items():
        inner = f"{where}.factors.{key}"
        if key not in FACTOR_KEYS or not isinstance(values, dict):
            raise RecipeError(
                "is no table of factors", where=inner, expected=f"one of {', '.join(FACTOR_KEYS)}"
            )
        prices[key] = {name: _number(values, name, inner, high=1.0) for name in values}
    return Assumption(first=first, decay=decay, size_power=power, factors=prices)


def _number(table: Mapping[str, Any], key: str, where: str, *, high: float) -> float:
    value = table.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(float(value or 0)) or not 0 <= float(value or 0) <= high:
        raise RecipeError(
            f"key '{key}' is missing" if value is None else f"{key} is {show_value(value)}",
            where=where,
            expected=f"a number from 0 to {high:g}",
        )
    return float(value or 0)
