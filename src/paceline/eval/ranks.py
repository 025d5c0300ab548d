"""Which of several scores differ for real, and the ranks that this leaves open.

All scores come from the same prompts, so their differences are paired by prompt. One bound holds
for all differences at once (the largest of them, studentised, over the same resamples), so that a
long table does not make differences by its length. What lies below the noise floor is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from paceline.eval.statistics import Spread, half_width, measure_spread, t_quantile

__all__ = ["Difference", "Standing", "compare_standings", "rank_standings"]

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One score, or the log of one ratio; cells and deviations are empty for a fixed value.

    cells: influence on it, [prompts, blocks] a category. deviations: one a resample, the same
    resamples for all standings. Prompts are shared between standings, blocks are not.
    """

    name: str
    value: float
    cells: tuple[Array, ...]
    deviations: Array


@dataclass(frozen=True, kw_only=True)
class Difference:
    """first's value less second's. half_width: None where there are too few prompts to say.

    verdict: "real", "noise" (within the interval), "tie" (within the noise floor) or "unknown".
    """

    first: str
    second: str
    value: float
    half_width: float | None
    verdict: str


def compare_standings(
    standings: Sequence[Standing], *, confidence: float, floor: float | None
) -> list[Difference]:
    """Every pair, in the order given. floor: differences up to it are ties; None for none known."""
    pairs = list(combinations(standings, 2))
    spreads = [_spread_between(one, other) for one, other in pairs]
    bound = _simultaneous_bound(pairs, spreads, confidence)
    found = []
    for (one, other), spread in zip(pairs, spreads, strict=True):
        value = one.value - other.value
        half = _half_width(spread, bound, confidence)
        found.append(
            Difference(
                first=one.name,
                second=other.name,
                value=value,
                half_width=half,
                verdict=_judge(value, half, floor),
            )
        )
    return found


def rank_standings(
    standings: Sequence[Standing], differences: Sequence[Difference]
) -> dict[str, tuple[int, int]]:
    """Name -> best and worst rank that the real differences leave open; more is better."""
    better: dict[str, int] = {standing.name: 0 for standing in standings}
    worse = dict(better)
    for found in differences:
        if found.verdict != "real":
            continue
        up, down = (found.first, found.second) if found.value > 0 else (found.second, found.first)
        worse[up] += 1
        better[down] += 1
    total = len(standings)
    return {name: (1 + better[name], total - worse[name]) for name in better}


def _judge(value: float, half: float | None, floor: float | None) -> str:
    if floor is not None and abs(value) <= floor:
        return "tie"
    if half is None:
        return "unknown"
    return "real" if abs(value) > half else "noise"


def _spread_between(one: Standing, other: Standing) -> Spread | None:
    """Of the difference: prompts paired, and the blocks of either side."""
    sides = [side.cells for side in (one, other) if side.cells]
    if not sides:
        return Spread(prompts=0.0, freedom_of_prompts=math.inf)
    means = [[cell.mean(axis=1, keepdims=True) for cell in cells] for cells in sides]
    paired = means[0] if len(means) == 1 else [a - b for a, b in zip(*means, strict=True)]
    spread = measure_spread(paired)
    if spread is None:
        return None
    own = [found for cells in sides if (found := measure_spread(cells)) is not None]
    return Spread(
        prompts=spread.prompts,
        freedom_of_prompts=spread.freedom_of_prompts,
        blocks=sum(found.blocks for found in own),
        num_blocks=min((found.num_blocks for found in own), default=1),
    )


def _simultaneous_bound(
    pairs: Sequence[tuple[Standing, Standing]],
    spreads: Sequence[Spread | None],
    confidence: float,
) -> float:
    """What the largest studentised difference of a resample stays below, `confidence` of them."""
    furthest: Array | None = None
    for (one, other), spread in zip(pairs, spreads, strict=True):
        if spread is None or not spread.prompts:
            continue
        moved = _subtract(one.deviations, other.deviations)
        scale = float(moved.std())
        if not scale:
            continue
        far = np.abs(moved) / scale
        furthest = far if furthest is None else np.maximum(furthest, far)
    normal = t_quantile((1 + confidence) / 2, math.inf)
    if furthest is None:
        return normal
    return max(normal, float(np.quantile(furthest, confidence, method="higher")))


def _subtract(one: Array, other: Array) -> Array:
    if not one.size or not other.size:
        return one if one.size else -other
    return one - other


def _half_width(spread: Spread | None, bound: float, confidence: float) -> float | None:
    """bound: for all pairs at once, as if the spread were known; its freedom widens it."""
    if spread is None:
        return None
    tail = (1 + confidence) / 2
    widened = t_quantile(tail, max(1.0, spread.freedom_of_prompts)) / t_quantile(tail, math.inf)
    return half_width(spread, confidence=confidence, quantile=bound * widened)
