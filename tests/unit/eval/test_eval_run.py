"""A whole run with scripted engines; every expected figure is worked out beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    GREEDY,
    TARGET,
    Script,
    ScriptedEndpoint,
    build_draft,
    build_facts,
    build_memory,
    build_prompts,
    build_request,
    build_rules,
)

from paceline.endpoint import TokenChoice
from paceline.errors import DataError, EngineError, ResultError
from paceline.eval import EvalPrompt, measure_run, read_answers, score_run

NAMES = ["chat-1", "chat-2", "code-1", "code-2"]
RULES = build_rules(
    min_tokens_for_tpot="4",
    num_resamples="200",
    num_categories="2",
    max_failure_share="0.25",
    min_steps_without_acceptance="8",
)
WARM_UP = [build_request("warm-1"), build_request("warm-2")]
WARM = {
    "warm-1": Script(steps=(None,), num_tokens=2),
    "warm-2": Script(steps=(None,), num_tokens=2),
}

# 9 tokens each: D = 8
PLAIN = Script(steps=(None,) * 8, num_tokens=9, step_ms=10.0)  # TPOT 10
BASE = Script(steps=((1, 3),) * 4, num_tokens=9, step_ms=12.0)  # S 4, TPOT 48/8 = 6
FAST = Script(steps=((3, 3),) * 2, num_tokens=9, step_ms=12.0)  # S 2, TPOT 24/8 = 3
CUT = Script(steps=((3, 3), (2, 3), (3, 3)), num_tokens=9, step_ms=8.0)  # S 3, last step cut to 1


class Arms:
    """The three engines of a run; `log` is the order in which they were asked."""

    def __init__(self, **changes: Any) -> None:
        self.log: list[tuple[str, str]] = []
        self.plain = self._open("plain", build_facts(), dict.fromkeys(NAMES, PLAIN))
        self.baseline = self._open(
            "baseline", build_facts("eagle3", 3), dict.fromkeys(NAMES, BASE), build_memory(900)
        )
        scripts = {"chat-1": FAST, "chat-2": FAST, "code-1": CUT, "code-2": CUT}
        self.candidate = self._open(
            "candidate", build_facts("eagle3", 3), scripts, build_memory(600)
        )
        self.arguments: dict[str, Any] = {
            "plain": self.plain,
            "baseline": self.baseline,
            "candidate": self.candidate,
            "drafts": {"baseline": build_draft("base"), "candidate": build_draft("mine")},
            "prompts": build_prompts(NAMES),
            "warm_up": WARM_UP,
            "rules": RULES,
            "target": TARGET,
            "prompt_set_name": "demo-eval",
            **changes,
        }

    def _open(self, name: str, facts: Any, scripts: Any, memory: Any = None) -> ScriptedEndpoint:
        return ScriptedEndpoint(
            facts, {**WARM, **scripts}, memory_facts=memory, log=self.log, name=name
        )

    def measure(self, out: Path, **changes: Any) -> dict[str, Any]:
        return measure_run(out_dir=out, **{**self.arguments, **changes})


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


# --- failures -----------------------------------------------------------------------------------


def fail(arms: Arms, *names: str) -> None:
    arms.candidate.scripts = {
        **arms.candidate.scripts,
        **dict.fromkeys(names, EngineError("timed out")),
    }


def test_a_failure_counts_as_decoding_without_a_draft(tmp_path: Path) -> None:
    arms = Arms()
    fail(arms, "chat-2")
    result = arms.measure(tmp_path)
    mine = result["arms"]["candidate"]
    # chat-2 stands as plain: D 8, S 8, TPOT 10
    assert mine["tau"]["by_category"]["chat"] == {
        "value": 16 / 10,
        "num_prompts": 2,
        "delivered": 16,
        "steps": 10,
    }
    assert mine["failures"] == 1
    assert mine["tpot_ms"]["num_requests"] == 4
    # ratios 6/3, 6/10 in chat; 2, 2 in code
    assert result["ratios"]["tpot"]["value"] == pytest.approx((2 * 0.6) ** 0.25 * 2**0.5)
    entry = next(e for e in mine["requests"] if e["id"] == "chat-2")
    assert (entry["failure"], entry["stands_for"]) == ("timed out.", "plain")
    assert result["score"]["ranked"]  # 25 % is what these rules allow
    assert score_run(tmp_path)["score"] == result["score"]


def test_too_many_failures_are_not_ranked(tmp_path: Path) -> None:
    arms = Arms()
    fail(arms, "chat-1", "code-1")
    score = arms.measure(tmp_path)["score"]
    assert not score["ranked"]
    assert score["reasons"] == ["'candidate' failed on 50.0% of the prompts"]


def test_a_failure_without_a_plain_arm_has_no_time(tmp_path: Path) -> None:
    arms = Arms()
    fail(arms, "chat-2")
    result = arms.measure(tmp_path, plain=None)
    entry = next(e for e in result["arms"]["candidate"]["requests"] if e["id"] == "chat-2")
    assert (entry["delivered"], entry["steps"], entry["tpot_ms"]) == (8, 8, None)
    assert result["ratios"]["tpot"]["num_excluded"] == 1


def test_a_dead_engine_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    names = [f"chat-{i}" for i in range(6)]
    arms = Arms(prompts=build_prompts(names))
    for endpoint, script in ((arms.plain, PLAIN), (arms.baseline, BASE)):
        endpoint.scripts = {**WARM, **dict.fromkeys(names, script)}
    dead = EngineError("the engine died")
    arms.candidate.scripts = {**WARM, **dict.fromkeys(names, dead), "chat-0": FAST}
    with pytest.raises(EngineError, match=r"arm 'candidate': 3 requests in a row failed.*died"):
        arms.measure(tmp_path)
    assert len(read_answers(tmp_path, "candidate")) == 1
    again = Arms(prompts=build_prompts(names))
    for name in ("plain", "baseline"):
        getattr(again, name).scripts = getattr(arms, name).scripts
    again.candidate.scripts = {**WARM, **dict.fromkeys(names, FAST)}
    result = again.measure(tmp_path)
    assert result["arms"]["candidate"]["failures"] == 0
    assert len(again.log) == 6 + 18 - 1 - len(
        {e for e in arms.log if e[1].startswith("chat") and e[0] != "candidate"}
    )


def test_an_unusable_answer_stops_at_once(tmp_path: Path) -> None:
    arms = Arms()
    arms.candidate.facts = build_facts("eagle3", 2)  # the scripts draft three
    with pytest.raises(EngineError, match="drafted"):
        arms.measure(tmp_path)


# --- going on after a stop ------------------------------------------------------------------------


def stop_after(num_answers: int) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        assert total == 12
        if done == num_answers:
            raise KeyboardInterrupt

    return show


@pytest.mark.parametrize("num_answers", [0, 1, 5, 11])
def test_a_stopped_run_goes_on(num_answers: int, tmp_path: Path) -> None:
    whole = Arms().measure(tmp_path / "whole")
    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        Arms().measure(out, on_progress=stop_after(num_answers))
    assert not (out / "result.json").exists()
    with open(out / "requests.jsonl", "a") as file:
        file.write('{"kind": "answer", "arm"')  # a write cut by a kill
    second = Arms()
    result = second.measure(out)
    assert len([1 for _, name in second.log if not name.startswith("warm")]) == 12 - num_answers
    assert result["ratios"]["tau"] == whole["ratios"]["tau"]
    assert result["ratios"]["tpot"]["value"] == pytest.approx(whole["ratios"]["tpot"]["value"])
    assert result["score"]["value"] == pytest.approx(whole["score"]["value"])
    for name in ("baseline", "candidate"):
        assert result["arms"][name]["vllm"] == whole["arms"][name]["vllm"]
    assert score_run(out)["score"] == result["score"]


def test_a_finished_run_is_only_written_again(tmp_path: Path) -> None:
    first = Arms().measure(tmp_path)
    (tmp_path / "result.json").unlink()
    again = Arms()
    assert again.measure(tmp_path)["score"] == first["score"]
    assert all(name.startswith("warm") for _, name in again.log)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 9}, "seed was 0, now 9"),
        ({"thinking": "on"}, "thinking was 'none', now 'on'"),
        ({"rules": build_rules(min_tokens_for_tpot="4")}, "rules was"),
        ({"prompts": build_prompts([*NAMES, "chat-3"])}, "prompts was"),
        ({"plain": None}, "arms was"),
        ({"drafts": {"baseline": build_draft("base")}}, "draft of 'candidate' was"),
    ],
)
def test_other_settings_are_refused(changes: Any, message: str, tmp_path: Path) -> None:
    Arms().measure(tmp_path)
    before = (tmp_path / "requests.jsonl").read_bytes()
    with pytest.raises(ResultError, match=message):
        Arms().measure(tmp_path, **changes)
    assert (tmp_path / "requests.jsonl").read_bytes() == before


def test_a_restart_between_requests_is_an_error(tmp_path: Path) -> None:
    arms = Arms()

    def restart(done: int, total: int) -> None:
        if done == 6:
            arms.candidate.restart()

    with pytest.raises(ResultError, match="server restarted"):
        arms.measure(tmp_path, on_progress=restart)


# --- what would make a run unfair -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": build_prompts(["chat-1", "chat-1"])}, "same id"),
        (
            {
                "prompts": [
                    EvalPrompt(category="chat", request=build_request("chat-1")),
                    EvalPrompt(
                        category="chat",
                        request=replace(build_request("chat-1"), request_id="chat-9"),
                    ),
                ]
            },
            "same text",
        ),
        ({"warm_up": [build_request("chat-1"), build_request("warm-1")]}, "measured as well"),
        ({"warm_up": WARM_UP[:1]}, "1 warm-up prompts"),
        (
            {
                "prompts": [
                    *build_prompts(NAMES),
                    EvalPrompt(
                        category="chat",
                        request=build_request("chat-3", sampling=replace(GREEDY, max_tokens=5)),
                    ),
                ]
            },
            "differ in sampling",
        ),
    ],
)
def test_unfair_prompts_are_refused(changes: Any, message: str, tmp_path: Path) -> None:
    arms = Arms(**changes)
    with pytest.raises(DataError, match=message):
        arms.measure(tmp_path)
    assert arms.log == []


@pytest.mark.parametrize(
    "change", [{"dtype": "float16"}, {"prefix_caching": True}, {"enforce_eager": False}]
)
def test_unlike_engines_are_refused(change: Any, tmp_path: Path) -> None:
    arms = Arms()
    arms.candidate.facts = build_facts("eagle3", 3, **change)
    with pytest.raises(EngineError, match=f"has {next(iter(change))}"):
        arms.measure(tmp_path)


@pytest.mark.parametrize(
    ("prefix", "state", "ranked"),
    [
        ((25000, 22500), "warm; 90.0% of prefix queries hit", False),
        ((100000, 500), "cold; prefix caching on, 0.5% of its queries hit", True),
        ((None, None), "unknown", False),
    ],
)
def test_u36_prefix_cache(prefix: Any, state: str, ranked: bool, tmp_path: Path) -> None:
    arms = Arms()
    for endpoint in (arms.plain, arms.baseline, arms.candidate):
        endpoint.prefix = prefix
        endpoint.facts = replace(endpoint.facts, prefix_caching=True)
        endpoint.__post_init__()
    result = arms.measure(tmp_path)
    assert result["cache_state"] == state
    assert result["score"]["ranked"] is ranked
    assert bool(result["score"]["reasons"]) is not ranked


@pytest.mark.parametrize(
    ("settings", "ranked"),
    [
        ({"additional_config": {"paceline": {"cache_tokens": 0}}}, True),
        ({"additional_config": {"paceline": {"cache_tokens": 4096}}}, False),
        ({"speculative_config": {"method": "suffix"}}, False),  # vLLM's own keeps 10,000
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_cached_requests": 0}},
            True,
        ),
        ({"speculative_config": {"method": "ngram"}}, True),
    ],
)
def test_a_draft_that_remembers_earlier_answers_is_not_ranked(
    settings: dict[str, Any], ranked: bool, tmp_path: Path
) -> None:
    arms = Arms()
    arms.candidate.facts = replace(arms.candidate.facts, settings=settings)
    result = arms.measure(tmp_path)
    assert result["cache_state"].startswith("cold" if ranked else "warm; 'candidate' drafts from")
    assert result["score"]["ranked"] is ranked
    assert any("no state" in reason for reason in result["score"]["reasons"]) is not ranked


def test_deviations_from_the_rules_are_listed(tmp_path: Path) -> None:
    rules = build_rules(
        min_tokens_for_tpot="4", num_resamples="200", max_tokens="1024", families='["mtp"]'
    )
    score = Arms(rules=rules).measure(tmp_path, prompt_set_name="mine")["score"]
    assert score["ranked"]
    assert score["deviations"] == [
        "prompt set is mine, the rules say demo-eval",
        "max_tokens is 48, the rules say 1024",
        "2 categories, the rules say 8",
        "family eagle3 is not one of mtp",
    ]


def test_synthetic_acceptance_is_not_ranked(tmp_path: Path) -> None:
    arms = Arms()
    arms.candidate.facts = build_facts("eagle3", 3, rejection_sample_method="synthetic")
    assert not arms.measure(tmp_path)["score"]["ranked"]


def test_disagreeing_counters_are_reported(tmp_path: Path) -> None:
    arms = Arms()
    count = arms.candidate._count
    arms.candidate._count = lambda steps, k: count([*steps, (0, 3)], k)
    mine = arms.measure(tmp_path)["arms"]["candidate"]
    assert not mine["vllm"]["agrees"]
    assert mine["vllm"]["num_steps"] == 14
    assert mine["vllm"]["from_requests"]["num_steps"] == 10
    assert "counters say 28 tokens accepted in 14 steps" in mine["notes"][0]


def test_u26_thinking_and_target_mismatch_are_noted(tmp_path: Path) -> None:
    drafts = {
        "baseline": build_draft("base", thinking="none", tokenizer_sha256="t" * 64),
        "candidate": build_draft("mine", thinking="on", tokenizer_sha256="x" * 64),
    }
    result = Arms().measure(tmp_path, drafts=drafts)
    assert result["arms"]["baseline"]["notes"] == []
    assert result["arms"]["candidate"]["notes"] == [
        "trained with thinking on, measured with none",
        "trained on a target with another tokenizer_sha256",
    ]


# --- fidelity -------------------------------------------------------------------------------------


def forked(arms: Arms, gap: float) -> None:
    """The candidate leaves the plain text of code-1 at its third token."""
    tokens = (1000, 1001, 77, *range(1003, 1009))
    arms.candidate.scripts = {**arms.candidate.scripts, "code-1": replace(CUT, tokens=tokens)}
    prefix = (*b"code-1", 1000, 1001)
    view = TokenChoice(token_ids=(1002, 77), logprobs=(-0.5, -0.5 - gap))
    arms.plain.choices = {prefix: view}


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
