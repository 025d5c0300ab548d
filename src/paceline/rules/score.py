"""The score of one draft against the baseline, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import ResultError
from paceline.rules.contest import Rules

__all__ = ["Score", "ScoreTerm", "compute_score"]


@dataclass(frozen=True, kw_only=True)
class ScoreTerm:
    """points: what the term adds to the score. ratio may be infinite (a draft of 0 bytes)."""

    name: str
    ratio: float
    capped_ratio: float
    cap: float | None
    weight: float
    points: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """ranked: the gate is passed. The value below the gate is still the sum of the terms."""

    value: float
    ranked: bool
    terms: tuple[ScoreTerm, ...]
    minimum_tau_ratio: float


def compute_score(
    rules: Rules, *, tau_ratio: float, memory_ratio: float, tpot_ratio: float
) -> Score:
    """100 * (w_tau * tau/tau_B + w_memory * M_B/M + w_tpot * TPOT_B/TPOT), each ratio capped.

    The ratios are the candidate's advantage: above 1 is better than the baseline. Three ratios of
    1.0 give `baseline_score` exactly. Raises ResultError for a ratio that is no number, negative,
    or infinite without a cap.
    """
    ratios = {"tau": tau_ratio, "memory": memory_ratio, "tpot": tpot_ratio}
    terms = []
    for name, ratio in ratios.items():
        weight, cap = rules.weights[name], rules.caps[name]
        if math.isnan(ratio) or ratio < 0 or (math.isinf(ratio) and cap is None):
            raise ResultError(
                f"the {name} ratio is {ratio}", where="score", expected="a number from 0 upwards"
            )
        capped = ratio if cap is None else min(ratio, cap)
        points = rules.baseline_score * weight * capped
        terms.append(
            ScoreTerm(
                name=name, ratio=ratio, capped_ratio=capped, cap=cap, weight=weight, points=points
            )
        )
    # divided by the same sum, so that three ratios of 1.0 give exactly baseline_score even where
    # the weights of a rules file add up to 1 only nearly
    weighted = math.fsum(term.weight * term.capped_ratio for term in terms)
    total_weight = math.fsum(term.weight for term in terms)
    value = rules.baseline_score * (weighted / total_weight)
    return Score(
        value=value,
        ranked=tau_ratio >= rules.gate.minimum_tau_ratio,
        terms=tuple(terms),
        minimum_tau_ratio=rules.gate.minimum_tau_ratio,
    )
