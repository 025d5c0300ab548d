"""Ratios, caps and intervals from entries, against a plain loop and against numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scripted import build_rules

from paceline.eval.ratios import compute_ratios, included_for_tpot, memory_ratio
from paceline.eval.statistics import draw_resamples, interval

RULES = build_rules(min_tokens_for_tpot="4", num_resamples="500")
BY_MEDIANS = build_rules(
    min_tokens_for_tpot="4", num_resamples="500", tpot_statistic='"ratio_of_medians"'
)


def entry(name: str, delivered: int, steps: int, tpot: float | None, tokens: int = 9) -> Any:
    return {
        "id": name,
        "category": name.split("-")[0],
        "num_tokens": tokens,
        "delivered": delivered,
        "steps": steps,
        "tpot_ms": tpot,
    }


BASELINE = [
    entry("chat-1", 8, 4, 10.0),
    entry("chat-2", 4, 4, 12.0),
    entry("code-1", 9, 3, 8.0),
    entry("code-2", 9, 3, 6.0),
]
CANDIDATE = [
    entry("code-2", 8, 2, 3.0),
    entry("code-1", 8, 4, 8.0),
    entry("chat-1", 8, 4, 5.0),
    entry("chat-2", 9, 6, 12.0),
]
ARMS = {"baseline": BASELINE, "candidate": CANDIDATE}


def ratios(rules: Any = RULES, arms: Any = ARMS, memory: Any = None) -> Any:
    return compute_ratios(arms, memory or {"baseline": 300, "candidate": 200}, rules, seed=5)


def test_an_answer_of_just_enough_tokens_is_timed() -> None:
    arms = {
        "baseline": [entry("a-1", 3, 1, 2.0, tokens=4), entry("a-2", 2, 1, 2.0, tokens=3)],
        "candidate": [entry("a-1", 3, 1, 1.0, tokens=4), entry("a-2", 2, 1, 1.0, tokens=9)],
    }
    assert included_for_tpot(arms, min_tokens=4) == ({"a-1"}, 1)


def test_values_by_hand() -> None:
    found, score, notes = ratios()
    # baseline: chat 12/8 = 1.5, code 18/6 = 3 -> 2.25; candidate: chat 17/10, code 16/6
    tau = ((1.7 + 16 / 6) / 2) / 2.25
    assert found["tau"]["value"] == pytest.approx(tau, rel=1e-15)
    # ratios: chat 2, 1; code 1, 2 -> every category sqrt(2)
    assert found["tpot"]["value"] == pytest.approx(math.sqrt(2), rel=1e-15)
    # medians: baseline (8 + 10) / 2 = 9, candidate (5 + 8) / 2 = 6.5
    assert found["tpot"]["ratio_of_medians"] == pytest.approx(9 / 6.5, rel=1e-15)
    assert found["memory"] == {"value": 1.5, "low": 1.5, "high": 1.5, "unbounded": False}
    assert score["value"] == pytest.approx(
        100 * (0.5 * tau + 0.25 * 1.5 + 0.25 * math.sqrt(2)), rel=1e-14
    )
    assert notes == []


def test_the_rules_choose_the_statistic() -> None:
    found, score, _ = ratios(BY_MEDIANS)
    assert found["tpot"]["value"] == pytest.approx(9 / 6.5, rel=1e-15)
    assert found["tpot"]["statistic"] == "ratio_of_medians"
    assert score["terms"]["tpot"]["ratio"] == found["tpot"]["value"]


@pytest.mark.parametrize("rules", [RULES, BY_MEDIANS])
def test_intervals_against_a_plain_loop(rules: Any) -> None:
    """All three terms from the same draws, prompt by prompt, in Python floats."""
    found, score, _ = ratios(rules)
    names = [["chat-1", "chat-2"], ["code-1", "code-2"]]
    base, mine = ({e["id"]: e for e in arm} for arm in (BASELINE, CANDIDATE))
    draws = draw_resamples([2, 2], num_resamples=500, seed=5)
    taus, tpots, scores = [], [], []
    for r in range(500):
        drawn = [[group[i] for i in draw[r]] for group, draw in zip(names, draws, strict=True)]

        def tau(arm: Any, drawn: Any = drawn) -> float:
            return sum(
                sum(arm[n]["delivered"] for n in g) / sum(arm[n]["steps"] for n in g) for g in drawn
            ) / len(drawn)

        taus.append(tau(mine) / tau(base))
        if rules is RULES:
            logs = [
                sum(math.log(base[n]["tpot_ms"] / mine[n]["tpot_ms"]) for n in g) / len(g)
                for g in drawn
            ]
            tpots.append(math.exp(sum(logs) / len(logs)))
        else:
            flat = [n for g in drawn for n in g]
            tpots.append(
                float(
                    np.median([base[n]["tpot_ms"] for n in flat])
                    / np.median([mine[n]["tpot_ms"] for n in flat])
                )
            )
        scores.append(100 * (0.5 * taus[-1] + 0.25 * 1.5 + 0.25 * min(tpots[-1], 2.0)))
    for written, replicates in (
        (found["tau"], taus),
        (found["tpot"], tpots),
        (score, scores),
    ):
        low, high = interval(np.array(replicates), confidence=0.95, degrees_of_freedom=2)
        assert (written["low"], written["high"]) == pytest.approx((low, high), rel=1e-12)
    assert found["tau"]["low"] < found["tau"]["high"]


def test_short_answers_are_excluded_pairwise_and_counted() -> None:
    short = [entry("code-2", 8, 2, 3.0, tokens=3), *CANDIDATE[1:]]
    found, _, _ = ratios(arms={"baseline": BASELINE, "candidate": short})
    # chat: 2 and 1 -> sqrt(2); code: 1 alone
    assert found["tpot"]["value"] == pytest.approx(2**0.25, rel=1e-15)
    assert (found["tpot"]["num_prompts"], found["tpot"]["num_excluded"]) == (3, 1)


def test_a_short_answer_of_the_plain_arm_excludes_too() -> None:
    plain = [{**e, "num_tokens": 3 if e["id"] == "code-2" else 9} for e in BASELINE]
    found, _, _ = ratios(arms={"plain": plain, **ARMS})
    assert found["tpot"]["num_excluded"] == 1


def test_same_measurements_score_exactly_100() -> None:
    for rules in (RULES, BY_MEDIANS):
        found, score, _ = ratios(
            rules,
            {"baseline": BASELINE, "candidate": BASELINE},
            {"baseline": 300, "candidate": 300},
        )
        assert (score["value"], score["low"], score["high"]) == (100.0, 100.0, 100.0)
        assert found["tau"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_one_prompt_in_a_category_has_no_interval() -> None:
    arms = {name: [e for e in arm if e["id"] != "chat-2"] for name, arm in ARMS.items()}
    found, score, notes = ratios(arms=arms)
    assert found["tau"]["value"] is not None
    assert found["tau"]["low"] is None
    assert score["low"] is None
    assert notes == ["no intervals: they need two prompts in every category"]


def test_memory_not_measured_gives_no_score() -> None:
    found, score, notes = ratios(memory={"baseline": 300, "candidate": None})
    assert score is None
    assert found["memory"]["value"] is None
    assert notes == ["no score: memory not measured"]


def test_a_draft_of_no_bytes_gets_the_cap() -> None:
    found, score, _ = ratios(memory={"baseline": 300, "candidate": 0})
    assert found["memory"] == {"value": None, "low": None, "high": None, "unbounded": True}
    assert score["terms"]["memory"]["ratio"] is None
    assert score["terms"]["memory"]["capped_ratio"] == 2.0
    assert score["terms"]["memory"]["points"] == 50.0
    assert score["low"] < score["value"]


def test_no_time_gives_no_score() -> None:
    arms = {name: [{**e, "tpot_ms": None} for e in arm] for name, arm in ARMS.items()}
    found, score, notes = ratios(arms=arms)
    assert score is None
    assert found["tpot"]["value"] is None
    assert notes == ["no score: tpot not measured"]


def test_memory_ratio() -> None:
    assert memory_ratio(300, 200) == 1.5
    assert memory_ratio(0, 0) == 1.0
    assert memory_ratio(0, 200) == 0.0
    assert memory_ratio(300, 0) == math.inf
    assert memory_ratio(None, 200) is None
