"""The candidate against the baseline: three ratios, the score, and their intervals.

Everything here is a pure function of per-request entries (see result.json, "requests"), memory
totals, rules and a seed, so that a score can be recomputed from its file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.eval.coverage import state_coverage
from paceline.eval.figures import (
    Figure,
    geomean_figure,
    medians_figure,
    spread_over_prompts,
    tau_figure,
)
from paceline.eval.pairing import Pairing, build_pairing, included_for_tpot
from paceline.eval.resampling import Replicates, draw_replicates, studentised_quantile
from paceline.eval.statistics import (
    MIN_DEGREES_OF_FREEDOM,
    Spread,
    draw_resamples,
    half_width,
    measure_spread,
)
from paceline.rules import Rules, Score, compute_score

__all__ = [
    "Measured",
    "ScoreParts",
    "compute_ratios",
    "describe_ratios",
    "find_score_parts",
    "measure_intervals",
    "measure_pairing",
    "memory_ratio",
]

Entry = Mapping[str, Any]
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A pairing's figures; tpot is the one that the rules score. replicates: None without both."""

    pairing: Pairing
    tau: Figure | None
    tpot: Figure | None
    replicates: Replicates | None


def memory_ratio(baseline_bytes: int | None, candidate_bytes: int | None) -> float | None:
    """M_B / M; infinite for a candidate of 0 bytes, 1.0 for two of 0; None when not measured."""
    if baseline_bytes is None or candidate_bytes is None:
        return None
    if candidate_bytes == 0:
        return 1.0 if baseline_bytes == 0 else math.inf
    return baseline_bytes / candidate_bytes


def measure_pairing(pairing: Pairing, rules: Rules, *, seed: int) -> Measured:
    """All figures of a pairing, and its resamples where some category has two prompts."""
    by_medians = rules.terms.tpot_statistic == "ratio_of_medians"
    tau = tau_figure(pairing)
    tpot = medians_figure(pairing) if by_medians else geomean_figure(pairing)
    replicates = None
    if tau is not None and max(pairing.sizes) >= 2:
        sizes = pairing.sizes
        draws = draw_resamples(sizes, num_resamples=rules.statistics.num_resamples, seed=seed)
        still = [np.zeros_like(steps) for steps in pairing.baseline.steps]
        cells = still if tpot is None else spread_over_prompts(tpot)
        replicates = draw_replicates(pairing, cells, draws)
    return Measured(
        pairing=pairing,
        tau=tau,
        tpot=tpot,
        replicates=replicates,
    )


def compute_ratios(
    arms: Mapping[str, Sequence[Entry]],
    memory_bytes: Mapping[str, int | None],
    rules: Rules,
    *,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Any] | None, list[str]]:
    """(ratios, score, notes) as result.json holds them; score None when a term is missing.

    arms: "baseline" and "candidate" (and "plain") -> entries of the same prompts.
    """
    included, num_excluded = included_for_tpot(arms, min_tokens=rules.protocol.min_tokens_for_tpot)
    pairing = build_pairing(arms["baseline"], arms["candidate"], included)
    memory = memory_ratio(memory_bytes["baseline"], memory_bytes["candidate"])
    tau, tpot, score = measure_intervals(pairing, memory, rules, seed=seed)
    finite = memory if memory is not None and math.isfinite(memory) else None
    ratios = {
        "tau": tau,
        "memory": {
            "value": finite,
            "low": finite,
            "high": finite,
            "unbounded": memory is not None and finite is None,
        },
        "tpot": {
            **tpot,
            "statistic": rules.terms.tpot_statistic,
            "ratio_of_medians": _value(medians_figure(pairing)),
            "paired_geomean": _value(geomean_figure(pairing)),
            "num_prompts": len(included),
            "num_excluded": num_excluded,
        },
    }
    notes = [
        f"no interval of {name}: {figure['not_measured']}"
        for name, figure in (("acceptance", tau), ("time", tpot))
        if figure["value"] is not None and figure["not_measured"]
    ]
    missing = [
        name
        for name, value in (("tau", tau["value"]), ("memory", memory), ("tpot", tpot["value"]))
        if value is None
    ]
    if missing:
        notes.append(f"no score: {', '.join(missing)} not measured")
        return ratios, None, notes
    return ratios, score, notes


