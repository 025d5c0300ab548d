"""What the noise floor lets be found, on the recorded token times of real answers.

recorded_gaps.json holds the time between every two tokens of 24 answers on two cores. Each answer's
gaps, dealt at random into two halves, are two measurements of one thing with real noise: a run of a
draft against itself. Stretching one half is a slowdown of known size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import build_rules

from paceline.eval import measure_noise_floor
from paceline.eval.noise import is_tie
from paceline.eval.ratios import compute_ratios

RULES = build_rules(num_resamples="1000")
NUM_RUNS = 20
RECORDED = json.loads((Path(__file__).parent / "recorded_gaps.json").read_text())["answers"]


def deal(seed: int, *, slower: float = 0.0) -> dict[str, list[dict[str, Any]]]:
    """Two arms of one recording; the candidate's times are stretched."""
    random = np.random.default_rng(seed)
    arms: dict[str, list[dict[str, Any]]] = {"baseline": [], "candidate": []}
    for answer in RECORDED:
        order = random.permutation(len(answer["gaps_us"]))
        gaps = np.array(answer["gaps_us"])[order] / 1000
        half = len(gaps) // 2
        for name, own, factor in (
            ("baseline", gaps[:half], 1.0),
            ("candidate", gaps[half : 2 * half], 1 + slower),
        ):
            entry = {"num_tokens": half + 1, "delivered": half, "steps": half}
            entry |= {"id": answer["id"], "category": answer["category"], "block": 0}
            arms[name].append({**entry, "tpot_ms": float(own.mean()) * factor})
    return arms


def score(arms: Any) -> dict[str, Any]:
    _, found, _ = compute_ratios(arms, {"baseline": 1, "candidate": 1}, RULES, seed=0)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def floor() -> dict[str, Any]:
    engine = {"method": "none", "device_name": "two cores", "platform": "cpu", "vllm_version": "0"}
    return measure_noise_floor(
        {
            "arms": {
                name: {"draft": None, "engine": engine, "requests": entries}
                for name, entries in deal(0).items()
            },
            "aliases": {},
            "seed": 0,
            "target": {"weights_fingerprint": "w"},
            "rules": {"sha256": RULES.sha256},
            "protocol": {"kind": "quick"},
            "provenance": {},
        },
        RULES,
    )


def test_one_thing_against_itself_stays_within_the_floor(floor: dict[str, Any]) -> None:
    values = [score(deal(seed))["value"] for seed in range(1, NUM_RUNS + 1)]
    assert sum(is_tie(value, floor, RULES) is True for value in values) == NUM_RUNS
    assert 0.2 < floor["score"] < 1.0  # 1 to 4 % of time, 25 points of weight


def test_five_percent_slower_is_found(floor: dict[str, Any]) -> None:
    for seed in range(1, NUM_RUNS + 1):
        found = score(deal(seed, slower=0.05))
        assert is_tie(found["value"], floor, RULES) is False
        assert found["high"] < 100.0


def test_one_percent_slower_is_a_tie(floor: dict[str, Any]) -> None:
    values = [score(deal(seed, slower=0.01))["value"] for seed in range(1, NUM_RUNS + 1)]
    ties = sum(is_tie(value, floor, RULES) is True for value in values)
    assert ties >= NUM_RUNS - 2  # its quarter point lies inside the floor, plus each run's noise
    assert np.mean(values) == pytest.approx(99.75, abs=0.12)  # 25 points of 1 / 1.01
