"""A whole run with scripted engines; every expected figure is worked out beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import (
    Script,
    build_draft,
    build_facts,
    build_rules,
)
from scripted_arms import NAMES, WARM, Arms

from paceline.eval import score_run


def test_figures_by_hand(tmp_path: Path) -> None:
    result = Arms().measure(tmp_path)
    plain, base, mine = (result["arms"][name] for name in ("plain", "baseline", "candidate"))
    assert plain["tau"]["value"] == 1.0
    assert plain["vllm"] is None
    assert base["tau"]["value"] == 2.0
    # chat: 16 delivered in 4 steps; code: 16 in 6
    assert mine["tau"]["by_category"] == {
        "chat": {"value": 4.0, "num_prompts": 2, "delivered": 16, "steps": 4},
        "code": {"value": 16 / 6, "num_prompts": 2, "delivered": 16, "steps": 6},
    }
    assert mine["tau"]["value"] == (4 + 16 / 6) / 2
    # vLLM counts what the stop cut: accepted 2*6 + 2*8 = 28 in 10 steps
    assert mine["vllm"]["acceptance_length"] == 3.8
    assert mine["vllm"]["acceptance_rate"] == 28 / 30
    assert mine["vllm"]["position_acceptance"] == [1.0, 1.0, 0.8]
    assert mine["vllm"]["agrees"]
    assert mine["position_acceptance_by_category"]["code"] == pytest.approx([1.0, 1.0, 2 / 3])
    assert mine["coverage"] == 1.0
    assert plain["coverage"] is None
    assert plain["tpot_ms"]["median"] == pytest.approx(10.0)
    assert base["tpot_ms"]["median"] == pytest.approx(6.0)
    assert mine["tpot_ms"]["median"] == pytest.approx(3.0)  # 24/8 and 24/8
    assert mine["ttft_ms"]["median"] == pytest.approx(100.0)
    assert mine["step_ms"] == pytest.approx((4 * 24) / 10)  # 96 ms in 10 steps
    assert mine["failures"] == 0
    assert result["ratios"]["tau"]["value"] == (4 + 16 / 6) / 2 / 2
    assert result["ratios"]["memory"]["value"] == 1.5
    assert result["ratios"]["tpot"]["value"] == pytest.approx(2.0)
    # 100 * (0.5 * 5/3 + 0.25 * 1.5 + 0.25 * 2)
    assert result["score"]["value"] == pytest.approx(100 * (5 / 6 + 0.375 + 0.5))
    assert result["score"]["ranked"]
    assert result["score"]["reasons"] == []
    assert result["score"]["deviations"] == []
    assert result["cache_state"] == "cold; prefix caching off"
    assert result["prompts"]["categories"] == {"chat": 2, "code": 2}
    assert result["fidelity"]["candidate"]["identical"] == 4
    assert result["arms"]["candidate"]["memory"]["total_bytes"] == 600
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_arms_are_interleaved_in_a_seeded_order_after_a_warm_up(tmp_path: Path) -> None:
    arms, again, other = Arms(), Arms(), Arms()
    arms.measure(tmp_path / "a", seed=1)
    again.measure(tmp_path / "b", seed=1)
    other.measure(tmp_path / "c", seed=2)
    assert arms.log == again.log
    assert arms.log != other.log
    warm, measured = arms.log[:6], arms.log[6:]
    assert {request for _, request in warm} == {"warm-1", "warm-2"}
    rounds = [measured[i : i + 3] for i in range(0, 12, 3)]
    for name, asked in zip(NAMES, rounds, strict=True):
        assert {request for _, request in asked} == {name}
        assert {arm for arm, _ in asked} == {"plain", "baseline", "candidate"}
    assert len({tuple(arm for arm, _ in asked) for asked in rounds}) > 1


def test_warm_up_is_not_in_the_figures(tmp_path: Path) -> None:
    arms = Arms()
    arms.candidate.scripts = {
        **arms.candidate.scripts,
        "warm-1": Script(steps=((0, 3),) * 30, num_tokens=31),
    }
    assert arms.measure(tmp_path)["arms"]["candidate"]["vllm"]["num_steps"] == 10


def test_candidate_that_is_the_baseline_scores_exactly_100(tmp_path: Path) -> None:
    arms = Arms()
    result = arms.measure(tmp_path, candidate=arms.baseline)
    assert result["score"]["value"] == 100.0
    assert (result["score"]["low"], result["score"]["high"]) == (100.0, 100.0)
    assert result["aliases"] == {"candidate": "baseline"}
    assert result["arms"]["candidate"] == result["arms"]["baseline"]
    assert [arm for arm, _ in arms.log].count("baseline") == 6  # measured once
    assert score_run(tmp_path)["score"]["value"] == 100.0


def test_a_baseline_that_is_the_plain_target_is_measured_once(tmp_path: Path) -> None:
    arms = Arms()
    result = arms.measure(tmp_path, baseline=arms.plain, drafts={"candidate": build_draft("mine")})
    assert result["aliases"] == {"baseline": "plain"}
    assert result["ratios"]["tau"]["value"] == (4 + 16 / 6) / 2
    assert result["ratios"]["memory"]["value"] == 0.0  # nothing against 600 bytes
    assert list(result["fidelity"]) == ["candidate"]
    assert score_run(tmp_path)["score"] == result["score"]


def test_without_a_baseline_there_is_no_score(tmp_path: Path) -> None:
    result = Arms().measure(tmp_path, baseline=None)
    assert result["ratios"] is None
    assert result["score"] is None
    assert result["arms"]["candidate"]["tau"]["value"] == (4 + 16 / 6) / 2
    assert score_run(tmp_path)["score"] is None


def test_without_a_plain_arm_there_is_no_fidelity(tmp_path: Path) -> None:
    result = Arms().measure(tmp_path, plain=None)
    assert result["fidelity"] is None
    assert result["withheld"] == {}
    assert result["score"]["value"] > 100
    assert not result["score"]["ranked"]
    assert result["score"]["reasons"] == [
        "the texts were not compared with the target's own: it was not served alone"
    ]


def test_a_model_free_candidate_costs_no_memory(tmp_path: Path) -> None:
    arms = Arms()
    arms.candidate.memory_facts = None
    arms.candidate.facts = build_facts("ngram", 3)
    result = arms.measure(tmp_path, drafts={"baseline": build_draft("base")})
    assert result["arms"]["candidate"]["draft"] is None
    assert result["ratios"]["memory"]["unbounded"]
    assert result["score"]["terms"]["memory"]["points"] == 50.0
    assert score_run(tmp_path)["score"]["value"] == result["score"]["value"]


def test_memory_that_was_not_measured_is_not_zero(tmp_path: Path) -> None:
    arms = Arms()
    arms.candidate.memory_facts = None
    result = arms.measure(tmp_path)
    assert result["score"] is None
    assert result["notes"][-1] == "no score: memory not measured"


def test_u08_a_draft_that_contributes_nothing(tmp_path: Path) -> None:
    arms = Arms()
    arms.candidate.scripts = {
        **WARM,
        **dict.fromkeys(NAMES, Script(steps=((0, 3),) * 8, num_tokens=9)),
    }
    result = arms.measure(tmp_path)
    mine = result["arms"]["candidate"]
    assert mine["tau"]["value"] == 1.0
    assert mine["notes"] == ["the draft contributes nothing: acceptance length 1.00 in 32 steps"]
    few = build_rules(
        min_tokens_for_tpot="4", num_resamples="200", min_steps_without_acceptance="33"
    )
    assert Arms().measure(tmp_path / "b", rules=few)["arms"]["candidate"]["notes"] == []


def test_below_the_gate_is_not_ranked(tmp_path: Path) -> None:
    rules = build_rules(
        min_tokens_for_tpot="4", num_resamples="200", num_categories="2", minimum_tau_ratio="0.8"
    )
    arms = Arms(rules=rules)
    arms.candidate.scripts = {
        **WARM,
        **dict.fromkeys(NAMES, Script(steps=(None,) * 8, num_tokens=9)),
    }
    score = arms.measure(tmp_path)["score"]
    assert not score["ranked"]
    assert not score["gate"]["passed"]
    assert score["reasons"] == ["acceptance is 0.500 of the baseline's, below the gate of 0.8"]
