"""Every expected number below is worked out by hand in its comment."""

from __future__ import annotations

import math

import pytest

from paceline.errors import ResultError
from paceline.rules import compute_score, parse_rules, read_rules

EMC2 = read_rules("emc2-2027")  # weights 0.5 / 0.25 / 0.25, caps none / 2 / 2, gate 0.8


def value(tau: float = 1.0, memory: float = 1.0, tpot: float = 1.0) -> float:
    return compute_score(EMC2, tau_ratio=tau, memory_ratio=memory, tpot_ratio=tpot).value


@pytest.mark.parametrize("name", ["demo", "emc2-2027"])
def test_baseline_scores_exactly_100(name: str) -> None:
    score = compute_score(read_rules(name), tau_ratio=1.0, memory_ratio=1.0, tpot_ratio=1.0)
    assert score.value == 100.0
    assert score.ranked


def test_baseline_is_exact_for_awkward_weights() -> None:
    text = EMC2.text.replace("weight = 0.50", "weight = 0.29")
    text = text.replace("weight = 0.25", "weight = 0.57", 1).replace(
        "weight = 0.25", "weight = 0.14"
    )
    score = compute_score(parse_rules(text), tau_ratio=1.0, memory_ratio=1.0, tpot_ratio=1.0)
    assert score.value == 100.0


def test_each_term_alone() -> None:
    assert value(tau=1.5) == 125.0  # 75 + 25 + 25
    assert value(memory=1.5) == 112.5  # 50 + 37.5 + 25
    assert value(tpot=0.5) == 87.5  # 50 + 25 + 12.5


def test_all_terms_together() -> None:
    # 100 * (0.5 * 0.9 + 0.25 * 1.6 + 0.25 * 1.2) = 45 + 40 + 30
    assert value(0.9, 1.6, 1.2) == pytest.approx(115.0, abs=1e-12)


def test_terms_report_their_points() -> None:
    score = compute_score(EMC2, tau_ratio=0.9, memory_ratio=3.0, tpot_ratio=1.2)
    points = {term.name: term.points for term in score.terms}
    assert points == pytest.approx({"tau": 45.0, "memory": 50.0, "tpot": 30.0}, abs=1e-12)
    memory = score.terms[1]
    assert (memory.ratio, memory.capped_ratio, memory.cap) == (3.0, 2.0, 2.0)
    assert math.fsum(points.values()) == pytest.approx(score.value, abs=1e-12)


def test_caps() -> None:
    assert value(memory=2.0) == 125.0
    assert value(memory=2.0001) == 125.0  # cut at 2
    assert value(memory=math.inf) == 125.0  # a draft of 0 bytes
    assert value(tpot=7.0) == 125.0
    assert value(tau=3.0) == 200.0  # tau has no cap


def test_gate_edge_passes() -> None:
    def ranked(tau: float) -> bool:
        return compute_score(EMC2, tau_ratio=tau, memory_ratio=2.0, tpot_ratio=2.0).ranked

    assert ranked(0.8)
    assert not ranked(math.nextafter(0.8, 0))
    assert ranked(1.0)
    assert not ranked(0.0)


def test_below_the_gate_the_value_is_still_the_sum() -> None:
    # a tiny draft that barely guesses: 100 * (0.5 * 0.4 + 0.25 * 2 + 0.25 * 0.6) = 85
    score = compute_score(EMC2, tau_ratio=0.4, memory_ratio=50.0, tpot_ratio=0.6)
    assert score.value == pytest.approx(85.0, abs=1e-12)
    assert not score.ranked


@pytest.mark.parametrize(
    "ratios", [(math.nan, 1.0, 1.0), (1.0, -0.1, 1.0), (math.inf, 1.0, 1.0), (1.0, 1.0, math.nan)]
)
def test_impossible_ratios_are_refused(ratios: tuple[float, float, float]) -> None:
    with pytest.raises(ResultError, match="ratio is"):
        value(*ratios)
