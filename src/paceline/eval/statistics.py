"""Spread of a figure over prompts and blocks, and intervals that hold for few prompts.

A figure comes with its *influence cells*: for each category an array [prompts, blocks] whose means,
added up, are how far the figure lies from its centre. Prompts are clusters in their category
(stratum); blocks, where a run has several, are shared by all prompts. Which interval belongs to
which figure was chosen by simulation: docs/results/coverage.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MIN_DEGREES_OF_FREEDOM",
    "Spread",
    "draw_resamples",
    "geometric_mean",
    "half_width",
    "measure_spread",
    "t_quantile",
]

Array = NDArray[np.float64]

# below this the estimated degrees of freedom are too wild for any t interval to hold
MIN_DEGREES_OF_FREEDOM = 4.0
ENOUGH_BLOCKS = 6
_SIMPSON_POINTS = 2001
_NOTHING = 1e-24


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Variance of a figure, by where it comes from.

    prompts: of categories with two prompts or more; freedom_of_prompts: Satterthwaite's degrees of
    freedom. lone: of categories of one prompt, as much as the others' prompts have on average;
    freedom_of_lone: of that average. blocks: of num_blocks of them, 1 for none.
    """

    prompts: float
    freedom_of_prompts: float
    lone: float = 0.0
    freedom_of_lone: float = math.inf
    blocks: float = 0.0
    num_blocks: int = 1

    @property
    def variance(self) -> float:
        return self.prompts + self.lone + self.blocks

    @property
    def degrees_of_freedom(self) -> float:
        """Of the whole, by Satterthwaite."""
        parts = [(self.prompts, self.freedom_of_prompts), (self.lone, self.freedom_of_lone)]
        parts += [(self.blocks, self.num_blocks - 1.0)]
        return _combine(parts, otherwise=self.freedom_of_prompts)

    @property
    def is_measured(self) -> bool:
        """Enough prompts for an interval; three that happen to be alike are not."""
        parts = [(self.prompts, self.freedom_of_prompts), (self.lone, self.freedom_of_lone)]
        return _combine(parts, otherwise=self.freedom_of_prompts) >= MIN_DEGREES_OF_FREEDOM


def _combine(parts: Sequence[tuple[float, float]], *, otherwise: float) -> float:
    """Satterthwaite: degrees of freedom of a sum of estimated variances."""
    known = [(variance, freedom) for variance, freedom in parts if variance > 0]
    if not known:
        return otherwise
    total = sum(variance for variance, _ in known)
    return total**2 / sum(variance**2 / freedom for variance, freedom in known)


def measure_spread(cells: Sequence[Array], weights: Sequence[float] | None = None) -> Spread | None:
    """Spread of a figure from its influence cells; None without two prompts in any category.

    weights: what each category counts for in the figure; None is all alike. Prompts: sum over
    categories of s^2 / n. Blocks: variance of the block means; from six blocks on less what the
    prompts' own noise puts into them, so that noise is counted once. Of fewer blocks that
    difference is itself mostly noise, and left in.
    """
    scales = np.ones(len(cells)) if weights is None else np.asarray(weights, dtype=np.float64)
    kept = [(cell, scale) for cell, scale in zip(cells, scales, strict=True) if cell.size]
    cells = [cell for cell, _ in kept]
    sizes = np.array([len(cell) for cell in cells])
    if not cells or sizes.max() < 2:
        return None
    scales = np.array([scale for _, scale in kept])
    means = [cell.mean(axis=1) for cell in cells]
    several = sizes >= 2
    freedoms = sizes[several] - 1
    squares = np.array([float(((mean - mean.mean()) ** 2).sum()) for mean in means])[several]
    parts = squares / freedoms / sizes[several]
    prompts = float(parts.sum())
    if prompts <= _NOTHING:  # rounding of prompts that are all alike
        prompts, of_prompts = 0.0, float(freedoms.sum())
    else:
        of_prompts = prompts**2 / float((parts**2 / freedoms).sum())
    average = float((squares / scales[several] ** 2).sum() / freedoms.sum())
    return Spread(
        prompts=prompts,
        freedom_of_prompts=of_prompts,
        lone=average * float((scales[~several] ** 2).sum()) if prompts else 0.0,
        freedom_of_lone=float(freedoms.sum()),
        blocks=_measure_blocks(cells),
        num_blocks=int(cells[0].shape[1]),
    )


