"""Intervals for figures over prompts: a stratified bootstrap that holds for few prompts.

Prompts are the clusters, categories the strata, and one set of draws serves every arm and every
term, so paired figures stay paired. Of a category with n prompts each replicate draws n - 1: with n
draws the variance of a small category is too small by (n - 1) / n, half at two prompts (the
rescaled bootstrap of Rao and Wu, 1988). The percentiles are widened from the normal to Student's t
(the expanded percentile interval, Hesterberg 2015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_resamples", "geometric_mean", "interval", "t_quantile"]

_SIMPSON_POINTS = 2001


def draw_resamples(
    group_sizes: Sequence[int], *, num_resamples: int, seed: int
) -> list[NDArray[np.int64]]:
    """Indices into each group, one array [num_resamples, size - 1] a group; sizes are >= 2.

    RandomState, unlike Generator, gives the same numbers in every numpy release, so a score's
    interval can be recomputed elsewhere.
    """
    random = np.random.RandomState(seed)
    return [
        random.randint(0, size, size=(num_resamples, size - 1)).astype(np.int64)
        for size in group_sizes
    ]


def interval(
    replicates: NDArray[np.float64], *, confidence: float, degrees_of_freedom: int
) -> tuple[float, float]:
    """(low, high) of the replicates of one figure; degrees of freedom: prompts less categories."""
    tail = NormalDist().cdf(t_quantile((1 - confidence) / 2, degrees_of_freedom))
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return float(low), float(high)


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Quantile of Student's t. With t = sqrt(df) tan(a) its density is c cos(a)^(df - 1)."""
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees_of_freedom)
    df = degrees_of_freedom
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    weights = np.ones(_SIMPSON_POINTS)
    weights[1:-1:2], weights[2:-1:2] = 4, 2

    def above_middle(angle: float) -> float:
        density = np.cos(np.linspace(0.0, angle, _SIMPSON_POINTS)) ** (df - 1)
        return scale * float(weights @ density) * angle / (_SIMPSON_POINTS - 1) / 3

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if above_middle(middle) < probability - 0.5 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def geometric_mean(values: Sequence[float] | NDArray[Any]) -> float:
    """exp(mean(log)); the values are positive and at least one."""
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=np.float64)))))
