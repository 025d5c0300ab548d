"""Two boots of one draft: as many tokens a step, or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import build_draft

from paceline.draft import read_draft
from paceline.endpoint import Answer
from paceline.errors import EngineError
from paceline.serve import Beside, Observed, RunCase, Told, check_repeat
from paceline.serve.second_boot import _list_forks


def answer(number: int, chunks: tuple[int, ...], first: int = 0) -> Answer:
    """One answer whose chunks hold so many tokens; tokens count up from `first`."""
    tokens = tuple(range(first, first + sum(chunks)))
    return Answer(
        request_id=str(number),
        prompt_ids=(7, 8),
        output_ids=tokens,
        finish_reason="length",
        sent_at_s=0.0,
        chunk_times_s=tuple(float(i) for i in range(len(chunks))),
        chunk_tokens=chunks,
    )


@pytest.fixture
def case(tmp_path: Path) -> RunCase:
    """Four answers of 1 + 6 tokens in 3 steps: two a step."""
    seen = Observed(answers=[answer(i, (1, 2, 2, 2)) for i in range(4)])
    return RunCase(
        draft=read_draft(build_draft(tmp_path / "d")),
        seen=seen,
        context_tokens=16384,
        num_long_tokens=None,
        estimate_bytes=None,
    )


def tell(case: RunCase, beside: Beside) -> list[Told]:
    return list(check_repeat(case, beside))


def test_the_same_again(case: RunCase) -> None:
    assert tell(case, Beside(again=list(case.seen.answers))) == []


def test_another_number_of_tokens_a_step(case: RunCase) -> None:
    again = [answer(i, (1, 1, 1, 1, 1, 1, 1)) for i in range(4)]
    (told,) = tell(case, Beside(again=again))
    assert told.problem.rule == "run.repeat"
    assert "2.000 and 1.000 tokens a step" in told.problem.message
    assert (told.problem.found, told.problem.expected) == ("-1.000", "at most 0.040 apart")


def test_what_chance_explains_is_not_told(case: RunCase) -> None:
    # by hand: 8/3, 4/3, 8/3, 4/3 against 2: mean difference 0, standard error 0.385
    again = [answer(i, (1, 3, 3, 2) if i % 2 == 0 else (1, 2, 1, 1)) for i in range(4)]
    assert tell(case, Beside(again=again)) == []


def test_a_second_boot_that_ends(case: RunCase) -> None:
    beside = Beside(again_error=EngineError("it died", fix="Look at the log."))
    (told,) = tell(case, beside)
    assert told.problem.message == "the second boot ended: it died"
    assert told.problem.fix == "Look at the log."


def test_answers_without_a_decode_step_tell_nothing(case: RunCase) -> None:
    assert tell(case, Beside(again=[answer(i, (1,)) for i in range(4)])) == []


def test_where_answers_part() -> None:
    plain = [answer(0, (1, 2)), answer(1, (1, 2)), answer(2, (1, 2))]
    other = [answer(0, (1, 2)), answer(1, (1, 2), first=5), answer(2, (2,))]
    assert dict(_list_forks(plain, other)) == {"1": (7, 8)}