def measure_intervals(
    pairing: Pairing, memory: float | None, rules: Rules, *, seed: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """(tau ratio, TPOT ratio, score) with their intervals; score None when a term is missing."""
    found = measure_pairing(pairing, rules, seed=seed)
    tau, tpot = describe_ratios(found, rules)
    if found.tau is None or found.tpot is None or memory is None:
        return tau, tpot, None
    return tau, tpot, _build_score(found, tau, tpot, memory, rules)


def describe_ratios(found: Measured, rules: Rules) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tau and TPOT ratios as result.json holds them."""
    confidence, quantile = rules.statistics.confidence, None
    if found.tau is not None and found.replicates is not None:
        moved = found.replicates.log_tau - found.tau.log
        quantile = studentised_quantile(moved, found.replicates.tau_tau, confidence=confidence)
    same, least = found.pairing.is_same, min(found.pairing.sizes)
    tau = _describe(
        found.tau, "tau", confidence, least=least, same=same, quantile=quantile, studentised=True
    )
    timed = [len(cells) for cells in found.tpot.cells if len(cells)] if found.tpot else [0]
    name = "medians" if rules.terms.tpot_statistic == "ratio_of_medians" else "geomean"
    return tau, _describe(found.tpot, name, confidence, least=min(timed), same=same)


def _value(figure: Figure | None) -> float | None:
    return None if figure is None else figure.value


def _describe(
    figure: Figure | None,
    name: str,
    confidence: float,
    *,
    least: int,
    same: bool,
    quantile: float | None = None,
    studentised: bool = False,
) -> dict[str, Any]:
    """A ratio as result.json holds it. least: prompts of the smallest category that counts.

    same: both arms are one measurement, so that the ratio is exact. studentised: its half-width
    needs `quantile`; without it the interval is not measured.
    """
    nothing = {"value": None, "low": None, "high": None, "degrees_of_freedom": None}
    if figure is None:
        return {**nothing, "coverage": None, "not_measured": None}
    spread = figure.spread
    half = 0.0 if same else None
    if not same and spread is not None and (not studentised or quantile is not None):
        half = half_width(spread, confidence=confidence, quantile=quantile)
    return {
        "value": figure.value,
        "low": None if half is None else figure.value * math.exp(-half),
        "high": None if half is None else figure.value * math.exp(half),
        "degrees_of_freedom": _show_freedom(spread),
        "coverage": None if half is None or same else state_coverage(name, least, confidence),
        "not_measured": _why_not(spread) if half is None else None,
    }


def _show_freedom(spread: Spread | None) -> float | None:
    if spread is None or not math.isfinite(spread.degrees_of_freedom):
        return None
    return spread.degrees_of_freedom


def _why_not(spread: Spread | None) -> str:
    needed = f"at least {MIN_DEGREES_OF_FREEDOM:g} are needed"
    if spread is None:
        return f"too few prompts: one in every category, {needed} beyond the first"
    return f"too few prompts: {spread.degrees_of_freedom:.1f} degrees of freedom, {needed}"


def _build_score(
    found: Measured,
    tau: Mapping[str, Any],
    tpot: Mapping[str, Any],
    memory: float,
    rules: Rules,
) -> dict[str, Any]:
    """The score as result.json holds it, with its interval. A cap flattens what lies beyond it."""
    score: Score = compute_score(
        rules, tau_ratio=tau["value"], memory_ratio=memory, tpot_ratio=tpot["value"]
    )
    interval = _score_interval(found, tau, tpot, rules)
    return {
        "value": score.value,
        "low": None if interval is None else max(0.0, score.value - interval[0]),
        "high": None if interval is None else score.value + interval[0],
        "coverage": None if interval is None else interval[1],
        "terms": {
            term.name: {
                "ratio": term.ratio if math.isfinite(term.ratio) else None,
                "capped_ratio": term.capped_ratio,
                "cap": term.cap,
                "weight": term.weight,
                "points": term.points,
            }
            for term in score.terms
        },
        "gate": {"minimum_tau_ratio": score.minimum_tau_ratio, "passed": score.ranked},
    }


@dataclass(frozen=True, kw_only=True)
class ScoreParts:
    """What the score moves by, in points: cells as a figure's, and one deviation a resample.

    variances: of each resample's own estimate. spread: with lone prompts' parts from both terms.
    """

    cells: tuple[Array, ...]
    spread: Spread
    deviations: Array
    variances: Array


def find_score_parts(
    found: Measured, tau: Mapping[str, Any], tpot: Mapping[str, Any], rules: Rules
) -> ScoreParts | None:
    """None where a term has no interval. tau, tpot: the described ratios of `found`."""
    if tau["low"] is None or tpot["low"] is None or found.tau is None or found.tpot is None:
        return None
    if found.replicates is None:
        return None
    by_tau, by_tpot = _slope(tau, "tau", rules), _slope(tpot, "tpot", rules)
    cells = tuple(
        by_tau * a + by_tpot * b
        for a, b in zip(found.tau.cells, spread_over_prompts(found.tpot), strict=True)
    )
    spread, of_tau, of_tpot = measure_spread(cells), found.tau.spread, found.tpot.spread
    if spread is None or of_tau is None or of_tpot is None:
        return None
    # both terms of a lone prompt may move together
    lone = (by_tau * math.sqrt(of_tau.lone) + by_tpot * math.sqrt(of_tpot.lone)) ** 2
    ratio = np.exp(found.replicates.log_tau - found.tau.log)
    deviations = by_tau * (ratio - 1) + by_tpot * np.expm1(found.replicates.tpot)
    variances = found.replicates.variance(by_tau * ratio, by_tpot * np.exp(found.replicates.tpot))
    return ScoreParts(
        cells=cells,
        spread=replace(spread, lone=lone),
        deviations=deviations,
        variances=variances,
    )


def _score_interval(
    found: Measured, tau: Mapping[str, Any], tpot: Mapping[str, Any], rules: Rules
) -> tuple[float, dict[str, Any] | None] | None:
    """(half-width, stated coverage) of the score; None where a term has no interval."""
    if found.pairing.is_same:
        return 0.0, None
    parts = find_score_parts(found, tau, tpot, rules)
    if parts is None:
        return None
    spread = parts.spread
    confidence = rules.statistics.confidence
    quantile = studentised_quantile(parts.deviations, parts.variances, confidence=confidence)
    if quantile is None:
        return None
    half = half_width(spread, confidence=confidence, quantile=quantile)
    if half is None:
        return None
    return half, state_coverage("score", min(found.pairing.sizes), confidence)


def _slope(ratio: Mapping[str, Any], name: str, rules: Rules) -> float:
    """Points of score for a step of 1 in the log of a ratio; 0 where all its interval is capped."""
    cap = rules.caps[name]
    if cap is not None and ratio["low"] >= cap:
        return 0.0
    points = rules.baseline_score * rules.weights[name] / math.fsum(rules.weights.values())
    return points * min(float(ratio["value"]), cap if cap is not None else math.inf)
