"""Quality by question against hand-computed cases; verdicts that neither kind of fault fools."""

from __future__ import annotations

import math

import pytest

from paceline.errors import ResultError
from paceline.eval import AskedQuestion, build_quality
from paceline.eval.quality import (
    Outcome,
    Tally,
    measure_paired_loss,
    tally_outcomes,
    wilson_interval,
)
from paceline.eval.quality_gate import GateResult, join_verdicts, judge_quality
from paceline.rules import Challenge, QualityGate, read_challenge

GATE = QualityGate(minimum=0.6, task="t", metric="m", filter="f", max_loss=0.02)
Z = 1.959963984540054


def outcomes(word: str) -> dict[str, Outcome]:
    """ "rwbc" -> the outcome of question 0, 1, 2, 3."""
    names: dict[str, Outcome] = {"r": "right", "w": "wrong", "b": "broken", "c": "cut"}
    return {str(number): names[letter] for number, letter in enumerate(word)}


def tally(word: str) -> Tally:
    return tally_outcomes(list(outcomes(word).values()))


def judge(
    arm: str, plain: str | None = None, *, minimum: bool = False, confidence: float = 0.95
) -> GateResult:
    loss = None
    if plain is not None:
        loss = measure_paired_loss(outcomes(plain), outcomes(arm), confidence=confidence)
    return judge_quality(
        GATE,
        tally(arm),
        plain=tally(plain) if plain is not None else None,
        loss=loss,
        applies_minimum=minimum,
        max_broken_share=0.05,
        confidence=confidence,
    )


def test_tally_by_hand() -> None:
    found = tally("rrrwwbccrr")  # 5 right, 2 wrong, 1 broken, 2 cut
    assert (found.right, found.wrong, found.broken, found.cut) == (5, 2, 1, 2)
    assert found.accuracy == 5 / 8
    assert (found.lowest, found.highest) == (0.5, 0.7)
    assert found.broken_share == 1 / 8
    nothing = tally("cc")
    assert (nothing.accuracy, nothing.broken_share) == (None, None)
    assert (nothing.lowest, nothing.highest) == (0.0, 1.0)


def test_wilson_by_hand() -> None:
    low, high = wilson_interval(8, 10, confidence=0.95) or (0.0, 0.0)
    # (0.8 + z^2/20 -+ z sqrt(0.016 + z^2/400)) / (1 + z^2/10), z^2 = 3.841459
    assert low == pytest.approx(0.490162, abs=1e-6)
    assert high == pytest.approx(0.943318, abs=1e-6)
    assert wilson_interval(0, 0, confidence=0.95) is None
    assert (wilson_interval(0, 5, confidence=0.95) or (1.0, 1.0))[0] == 0.0


def test_paired_loss_by_hand() -> None:
    # 3 right for both, 4 only for the plain target, 1 only for the arm, 2 for neither
    plain, arm = "rrrrrrrwww", "rrrwwbwrwb"
    found = measure_paired_loss(outcomes(plain), outcomes(arm), confidence=0.95)
    assert (found.num_pairs, found.only_plain, found.only_arm) == (10, 4, 1)
    assert found.difference == pytest.approx(-0.3)
    # McNemar: 2 (C(5,0) + C(5,1)) / 2^5
    assert found.p_value == pytest.approx(2 * 6 / 32)
    # b* = 4.5, c* = 1.5, n* = 12: centre -0.25, variance (6 - 9/12) / 144
    half = Z * math.sqrt(5.25 / 144)
    assert found.low == pytest.approx(-0.25 - half, abs=1e-6)
    assert found.high == pytest.approx(-0.25 + half, abs=1e-6)
    assert (found.lowest, found.highest) == (pytest.approx(-0.3), pytest.approx(-0.3))


def test_cut_pairs_are_set_aside_and_bounded() -> None:
    found = measure_paired_loss(outcomes("rrwc"), outcomes("rccr"), confidence=0.95)
    assert (found.num_pairs, found.num_cut) == (1, 3)
    assert found.difference == 0.0
    # against the arm: 0, -1, 0, 1 - 1; for it: 0, 1 - 1, 1, 1
    assert found.lowest == pytest.approx(-1 / 4)
    assert found.highest == pytest.approx(2 / 4)
    nothing = measure_paired_loss(outcomes("cc"), outcomes("rw"), confidence=0.95)
    assert (nothing.num_pairs, nothing.difference, nothing.p_value) == (0, None, None)


