"""U37: tokens are counted from ids, a chunk may hold several."""

from __future__ import annotations

import pytest

from paceline.endpoint import Answer
from paceline.errors import ResultError
from paceline.eval.timing import read_times
from paceline.eval.transcript import require_sound


def answer(times_ms: tuple[float, ...], chunks: tuple[int, ...], num_tokens: int) -> Answer:
    return Answer(
        request_id="a",
        prompt_ids=(1,),
        output_ids=tuple(range(num_tokens)),
        finish_reason="stop",
        sent_at_s=50.0,
        chunk_times_s=tuple(50.0 + t / 1000 for t in times_ms),
        chunk_tokens=chunks,
    )


def test_u37() -> None:
    times = read_times(answer((100, 130, 160, 190), (1, 3, 3, 3), 10))
    assert times.ttft_ms == pytest.approx(100.0)
    assert times.tpot_ms == pytest.approx(10.0)  # 90 ms / 9 tokens, not 90 / 3 chunks
    assert times.itl_ms == pytest.approx(30.0)  # per chunk
    assert times.decode_ms == pytest.approx(90.0)


def test_u37_one_token_has_no_time_per_token() -> None:
    times = read_times(answer((100,), (1,), 1))
    assert times.ttft_ms == pytest.approx(100.0)
    assert (times.tpot_ms, times.itl_ms, times.decode_ms) == (None, None, None)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (answer((), (), 0), "empty"),
        (answer((100, 130), (1, 3), 5), "chunks of"),
        (answer((100,), (1, 1), 2), "chunk times"),
        (answer((100, 90), (1, 1), 2), "backwards"),
        (answer((-1, 90), (1, 1), 2), "backwards"),
        (answer((10, 90), (0, 2), 2), "chunks of"),
    ],
)
def test_contradictions_are_refused(broken: Answer, message: str) -> None:
    with pytest.raises(ResultError, match=message):
        require_sound(broken)
