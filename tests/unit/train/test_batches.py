"""The shift between text, base and step, pinned (U24); batches that never change (U29)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import Row
from paceline.errors import DataError, RecipeError
from paceline.train.batches import batch_order, build_batch, cut_rows, plan_batches, split_rows
from paceline.train.vocabulary import choose_draft_tokens, measure_coverage, offsets


def row(name: str, length: int, *spans: tuple[int, int]) -> Row:
    return Row(
        row_id=name,
        category="chat",
        input_ids=tuple(range(10, 10 + length)),
        loss_spans=spans,
        finish_reason="stop",
    )


def test_two_turns_of_four_and_three_tokens_u24() -> None:
    """Two assistant turns: 3 and 2 tokens, each with its end token: 7 tokens of loss span.

    x[start] of each turn comes from the target itself, so 5 are drafted: the first turn's 3 and
    the second's 2; step j loses j more at the start of each turn.
    """
    batch = build_batch([[row("a", 14, (4, 8), (11, 14))]], num_speculative_tokens=3)
    assert batch.place_M.tolist() == [5, 6, 7, 12, 13]
    supervised = [batch.place_M[valid].tolist() for valid in batch.valid_KM]
    assert supervised == [[5, 6, 7, 12, 13], [6, 7, 13], [7]]
    # the first base of a turn is the last position before it: its features gave x[start]
    assert batch.bases_BN.tolist() == [[3, 4, 5, 10, 11]]
    for step in range(3):
        for m in range(5):
            if batch.valid_KM[step, m]:
                base = batch.bases_BN.flatten()[batch.source_KM[step, m]]
                assert base == batch.place_M[m] - 2 - step


def test_rows_of_unequal_length_are_padded_on_the_right() -> None:
    slots = [[row("a", 9, (4, 9))], [row("b", 12, (3, 6))]]
    batch = build_batch(slots, num_speculative_tokens=2)
    assert batch.tokens_BT.shape == (2, 12)
    assert batch.tokens_BT[0, 9:].tolist() == [0, 0, 0]
    assert batch.num_tokens == 21
    for step in range(2):
        for m, place in enumerate(batch.place_M.tolist()):
            if batch.valid_KM[step, m]:
                number, column = divmod(int(batch.source_KM[step, m]), batch.bases_BN.shape[1])
                assert number == batch.slot_M[m]
                assert batch.bases_BN[number, column] == place - 2 - step


def test_cut_rows_clips_and_drops() -> None:
    rows = [
        row("long", 20, (4, 20)),
        row("late", 20, (15, 20)),
        row("short", 8, (4, 8)),
        row("one", 8, (7, 8)),
    ]
    kept, num_cut = cut_rows(rows, max_length=10)
    assert [r.row_id for r in kept] == ["long", "short"]
    assert kept[0].loss_spans == ((4, 10),)
    assert num_cut == 2
    with pytest.raises(DataError, match="supervised"):
        cut_rows(rows[1:2], max_length=10)


def test_every_row_once_in_an_epoch_and_within_the_size() -> None:
    lengths = [5 + 7 * n % 31 for n in range(50)]
    plan = plan_batches(lengths, tokens_per_batch=100, seed=1)
    assert sorted(n for members in plan for n in members) == list(range(50))
    assert all(max(lengths[n] for n in m) * len(m) <= 100 for m in plan)
    assert plan == plan_batches(lengths, tokens_per_batch=100, seed=1)
    assert plan != plan_batches(lengths, tokens_per_batch=100, seed=2)
    orders = [batch_order(len(plan), seed=1, epoch=e) for e in (0, 1)]
    assert all(sorted(order) == list(range(len(plan))) for order in orders)
    assert orders[0] != orders[1]


def test_draft_vocabulary_keeps_specials_and_frequent_tokens() -> None:
    rows = [row("a", 14, (4, 14)), row("b", 14, (9, 14))]
    tokens = choose_draft_tokens(rows, draft_vocab_size=8, vocab_size=64, always=[1, 2])
    # tokens 19..23 stand in both rows' spans, 14 is the lowest of those seen once
    assert tokens == [1, 2, 14, 19, 20, 21, 22, 23]
    assert [n + d for n, d in enumerate(offsets(tokens))] == tokens
    with pytest.raises(RecipeError, match="special"):
        choose_draft_tokens(rows, draft_vocab_size=1, vocab_size=64, always=[1, 2])
    with pytest.raises(RecipeError, match="draft_vocab_size"):
        choose_draft_tokens(rows, draft_vocab_size=65, vocab_size=64, always=[])


@given(
    lengths=st.lists(st.integers(2, 64), min_size=1, max_size=40),
    num_ranks=st.integers(1, 9),
    tokens_per_part=st.integers(64, 400),
)
def test_parts_hold_every_row_once_within_their_size(
    lengths: list[int], num_ranks: int, tokens_per_part: int
) -> None:
    parts = split_rows(lengths, tokens_per_part=tokens_per_part, num_ranks=num_ranks)
    assert [place for part in parts for place in part] == list(range(len(lengths)))
    assert all(parts)
    assert all(max(lengths[i] for i in part) * len(part) <= tokens_per_part for part in parts)
    assert len(parts) >= min(num_ranks, len(lengths))
    if len(parts) > num_ranks:  # no process waits while others make one more pass, but for rows
        assert len(parts) % num_ranks == 0 or len(parts) == len(lengths)


def test_one_part_where_one_is_enough() -> None:
    assert split_rows([8, 8, 8], tokens_per_part=24, num_ranks=1) == [(0, 1, 2)]
    assert split_rows([8, 8, 8], tokens_per_part=24, num_ranks=2) == [(0, 1), (2,)]
    assert split_rows([8, 8, 8, 8], tokens_per_part=16, num_ranks=1) == [(0, 1), (2, 3)]
    five = split_rows([8] * 5, tokens_per_part=16, num_ranks=2)
    assert five == [(0,), (1,), (2, 3), (4,)]  # four: two passes for both


def test_coverage_is_of_rows_that_did_not_choose() -> None:
    """Rows of one token each: 0 and 5 are held out; the others say 20 four times, 30 three."""
    tokens = [20, 20, 20, 20, 30, 40, 20, 30, 30, 7]

    def one(number: int, token: int) -> Row:
        return Row(
            row_id=str(number),
            category="math" if number == 5 else "chat",
            input_ids=(1, token),
            loss_spans=((1, 2),),
            finish_reason="length",
        )

    rows = [one(number, token) for number, token in enumerate(tokens)]
    small, large = measure_coverage(rows, [2, 3], vocab_size=50, always=[7])
    assert small.by_category == {"chat": 1.0, "math": 0.0}
    assert small.total == large.total == 0.5
    everything = measure_coverage(rows, [49], vocab_size=50, always=[])[0]
    assert everything.total == 1.0
    with pytest.raises(DataError, match="too few"):
        measure_coverage(rows[:4], [2], vocab_size=50, always=[])
