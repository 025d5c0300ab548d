"""The logs of three ratios, candidate's advantage over baseline, each with its influence cells.

A cell says by how much one prompt in one block moves the figure (the delta method): what the
interval of a smooth figure needs, without drawing anything. For medians the density at the median
is estimated by a narrow kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.eval.pairing import Arm, Pairing
from paceline.eval.statistics import Spread, measure_spread

__all__ = ["Figure", "geomean_figure", "medians_figure", "spread_over_prompts", "tau_figure"]

Array = NDArray[np.float64]

# of Silverman's bandwidth, which smooths a median's density away: chosen in bench/coverage.py
_BANDWIDTH = 0.6 * 1.06


@dataclass(frozen=True, kw_only=True)
class Figure:
    """value: the ratio. cells: one array [prompts counted, blocks] a category, for its log.

    counted: for each category the prompts (rows of the pairing) that the cells stand for. weights:
    what each category counts for.
    """

    value: float
    cells: tuple[Array, ...]
    counted: tuple[NDArray[np.bool_], ...]
    weights: tuple[float, ...]

    @property
    def spread(self) -> Spread | None:
        """Of the figure's log."""
        return measure_spread(self.cells, self.weights)

    @property
    def log(self) -> float:
        return math.log(self.value)


def tau_figure(pairing: Pairing) -> Figure | None:
    """tau of the candidate over tau of the baseline: sums within a category, mean across them."""
    mine, base = _tau_cells(pairing.candidate), _tau_cells(pairing.baseline)
    if mine is None or base is None or not mine[0] or not base[0]:
        return None
    return Figure(
        value=mine[0] / base[0],
        cells=tuple(a - b for a, b in zip(mine[1], base[1], strict=True)),
        counted=tuple(np.ones(size, dtype=np.bool_) for size in pairing.sizes),
        weights=(1.0,) * len(pairing.sizes),
    )


def _tau_cells(arm: Arm) -> tuple[float, list[Array]] | None:
    """(tau, influence on log tau); None where no category has a step."""
    ratios = [
        float(delivered.sum() / steps.sum()) if steps.sum() else None
        for delivered, steps in zip(arm.delivered, arm.steps, strict=True)
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return None
    tau = sum(known) / len(known)
    cells = [
        np.zeros_like(steps)
        if ratio is None or not tau
        else (delivered - ratio * steps) / steps.mean() / (len(known) * tau)
        for delivered, steps, ratio in zip(arm.delivered, arm.steps, ratios, strict=True)
    ]
    return tau, cells


def geomean_figure(pairing: Pairing) -> Figure | None:
    """Mean over categories of the mean log of TPOT_B / TPOT: every category counts alike."""
    logs = [
        base - mine
        for base, mine in zip(pairing.baseline.log_tpot, pairing.candidate.log_tpot, strict=True)
    ]
    counted = tuple(_is_known(values) for values in logs)
    kept = [values[rows] for values, rows in zip(logs, counted, strict=True)]
    num_known = sum(1 for values in kept if len(values))
    if not num_known:
        return None
    means = [float(values.mean()) if len(values) else 0.0 for values in kept]
    return Figure(
        value=math.exp(sum(means) / num_known),
        cells=tuple((v - mean) / num_known for v, mean in zip(kept, means, strict=True)),
        counted=counted,
        weights=(1.0,) * len(kept),
    )


def medians_figure(pairing: Pairing) -> Figure | None:
    """Median TPOT_B over all prompts over median TPOT; of several blocks the geometric mean."""
    counted = tuple(
        _is_known(base + mine)
        for base, mine in zip(pairing.baseline.log_tpot, pairing.candidate.log_tpot, strict=True)
    )
    total = sum(int(rows.sum()) for rows in counted)
    if not total:
        return None
    values, cells = {}, {}
    for name, arm in (("baseline", pairing.baseline), ("candidate", pairing.candidate)):
        kept = [logs[rows] for logs, rows in zip(arm.log_tpot, counted, strict=True)]
        every = np.concatenate(kept)
        # of the times, not of their logs: between two middle ones that is not the same
        middle = np.log(np.median(np.exp(every), axis=0))
        density = np.array([_density(column, m) for column, m in zip(every.T, middle, strict=True)])
        values[name] = float(middle.mean())
        # of a prompt beside its block's median, and of the block beside the other blocks
        moved = middle - middle.mean()
        cells[name] = [
            (np.sign(logs - middle) / 2 / density + moved) * len(logs) / total for logs in kept
        ]
    return Figure(
        value=math.exp(values["baseline"] - values["candidate"]),
        cells=tuple(a - b for a, b in zip(cells["baseline"], cells["candidate"], strict=True)),
        counted=counted,
        weights=tuple(max(1.0, float(rows.sum())) / total for rows in counted),
    )


def _is_known(values: Array) -> NDArray[np.bool_]:
    """Rows without a NaN."""
    return np.asarray(np.isfinite(values).all(axis=1), dtype=np.bool_)


def _density(values: Array, at: float) -> float:
    """Gaussian kernel density; infinite (no spread) where all values are one."""
    low, high = np.quantile(values, [0.25, 0.75])
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    scale = min(spread, float(high - low) / 1.349) or spread
    if scale <= 1e-12:
        return math.inf
    width = _BANDWIDTH * scale * math.pow(len(values), -0.2)
    return (
        float(np.exp(-0.5 * ((values - at) / width) ** 2).mean()) / width / math.sqrt(2 * math.pi)
    )


def spread_over_prompts(figure: Figure) -> list[Array]:
    """The cells on all prompts of the pairing, 0 where one does not count: same means, added up."""
    result = []
    for cells, counted in zip(figure.cells, figure.counted, strict=True):
        every = np.zeros((len(counted), cells.shape[1]))
        if len(cells):
            every[counted] = cells * (len(counted) / len(cells))
        result.append(every)
    return result