def _measure_blocks(cells: Sequence[Array]) -> float:
    """Variance of the mean over blocks; 0 for a single block."""
    num_blocks = int(cells[0].shape[1])
    if num_blocks < 2:
        return 0.0
    by_block = np.sum([cell.mean(axis=0) for cell in cells], axis=0)
    observed = float(by_block.var(ddof=1)) / num_blocks
    if num_blocks < ENOUGH_BLOCKS:
        return observed
    noise: float = 0.0
    for cell in cells:
        if len(cell) < 2:
            continue
        rest = cell - cell.mean(axis=1, keepdims=True) - cell.mean(axis=0) + cell.mean()
        freedom = int((len(cell) - 1) * (num_blocks - 1))
        noise += float((rest**2).sum()) / freedom / (len(cell) * num_blocks)
    return max(0.0, observed - noise)


def half_width(spread: Spread, *, confidence: float, quantile: float | None = None) -> float | None:
    """Half of an interval, on the scale of the cells; None where it cannot be estimated.

    quantile: a studentised one found by resampling prompts, in place of Student's for their part.
    A lone prompt is never resampled, and a block neither: their parts have Student's.
    """
    if not spread.is_measured:
        return None
    tail = (1 + confidence) / 2
    of_prompts = t_quantile(tail, spread.freedom_of_prompts) if quantile is None else quantile
    squared = of_prompts**2 * spread.prompts
    if spread.lone:
        squared += t_quantile(tail, spread.freedom_of_lone) ** 2 * spread.lone
    if spread.blocks:
        squared += t_quantile(tail, spread.num_blocks - 1) ** 2 * spread.blocks
    return math.sqrt(squared)


def draw_resamples(
    group_sizes: Sequence[int], *, num_resamples: int, seed: int
) -> list[NDArray[np.int64]]:
    """Indices into each group, drawn with replacement: one array [num_resamples, size] a group.

    RandomState, unlike Generator, gives the same numbers in every numpy release, so a score's
    interval can be recomputed elsewhere.
    """
    random = np.random.RandomState(seed)
    return [
        random.randint(0, size, size=(num_resamples, size)).astype(np.int64) for size in group_sizes
    ]


@functools.lru_cache(maxsize=4096)
def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Quantile of Student's t; the normal's for infinitely many degrees of freedom.

    With t = sqrt(df) tan(a) its density is c cos(a)^(df - 1). Degrees of freedom are 1 or more and
    need not be whole.
    """
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees_of_freedom)
    df = min(degrees_of_freedom, 1e6)  # 1e-6 from the normal, which needs no case of its own
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(math.pi) / 2
    weights = np.ones(_SIMPSON_POINTS)
    weights[1:-1:2], weights[2:-1:2] = 4, 2

    def above_middle(angle: float) -> float:
        cosines = np.cos(np.linspace(0.0, angle, _SIMPSON_POINTS))
        density = np.exp(log_scale + (df - 1) * np.log(np.maximum(cosines, 1e-300)))
        return float(weights @ density) * angle / (_SIMPSON_POINTS - 1) / 3

    # beyond 40 standard deviations (wider for few degrees of freedom) there is nothing
    low, high = 0.0, math.pi / 2 if df < 100 else math.atan(40 / math.sqrt(df))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if above_middle(middle) < probability - 0.5 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def geometric_mean(values: Sequence[float] | NDArray[Any]) -> float:
    """exp(mean(log)); the values are positive and at least one."""
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=np.float64)))))
