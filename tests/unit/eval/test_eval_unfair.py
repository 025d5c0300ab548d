"""What would make a run unfair is refused, noted or not ranked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    GREEDY,
    build_draft,
    build_facts,
    build_prompts,
    build_request,
    build_rules,
)
from scripted_arms import NAMES, WARM_UP, Arms

from paceline.errors import DataError, EngineError
from paceline.eval import EvalPrompt


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
