"""Ratios by category and by length of prompt, against numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import build_rules

from paceline.eval.lengths import bucket_names, find_bucket
from paceline.eval.slices import build_slices

RULES = build_rules(min_tokens_for_tpot="4", num_resamples="100", length_buckets="[10, 20]")


def entry(name: str, length: int, delivered: int, steps: int, tpot: float) -> dict[str, Any]:
    return {
        "id": name,
        "category": name.split("-")[0],
        "num_prompt_tokens": length,
        "num_tokens": 9,
        "delivered": delivered,
        "steps": steps,
        "tpot_ms": tpot,
    }


BASELINE = [
    entry("chat-1", 10, 8, 4, 4.0),
    entry("chat-2", 11, 8, 4, 4.0),
    entry("code-1", 5, 8, 2, 2.0),
    entry("code-2", 50, 8, 2, 2.0),
]
CANDIDATE = [
    entry("chat-1", 10, 8, 2, 2.0),
    entry("chat-2", 11, 8, 2, 1.0),
    entry("code-1", 5, 8, 4, 4.0),
    entry("code-2", 50, 8, 4, 2.0),
]
IDS = {e["id"] for e in BASELINE}


def test_buckets() -> None:
    assert bucket_names([10, 20]) == ["<= 10", "<= 20", "> 20"]
    assert bucket_names([]) == ["all"]
    assert [find_bucket(n, [10, 20]) for n in (1, 10, 11, 20, 21)] == [
        "<= 10",
        "<= 10",
        "<= 20",
        "<= 20",
        "> 20",
    ]


def test_slices_by_hand() -> None:
    found = build_slices(BASELINE, CANDIDATE, IDS, RULES, seed=0)
    chat, code = found["by_category"]["chat"], found["by_category"]["code"]
    assert (chat["tau"]["value"], code["tau"]["value"]) == (2.0, 0.5)
    assert chat["tpot"]["value"] == pytest.approx(8**0.5)
    assert code["tpot"]["value"] == pytest.approx(0.5**0.5)
    assert found["worst_category"] == "code"
    short = found["by_prompt_tokens"]["<= 10"]
    # one pool: 16 delivered in 6 steps against 16 in 6
    assert (short["num_prompts"], short["tau"]["value"]) == (2, 1.0)
    assert found["by_prompt_tokens"]["<= 20"]["tau"]["value"] == 2.0
    assert found["by_prompt_tokens"]["> 20"]["tau"]["value"] == 0.5
    assert chat["tau"]["low"] is None  # two prompts that happen to be alike say little


def test_an_empty_bucket_is_left_out() -> None:
    few = [e for e in BASELINE if e["num_prompt_tokens"] <= 10]
    mine = [e for e in CANDIDATE if e["num_prompt_tokens"] <= 10]
    found = build_slices(few, mine, IDS, RULES, seed=0)
    assert list(found["by_prompt_tokens"]) == ["<= 10"]
    assert found["by_category"]["chat"]["tau"]["not_measured"].startswith("too few prompts")
