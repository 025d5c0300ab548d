"""Runs whose texts differ: near ties count, real forks and loops are withheld from scoring."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import (
    GREEDY,
    Script,
    build_prompts,
)
from scripted_arms import BASE, NAMES, WARM, Arms, forked

from paceline.endpoint import TokenChoice
from paceline.eval import score_run


def test_u39_a_near_tie_is_counted_and_ranked(tmp_path: Path) -> None:
    arms = Arms()
    forked(arms, 0.125)
    result = arms.measure(tmp_path)
    found = result["fidelity"]["candidate"]
    assert (found["identical"], found["near_tie"], found["real_fork"]) == (3, 1, 0)
    assert found["max_near_tie_gap"] == 0.125
    assert result["fidelity"]["baseline"]["identical"] == 4
    assert result["score"]["ranked"]
    assert score_run(tmp_path)["score"] == result["score"]


def test_u35_a_real_fork_is_withheld_from_scoring(tmp_path: Path) -> None:
    arms = Arms()
    forked(arms, 5.6)
    result = arms.measure(tmp_path)
    assert result["fidelity"]["candidate"]["real_fork"] == 1
    assert result["withheld"] == {
        "candidate": ["its text is not the target's: 1 of 4 answers really fork"]
    }
    assert result["score"] is None
    assert result["notes"][-1] == "no score: candidate withheld by the fidelity gate"
    assert result["ratios"]["tau"]["value"] > 1  # measured all the same
    assert score_run(tmp_path) == result


def test_the_corruption_alarm_a_looping_arm_with_wonderful_acceptance(tmp_path: Path) -> None:
    """Loops are easy to guess: every drafted token held, and the arm is four times as fast."""
    names = [f"{category}-{i}" for category in ("chat", "code") for i in range(6)]
    plain = Script(steps=(None,) * 32, num_tokens=33)
    base = Script(steps=((1, 3),) * 16, num_tokens=33)
    loop = Script(steps=((3, 3),) * 8, num_tokens=33, tokens=(1000, 7, 8, *(7, 8) * 15))
    arms = Arms(prompts=build_prompts(names))
    for endpoint, script in ((arms.plain, plain), (arms.baseline, base), (arms.candidate, loop)):
        endpoint.scripts = {**WARM, **dict.fromkeys(names, script)}
    # each loop begins at a near tie, so that only the loop itself can give it away
    view = TokenChoice(token_ids=(1001, 7), logprobs=(-0.7, -0.7))
    arms.plain.choices = {(*name.encode(), 1000): view for name in names}
    result = arms.measure(tmp_path)
    assert result["ratios"]["tau"]["value"] == 2.0
    assert result["arms"]["candidate"]["vllm"]["acceptance_rate"] == 1.0
    assert result["ratios"]["tpot"]["value"] == pytest.approx(2.0)
    assert result["fidelity"]["candidate"]["near_tie"] == 12
    assert result["withheld"]["candidate"][0] == (
        "it loops in 12 of 12 answers where the target does not"
    )
    assert result["score"] is None
    assert score_run(tmp_path) == result


def test_a_baseline_that_fails_the_gate_gives_no_score_either(tmp_path: Path) -> None:
    arms = Arms()
    tokens = (1000, 77, *range(1002, 1009))
    arms.baseline.scripts = {**arms.baseline.scripts, "code-1": replace(BASE, tokens=tokens)}
    view = TokenChoice(token_ids=(1001, 77), logprobs=(-0.1, -6.0))
    arms.plain.choices = {(*b"code-1", 1000): view}
    result = arms.measure(tmp_path)
    assert list(result["withheld"]) == ["baseline"]
    assert result["score"] is None


def test_likelihood_is_asked_of_texts_that_differ(tmp_path: Path) -> None:
    arms = Arms()
    forked(arms, 0.125)
    tokens = (1000, 1001, 77, *range(1003, 1009))
    arms.plain.nll_nats = {tokens: 0.9}
    result = arms.measure(tmp_path)
    found = result["fidelity"]["candidate"]["differences"]["nll_nats"]
    assert found["num_texts"] == 4  # three are plain's own text
    assert found["mean"] == pytest.approx((0.9 - 0.5) / 4)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    scored = [(row["arm"], row["id"]) for row in rows if row["kind"] == "likelihood"]
    assert scored == [("plain", "code-1"), ("candidate", "code-1")]
    assert score_run(tmp_path) == result


def test_sampled_text_is_screened_but_not_classed(tmp_path: Path) -> None:
    sampling = replace(GREEDY, temperature=0.8, seed=1)
    prompts = [
        replace(p, request=replace(p.request, sampling=sampling)) for p in build_prompts(NAMES)
    ]
    arms = Arms()
    forked(arms, 0.125)
    arms.plain.choices = {}  # never asked
    found = arms.measure(tmp_path, prompts=prompts)["fidelity"]["candidate"]
    assert found["real_fork"] is None
    assert found["loops"]["arm"]["num_looping"] == 0
    assert found["differences"]["nll_nats"]["num_texts"] == 4