def test_thousands_of_questions_do_not_overflow() -> None:
    plain, arm = "r" * 3000 + "w" * 2900 + "r" * 6000, "w" * 3000 + "r" * 2900 + "r" * 6000
    found = measure_paired_loss(outcomes(plain), outcomes(arm), confidence=0.95)
    assert found.p_value is not None
    # the normal's: z = 99 / sqrt(5900), two-sided
    assert found.p_value == pytest.approx(math.erfc(99 / math.sqrt(5900) / math.sqrt(2)), rel=0.01)


def test_alike_answers_of_enough_questions_pass() -> None:
    assert judge("r" * 600 + "w" * 400, "r" * 600 + "w" * 400) == GateResult(
        verdict="pass", reasons=()
    )
    assert judge("rw", "rw").verdict == "undecided"  # two questions show nothing


@pytest.mark.parametrize("arm", ["b" * 100, "r" * 94 + "b" * 6, "r" * 60 + "b" * 40])
@pytest.mark.parametrize("plain", [None, "r" * 100, "b" * 100, "r" * 94 + "b" * 6])
@pytest.mark.parametrize("minimum", [True, False])
def test_a_broken_format_never_passes(arm: str, plain: str | None, minimum: bool) -> None:
    found = judge(arm, plain, minimum=minimum)
    assert found.verdict != "pass"
    assert any("read" in reason for reason in found.reasons)


def test_a_format_that_both_break_is_nobodys_pass() -> None:
    """No answer can be read on either side: no difference, and nothing was measured."""
    found = judge("b" * 1000, "b" * 1000)
    assert found.verdict == "undecided"
    assert "chat template or thinking mode" in found.reasons[0]


def test_a_format_that_the_arm_alone_lost_fails() -> None:
    assert judge("r" * 800 + "b" * 200, "r" * 1000).verdict == "fail"


def test_one_broken_answer_of_few_is_no_failure() -> None:
    assert judge("rrrrrrrrrb", "rrrrrrrrrr").verdict == "undecided"


@pytest.mark.parametrize("num_cut", range(1, 101, 9))
@pytest.mark.parametrize("plain", [None, "r" * 100])
def test_a_cut_thought_never_fails(num_cut: int, plain: str | None) -> None:
    """Everything else right: however many are cut, it is a pass or undecided."""
    found = judge("c" * num_cut + "r" * (100 - num_cut), plain, minimum=True)
    assert found.verdict in ("pass", "undecided")
    if num_cut > 40:  # below the minimum were they wrong
        assert any("cut" in reason and "--max-tokens" in reason for reason in found.reasons)


def test_cut_answers_never_make_a_pass() -> None:
    """Half the questions cut: what is left being alike does not say that nothing was lost."""
    assert judge("c" * 1000 + "r" * 1000, "r" * 2000).verdict == "undecided"
    assert judge("r" * 59 + "c" * 41, minimum=True).verdict == "undecided"
    assert judge("r" * 60 + "c" * 40, minimum=True).verdict == "pass"


def test_real_losses_fail() -> None:
    assert judge("r" * 59 + "w" * 41, minimum=True).verdict == "fail"
    assert judge("r" * 700 + "w" * 300, "r" * 1000).verdict == "fail"
    # even with every cut answer right
    assert judge("r" * 600 + "w" * 380 + "c" * 20, "r" * 1000).verdict == "fail"


def test_nothing_to_compare_with_is_no_pass() -> None:
    assert judge("r" * 100).verdict == "undecided"
    assert join_verdicts([]) == "undecided"
    assert join_verdicts(["pass", "undecided", "fail"]) == "fail"
    assert join_verdicts(["pass", "undecided"]) == "undecided"


def asked(outcome: Outcome, number: int = 0, prompt: str = "p") -> AskedQuestion:
    return AskedQuestion(
        question_id=f"t/{number}",
        prompt_sha256=prompt,
        outcome=outcome,
        num_tokens=None,
        has_thought=False,
        text="",
    )


@pytest.fixture
def challenge() -> Challenge:
    return read_challenge("adaptfm-2026")


def test_a_record_of_one_task(challenge: Challenge) -> None:
    arm = {"ifeval": [asked("right", number) for number in range(5)]}
    record = build_quality(challenge, arm, arm, applies_minimum=True)
    task = record["tasks"]["ifeval"]
    assert (record["verdict"], task["verdict"]) == ("undecided", "undecided")
    assert (task["arm"]["right"], task["loss"]["num_pairs"]) == (5, 5)
    assert task["arm"]["mean_tokens"] is None


@pytest.mark.parametrize("other", [[asked("right", 1)], [asked("right", prompt="q")]])
def test_other_questions_are_no_pairs(challenge: Challenge, other: list[AskedQuestion]) -> None:
    with pytest.raises(ResultError, match="1 questions differ"):
        build_quality(
            challenge, {"ifeval": [asked("right")]}, {"ifeval": other}, applies_minimum=True
        )
