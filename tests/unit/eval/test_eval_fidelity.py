"""U39: near ties apart from real forks; loops."""

from __future__ import annotations

import pytest
from scripted import build_rules

from paceline.endpoint import TokenChoice
from paceline.eval.fidelity import (
    build_fidelity,
    classify_fork,
    distinct_2,
    find_fork,
    repeated_share,
)

RULES = build_rules(tolerance_nats="0.25", loop_ngram="3")


def choice(*pairs: tuple[int, float]) -> TokenChoice:
    return TokenChoice(token_ids=tuple(t for t, _ in pairs), logprobs=tuple(v for _, v in pairs))


def test_find_fork() -> None:
    assert find_fork([1, 2, 3], [1, 9, 3]) == 1
    assert find_fork([1, 2, 3], [1, 2, 3]) is None
    assert find_fork([1, 2, 3], [1, 2]) is None  # compared to the shorter
    assert find_fork([], [1]) is None


@pytest.mark.parametrize(
    ("view", "kind", "gap"),
    [
        (choice((7, 23.625), (8, 23.5)), "near_tie", 0.125),
        (choice((7, 23.6), (8, 18.0)), "real_fork", 5.6),
        (choice((7, -0.5), (8, -0.75)), "near_tie", 0.25),  # the edge itself
        (choice((7, -0.5), (8, -0.7500001)), "real_fork", 0.2500001),
        (choice((8, -0.5), (7, -0.6)), "near_tie", 0.1),  # prefill prefers the other one
        (choice((9, -0.1), (7, -0.2), (8, -0.9)), "real_fork", 0.8),  # neither is the best
        (choice((7, -0.1), (9, -2.0)), "real_fork", None),  # not among the candidates
    ],
)
def test_u39_classify(view: TokenChoice, kind: str, gap: float | None) -> None:
    found = classify_fork(view, plain_token=7, token=8, tolerance=0.25)
    assert found[0] == kind
    assert found[1] == (None if gap is None else pytest.approx(gap, abs=1e-9))


def test_u39_counts_and_cases() -> None:
    plain = {"a": [1, 7, 3], "b": [1, 7, 3], "c": [1, 2, 3], "d": [1, 2, 3], "e": [1, 2]}
    arm = {"a": [1, 8, 4], "b": [1, 8, 3], "c": [1, 2, 3], "d": [1, 2]}
    views = {"a": choice((7, -0.5), (8, -0.625)), "b": choice((7, -0.1), (8, -5.7))}
    found = build_fidelity(plain, arm, views, RULES)
    assert found["num_texts"] == 4  # "e" failed in the arm
    assert (found["identical"], found["near_tie"], found["real_fork"]) == (2, 1, 1)
    assert found["max_near_tie_gap"] == 0.125
    assert found["num_shorter"] == 1
    assert found["cases"] == [
        {"id": "a", "position": 1, "gap": 0.125, "plain_token": 7, "token": 8, "kind": "near_tie"},
        {
            "id": "b",
            "position": 1,
            "gap": pytest.approx(5.6),
            "plain_token": 7,
            "token": 8,
            "kind": "real_fork",
        },
        {
            "id": "d",
            "position": 2,
            "gap": None,
            "plain_token": None,
            "token": None,
            "kind": "shorter",
        },
    ]


def test_repeated_share() -> None:
    # 1 2 1 2 1 2: trigrams 121 212 121 212 -> 2 of 4 are repeats
    assert repeated_share([1, 2, 1, 2, 1, 2], n=3) == 0.5
    assert repeated_share([1, 2, 3, 4], n=3) == 0.0
    assert repeated_share([1, 2, 3], n=3) is None


def test_distinct_2() -> None:
    assert distinct_2([1, 2, 1, 2, 1]) == 0.5  # 12 21 12 21
    assert distinct_2([1]) is None


def test_loops_are_counted_against_plain() -> None:
    looping = [1, 2] * 8  # 14 trigrams, 2 distinct: 12/14 repeat
    plain = {"a": list(range(16))}
    views = {"a": choice((0, -0.1), (1, -0.2))}
    found = build_fidelity(plain, {"a": looping}, views, RULES)
    assert found["loops"]["plain"]["num_looping"] == 0
    assert found["loops"]["arm"]["num_looping"] == 1
    assert found["loops"]["arm"]["max_repeated_share"] == pytest.approx(12 / 14)
    assert found["loops"]["arm"]["mean_distinct_2"] == pytest.approx(2 / 15)
