"""Prohibitions of a contest, on results with figures worked out by hand."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
from judge_process import RULES

from paceline.errors import ResultError
from paceline.judge import check_conduct, compare_sets
from paceline.judge import compare_orders as compare_orders_within
from paceline.judge.conduct import list_broken

ENGINE = {
    "vllm_version": "0.31.0",
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "rejection_sample_method": "standard",
    "prefix_caching": False,
    "target_architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "device_name": "toy",
    "max_model_len": 2048,
}
ARM = {
    "draft": {"family": "eagle3"},
    "engine": ENGINE,
    "prefix_cache": {"queries": 100, "hits": 0},
    "vllm": {"agrees": True},
}
RESULT: dict[str, Any] = {"arms": {"baseline": copy.deepcopy(ARM), "candidate": copy.deepcopy(ARM)}}


def change(**engine: Any) -> dict[str, Any]:
    result = copy.deepcopy(RESULT)
    result["arms"]["candidate"]["engine"].update(engine)
    return result


def test_a_clean_run_keeps_every_rule() -> None:
    assert [record["kept"] for record in check_conduct(RESULT, RULES)] == [True] * 12
    assert list_broken(check_conduct(RESULT, RULES)) == []


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"rejection_sample_method": "synthetic"}, "stock acceptance rule: found synthetic"),
        ({"vllm_version": "0.31.1"}, "stock engine: found 0.31.1, expected 0.31.0"),
        ({"method": "ngram"}, "the method that the draft's family names: found ngram"),
        ({"method": "suffix"}, "no method that learns from earlier requests: found True"),
        ({"num_speculative_tokens": 8}, "K of the rules: found 8, expected 3"),
        ({"prefix_caching": True}, "prefix cache off"),
        ({"dtype": "float16"}, "the same dtype in every arm"),
    ],
)
def test_each_prohibition(engine: dict[str, Any], words: str) -> None:
    assert any(words in line for line in list_broken(check_conduct(change(**engine), RULES)))


def test_hits_and_disagreeing_counters() -> None:
    result = copy.deepcopy(RESULT)
    result["arms"]["candidate"]["prefix_cache"]["hits"] = 2
    result["arms"]["candidate"]["vllm"]["agrees"] = False
    assert len(list_broken(check_conduct(result, RULES))) == 2
    result["arms"]["candidate"]["prefix_cache"] = None  # not shown is not broken, and is said
    result["arms"]["candidate"]["vllm"] = None
    records = check_conduct(result, RULES)
    assert list_broken(records) == []
    assert [record["kept"] for record in records].count(None) == 2


def build_run(taus: dict[str, float], order: list[str]) -> dict[str, Any]:
    entries = [{"id": name, "delivered": taus[name] * 100, "steps": 100} for name in order]
    return {"arms": {"candidate": {"requests": entries}}}


def compare_orders(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return compare_orders_within(first, second, noise=0.02, confidence=0.95)


NAMES = [f"p{i}" for i in range(40)]
SHUFFLED = random.Random(3).sample(NAMES, len(NAMES))


def skill(name: str) -> float:
    return 1.5 + 0.05 * (int(name[1:]) % 20)


def test_order_changes_nothing_for_a_stateless_draft() -> None:
    taus = {name: skill(name) for name in NAMES}
    found = compare_orders(build_run(taus, NAMES), build_run(taus, SHUFFLED))
    assert (found["ratio"], found["drift"], found["num_changed"]) == (1.0, 1.0, 0)
    assert found["same"] is True
    jitter = random.Random(1)
    noisy = {name: value * math.exp(jitter.gauss(0, 0.03)) for name, value in taus.items()}
    found = compare_orders(build_run(taus, NAMES), build_run(noisy, SHUFFLED))
    assert found["same"] is True
    assert found["low"] < 1 < found["high"]


def test_stateless_drafts_are_rarely_accused() -> None:
    """Near ties flip: 3 % of noise a prompt, 200 contests; at most 5 % may be taken for state."""
    random_numbers = random.Random(5)
    accused = 0
    for _ in range(200):
        taus = {name: skill(name) for name in NAMES}
        noisy = {
            name: value * math.exp(random_numbers.gauss(0, 0.03)) for name, value in taus.items()
        }
        order = random_numbers.sample(NAMES, len(NAMES))
        accused += compare_orders(build_run(taus, NAMES), build_run(noisy, order))["same"] is False
    assert accused <= 10


def test_a_draft_that_learns_from_earlier_requests_is_found() -> None:
    def learned(order: list[str]) -> dict[str, float]:
        return {name: skill(name) * (1 + 0.2 * i / 39) for i, name in enumerate(order)}

    found = compare_orders(build_run(learned(NAMES), NAMES), build_run(learned(SHUFFLED), SHUFFLED))
    assert found["drift"] == pytest.approx(1.2, abs=0.02)
    assert found["drift_low"] > 1.1
    assert found["same"] is False


def test_a_second_run_that_knows_the_prompts_is_found() -> None:
    taus = {name: skill(name) for name in NAMES}
    better = {name: value * 1.1 for name, value in taus.items()}
    found = compare_orders(build_run(taus, NAMES), build_run(better, SHUFFLED))
    assert found["ratio"] == pytest.approx(1.1)
    assert found["same"] is False


def test_orders_that_cannot_be_compared() -> None:
    taus = {name: skill(name) for name in NAMES}
    with pytest.raises(ResultError, match="differ in 1 prompts"):
        compare_orders(build_run(taus, NAMES), build_run(taus, NAMES[1:]))
    with pytest.raises(ResultError, match="same order"):
        compare_orders(build_run(taus, NAMES), build_run(taus, NAMES))
    few = compare_orders(build_run(taus, NAMES[:4]), build_run(taus, NAMES[3::-1]))
    assert few["same"] is None


def build_set(
    candidate: float, baseline: float, *, low: float | None, high: float | None
) -> dict[str, Any]:
    def arm(tau: float) -> dict[str, Any]:
        return {"tau": {"value": tau, "by_category": {"chat": {"value": tau}}}}

    return {
        "arms": {"candidate": arm(candidate), "baseline": arm(baseline)},
        "ratios": {"tau": {"value": candidate / baseline, "low": low, "high": high}},
    }


def test_the_gap_between_the_sets_is_against_the_baseline() -> None:
    hidden = build_set(2.0, 2.0, low=0.98, high=1.02)
    easier = build_set(3.0, 3.0, low=0.98, high=1.02)  # easier for both: no gap
    found = compare_sets(hidden, easier)
    assert found["gap"] == pytest.approx(1.0)
    assert found["worst_category"]["gap"] == pytest.approx(1.0)
    assert found["suspicious"] is False
    known = build_set(3.0, 2.0, low=1.47, high=1.53)
    found = compare_sets(hidden, known)
    assert found["gap"] == pytest.approx(1.5)
    half = math.hypot(math.log(1.02 / 0.98) / 2, math.log(1.53 / 1.47) / 2)
    assert found["low"] == pytest.approx(1.5 * math.exp(-half))
    assert found["high"] == pytest.approx(1.5 * math.exp(half))
    assert found["suspicious"] is True
    assert found["worst_category"]["category"] == "chat"
    assert found["worst_category"]["gap"] == pytest.approx(1.5)
    assert compare_sets(hidden, build_set(3.0, 2.0, low=None, high=None))["suspicious"] is None
