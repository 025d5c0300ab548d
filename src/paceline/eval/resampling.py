"""Resampled figures with their own spread: studentised intervals, and joint draws for ranks.

A ratio of sums over few prompts is skewed, and a Student interval around it misses to one side. The
share of resamples whose |figure* - figure| / spread* stays below a bound gives a bound that knows
the skew (the symmetric bootstrap-t; Hall 1988).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.eval.pairing import Arm, Pairing

__all__ = ["Replicates", "draw_replicates", "studentised_quantile"]

Array = NDArray[np.float64]

_CHUNK = 1000


@dataclass(frozen=True, kw_only=True)
class Replicates:
    """One value a resample. log_tau: of the ratio; tpot: how far log TPOT_B / TPOT moved.

    tau_tau, tau_tpot, tpot_tpot: variances and covariance, estimated inside each resample, of
    categories with two prompts or more.
    """

    log_tau: Array
    tpot: Array
    tau_tau: Array
    tau_tpot: Array
    tpot_tpot: Array

    def variance(self, tau_weight: Array | float, tpot_weight: Array | float) -> Array:
        """Of tau_weight * log tau + tpot_weight * log TPOT ratio."""
        return np.asarray(
            tau_weight**2 * self.tau_tau
            + 2 * tau_weight * tpot_weight * self.tau_tpot
            + tpot_weight**2 * self.tpot_tpot,
            dtype=np.float64,
        )


def draw_replicates(
    pairing: Pairing, tpot_cells: Sequence[Array], draws: Sequence[NDArray[np.int64]]
) -> Replicates:
    """Figures of every resample of prompts (draws: from `draw_resamples`, by category).

    tpot_cells: [prompts, blocks] a category, on all prompts (`spread_over_prompts`). Blocks are
    summed first: their spread is added analytically, prompts alone are drawn.
    """
    num = len(draws[0])
    parts = [
        _draw_chunk(pairing, tpot_cells, [index[start : start + _CHUNK] for index in draws])
        for start in range(0, num, _CHUNK)
    ]
    log_tau, tpot, tau_tau, tau_tpot, tpot_tpot = (
        np.concatenate([part[i] for part in parts]) for i in range(5)
    )
    return Replicates(
        log_tau=log_tau, tpot=tpot, tau_tau=tau_tau, tau_tpot=tau_tpot, tpot_tpot=tpot_tpot
    )


def _draw_chunk(
    pairing: Pairing, tpot_cells: Sequence[Array], draws: Sequence[NDArray[np.int64]]
) -> tuple[Array, ...]:
    num = len(draws[0])
    mine_tau, mine = _draw_tau(pairing.candidate, draws)
    base_tau, base = _draw_tau(pairing.baseline, draws)
    tpot = np.zeros(num)
    variances = np.zeros((3, num))
    for index, a, b, cells in zip(draws, mine, base, tpot_cells, strict=True):
        size = index.shape[1]
        times = cells.mean(axis=1)[index]
        tpot += times.mean(axis=1)
        if size == 1:  # the same in every resample: its spread is added afterwards
            continue
        tau = a - b
        tau -= tau.mean(axis=1, keepdims=True)
        times -= times.mean(axis=1, keepdims=True)
        pairs = ((tau, tau), (tau, times), (times, times))
        own = np.stack([np.einsum("ij,ij->i", x, y) for x, y in pairs])
        variances += own / (size - 1) / size
    with np.errstate(divide="ignore", invalid="ignore"):
        log_tau = np.log(mine_tau) - np.log(base_tau)
    return (log_tau, tpot, *variances)


def _draw_tau(arm: Arm, draws: Sequence[NDArray[np.int64]]) -> tuple[Array, list[Array]]:
    """tau of each resample [R], and the influence of each drawn prompt on log tau [R, prompts]."""
    ratios, residuals = [], []
    for delivered_cells, steps_cells, index in zip(arm.delivered, arm.steps, draws, strict=True):
        delivered = delivered_cells.sum(axis=1)[index]
        steps = steps_cells.sum(axis=1)[index]
        total = steps.sum(axis=1)
        safe = np.where(total > 0, total, 1.0)
        ratio = delivered.sum(axis=1) / safe
        residuals.append((delivered - ratio[:, None] * steps) / (safe / steps.shape[1])[:, None])
        ratios.append(np.where(total > 0, ratio, math.nan))
    stacked = np.stack(ratios)
    num_known = (~np.isnan(stacked)).sum(axis=0)
    total_ratio = np.where(np.isnan(stacked), 0.0, stacked).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(total_ratio > 0, 1 / total_ratio, 0.0)
        tau = total_ratio / num_known
    return tau, [residual * scale[:, None] for residual in residuals]


def studentised_quantile(deviations: Array, variances: Array, *, confidence: float) -> float | None:
    """Bound on |deviation| / spread that `confidence` of the resamples keep; None without one.

    A resample that moved although it shows no spread counts as infinitely far out.
    """
    moved = np.abs(deviations)
    spread = np.sqrt(np.maximum(variances, 0.0))
    far = np.where(spread > 0, moved / np.where(spread > 0, spread, 1.0), math.inf)
    far = np.where(moved <= 1e-12, 0.0, far)
    far = np.where(np.isfinite(moved), far, math.inf)
    bound = float(np.quantile(far, confidence, method="higher"))
    return bound if math.isfinite(bound) else None
