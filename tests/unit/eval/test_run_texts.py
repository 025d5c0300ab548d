"""The texts of a draft that was merely started, against the target's own."""

from __future__ import annotations

from paceline.endpoint import Answer, TokenChoice
from paceline.eval import find_text_faults
from paceline.rules import read_rules

RULES = read_rules("emc2-2027")
TEXT = tuple(range(100, 132))


def answer(number: int, output_ids: tuple[int, ...]) -> Answer:
    return Answer(
        request_id=str(number),
        prompt_ids=(1, 2),
        output_ids=output_ids,
        finish_reason="length",
        sent_at_s=0.0,
        chunk_times_s=tuple(map(float, range(len(output_ids)))),
        chunk_tokens=(1,) * len(output_ids),
    )


def parted(at: int) -> tuple[int, ...]:
    return (*TEXT[:at], 7, *TEXT[at + 1 :])


def choice(at: int, gap: float) -> TokenChoice:
    return TokenChoice(token_ids=(TEXT[at], 7), logprobs=(-0.5, -0.5 - gap))


PLAIN = [answer(i, TEXT) for i in range(16)]


def test_the_same_texts_and_near_ties_pass() -> None:
    drafted = [*PLAIN[:14], answer(14, parted(3)), answer(15, parted(9))]
    choices = {"14": choice(3, 0.1), "15": choice(9, 0.25)}
    assert find_text_faults(PLAIN, drafted, choices, RULES) == ([], 0)


def test_real_forks_are_counted() -> None:
    drafted = [*PLAIN[:13], *(answer(i, parted(i)) for i in (13, 14, 15))]
    choices = {str(i): choice(i, 3.0) for i in (13, 14, 15)}
    ((fault,), number) = find_text_faults(PLAIN, drafted, choices, RULES)
    assert number == 3
    assert "3 of 16 answers really fork" in fault


def test_loops_are_told() -> None:
    loop = [answer(i, (*TEXT[:4], *(5, 6) * 40)) for i in range(16)]
    choices = {str(i): choice(4, 3.0) for i in range(16)}
    faults, number = find_text_faults(PLAIN, loop, choices, RULES)
    assert number == 16
    assert any("loops in 16 of 16" in fault for fault in faults)
