"""U39: near ties apart from real forks; loops; the gate that withholds an arm from scoring."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import build_rules

from paceline.endpoint import TokenChoice
from paceline.eval.fidelity import (
    Key,
    Text,
    build_fidelity,
    classify_fork,
    distinct_2,
    find_fork,
    repeated_share,
)
from paceline.eval.gate import find_withheld

SIDES = ("plain", "arm")
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


def texts(block: int = 0, reason: str = "stop", **ids: Any) -> dict[Key, Text]:
    return {
        (name, block): Text(output_ids=list(tokens), finish_reason=reason)
        for name, tokens in ids.items()
    }


def test_u39_counts_and_cases() -> None:
    plain = texts(a=[1, 7, 3], b=[1, 7, 3], c=[1, 2, 3], d=[1, 2, 3], e=[1, 2])
    arm = texts(a=[1, 8, 4], b=[1, 8, 3], c=[1, 2, 3], d=[1, 2])
    views = {
        ("a", 0): choice((7, -0.5), (8, -0.625)),
        ("b", 0): choice((7, -0.1), (8, -5.7)),
    }
    found = build_fidelity(plain, arm, views, {}, RULES)
    assert found["num_texts"] == 4  # "e" failed in the arm
    assert (found["identical"], found["near_tie"], found["real_fork"]) == (2, 1, 1)
    assert found["max_near_tie_gap"] == 0.125
    assert found["num_shorter"] == 1
    assert found["cases"] == [
        {
            "id": "a",
            "block": 0,
            "position": 1,
            "gap": 0.125,
            "plain_token": 7,
            "token": 8,
            "kind": "near_tie",
        },
        {
            "id": "b",
            "block": 0,
            "position": 1,
            "gap": pytest.approx(5.6),
            "plain_token": 7,
            "token": 8,
            "kind": "real_fork",
        },
        {
            "id": "d",
            "block": 0,
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
    plain = texts(a=range(16))
    views = {("a", 0): choice((0, -0.1), (1, -0.2))}
    found = build_fidelity(plain, texts(a=looping), views, {}, RULES)
    assert found["loops"]["plain"]["num_looping"] == 0
    assert found["loops"]["arm"]["num_looping"] == 1
    assert found["loops"]["arm"]["max_repeated_share"] == pytest.approx(12 / 14)
    assert found["loops"]["arm"]["mean_distinct_2"] == pytest.approx(2 / 15)


def many(num: int, make: Any) -> dict[str, Any]:
    return {f"t{i}": make(i) for i in range(num)}


def test_differences_by_hand() -> None:
    """Lengths 4 against 6, 6, 6, 6, 8; likelihoods of the two that differ in more than length."""
    plain = texts(**many(5, lambda i: [1, 2, 3, 4]))
    arm = texts(**many(5, lambda i: [1, 2, 3, 4, 5, 6] if i < 4 else [1, 2, 3, 4] * 2))
    arm["t0", 0] = Text(output_ids=[1, 2, 3, 4], finish_reason="length")
    scores = {("plain", ("t1", 0)): 0.5, ("arm", ("t1", 0)): 1.5, ("arm", ("t2", 0)): 9.0}
    found = build_fidelity(plain, arm, {}, scores, RULES)["differences"]
    assert found["num_tokens"]["mean"] == pytest.approx((0 + 2 + 2 + 2 + 4) / 5)
    # t statistic of 0, 2, 2, 2, 4: s^2 = 8 / 4, half-width 2.776 * sqrt(2 / 5)
    assert found["num_tokens"]["half_width"] == pytest.approx(2.7764451 * (2 / 5) ** 0.5)
    assert found["eos_share"]["mean"] == pytest.approx(-1 / 5)
    # t0 is plain's text (0), t1 was scored; of the others plain or arm was not
    assert found["nll_nats"] == {"mean": 0.5, "half_width": None, "num_texts": 2}
    assert found["distinct_2"]["mean"] == pytest.approx((4 / 7 - 1) / 5)


def test_later_blocks_are_compared_with_plains_first() -> None:
    plain = texts(a=[1, 2], b=[3, 4])
    arm = {**texts(a=[1, 2], b=[3, 4]), **texts(block=1, a=[1, 9], b=[3, 4])}
    views = {("a", 1): choice((2, -0.1), (9, -0.2))}
    found = build_fidelity(plain, arm, views, {}, RULES)
    assert (found["num_texts"], found["identical"], found["near_tie"]) == (4, 3, 1)
    assert (found["cases"][0]["id"], found["cases"][0]["block"]) == ("a", 1)


def test_sampled_texts_are_not_classed_but_screened() -> None:
    plain = texts(**many(6, lambda i: range(16)))
    arm = texts(**many(6, lambda i: [1, 2] * 8))
    scores = {(side, (f"t{i}", 0)): 1.0 for i in range(6) for side in ("plain", "arm")}
    found = build_fidelity(plain, arm, {}, scores, RULES, greedy=False)
    assert found["real_fork"] is None
    assert found["differences"]["nll_nats"]["num_texts"] == 6
    assert find_withheld({"candidate": found}, RULES) == {
        "candidate": [
            "it loops in 6 of 6 answers where the target does not",
            "its text is on average 0.87 less varied (distinct pairs of tokens)",
        ]
    }


# --- the gate ---------------------------------------------------------------------------------


def gate(arm: Any, plain: Any = None, **more: Any) -> list[str]:
    plain = plain or texts(**many(20, lambda i: range(i, i + 30)))
    views = {key: choice((1, -0.1), (2, -0.1)) for key in arm}
    found = {"candidate": build_fidelity(plain, arm, more.get("views", views), {}, RULES)}
    if "floor" in more:
        found["plain"] = more["floor"]
    return find_withheld(found, RULES).get("candidate", [])


def test_the_targets_own_text_passes() -> None:
    assert gate(texts(**many(20, lambda i: range(i, i + 30)))) == []
    assert find_withheld(None, RULES) == {}


def test_one_shorter_answer_is_chance_and_all_are_not() -> None:
    def cut(few: int) -> Any:
        return texts(**many(20, lambda i: range(i, i + (3 if i < few else 30))))

    assert gate(cut(1)) == []
    assert gate(cut(20)) == ["its text is on average 27.00 tokens shorter"]


def test_what_chance_explains_is_no_reason() -> None:
    """Three of eight are cut: 10 tokens shorter on average, beyond the limit, within ± 11.7."""
    plain = texts(**many(8, lambda i: range(i, i + 30)))
    arm = texts(**many(8, lambda i: range(i, i + (3 if i < 3 else 30))))
    assert gate(arm, plain) == []
    assert gate(texts(**many(8, lambda i: range(i, i + (3 if i < 6 else 30)))), plain) != []


def test_answers_that_no_longer_end() -> None:
    arm = texts(reason="length", **many(20, lambda i: range(i, i + 30)))
    assert gate(arm) == ["its text is on average 1.00 of the answers fewer end by themselves"]


def test_unlikely_text() -> None:
    plain = texts(**many(20, lambda i: range(i, i + 30)))
    arm = texts(**many(20, lambda i: [*range(i, i + 29), 999]))
    scores = {(side, (f"t{i}", 0)): 0.4 + (side == "arm") for i in range(20) for side in SIDES}
    views = {key: choice((key[1] + int(key[0][1:]) + 29, -0.1), (999, -0.1)) for key in arm}
    found = build_fidelity(plain, arm, views, scores, RULES)
    reasons = find_withheld({"candidate": found}, RULES)["candidate"]
    assert reasons == [
        "its text is on average 1.00 nats a token less likely under the target",
    ]
    small = {**scores, **{("arm", (f"t{i}", 0)): 0.45 for i in range(20)}}
    found = build_fidelity(plain, arm, views, small, RULES)
    assert find_withheld({"candidate": found}, RULES) == {}


def test_what_the_target_differs_from_itself_by_is_allowed_on_top() -> None:
    plain = texts(**many(20, lambda i: range(i, i + 30)))
    forked = texts(**many(20, lambda i: [999, *range(i, i + 29)] if i < 4 else range(i, i + 30)))
    views = {key: choice((int(key[0][1:]), -0.1), (999, -9.0)) for key in forked}
    text = "its text is not the target's: 4 of 20 answers really fork"
    assert gate(forked, views=views) == [text]
    again = {(name, 1): value for (name, _), value in forked.items()}
    later = {(name, 1): view for (name, _), view in views.items()}
    floor = build_fidelity(plain, again, later, {}, RULES)
    assert floor["real_fork"] == 4
    assert gate(forked, views=views, floor=floor) == []
