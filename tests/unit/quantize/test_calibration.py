"""Rows that must not be calibrated on are named before any work; moments are plain means."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from builders import build_target_facts  # noqa: E402

from paceline.data import Row  # noqa: E402
from paceline.errors import DataError, PlanError  # noqa: E402
from paceline.quantize import Moments, check_rows, choose_rows  # noqa: E402
from paceline.target import TargetFacts  # noqa: E402


def build_facts(**changes: object) -> TargetFacts:
    return dataclasses.replace(build_target_facts(), **changes)


def build_row(**changes: object) -> Row:
    row = Row(
        row_id="r1",
        category="chat",
        input_ids=(1, 5, 6, 7, 2),
        loss_spans=((2, 5),),
        finish_reason="stop",
    )
    return dataclasses.replace(row, **changes)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            build_row(input_ids=(1, 5, 64, 7, 2)),
            r"rows\.jsonl:2: row 'r1' holds token 64;.* has 64",
        ),
        (build_row(loss_spans=((0, 1),)), r"rows\.jsonl:2: row 'r1' has no answer of two tokens"),
        (build_row(loss_spans=()), r"rows\.jsonl:2: row 'r1' has no answer of two tokens"),
        (build_row(input_ids=(1, 5, 6, 7, 9)), r"rows\.jsonl:2: the answer of row 'r1' is cut"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(row: Row, told: str) -> None:
    target = build_facts(eos_token_ids=(2,))
    good = build_row(row_id="good")
    check_rows([good], target, where="d/rows.jsonl", made_for=None)
    with pytest.raises(DataError, match=told):
        check_rows([good, row], target, where="d/rows.jsonl", made_for=None)


def test_answers_at_their_limit_are_fit() -> None:
    row = build_row(finish_reason="length", input_ids=(1, 5, 6, 7, 9))
    check_rows([row], build_facts(eos_token_ids=(2,)), where="rows", made_for=None)


def test_another_vocabulary_and_nothing_at_all_are_refused() -> None:
    target = build_facts(tokenizer_sha256="a" * 64, eos_token_ids=(2,))
    check_rows([build_row()], target, where="rows", made_for={"tokenizer_sha256": "a" * 64})
    with pytest.raises(DataError, match=r"another tokenizer \(bbbbbbbbbbbb\)"):
        check_rows([build_row()], target, where="rows", made_for={"tokenizer_sha256": "b" * 64})
    with pytest.raises(DataError, match="no row"):
        check_rows([], target, where="rows", made_for=None)


def test_rows_are_taken_evenly_and_only_short_ones() -> None:
    rows = [build_row(row_id=str(n), input_ids=(1,) * (5 + n % 2 * 90)) for n in range(20)]
    assert [row.row_id for row in choose_rows(rows, 3, 50)] == ["0", "6", "12"]
    assert len(choose_rows(rows, 100, 50)) == 10
    with pytest.raises(DataError, match="as short as 4"):
        choose_rows(rows, 3, 4)


def test_moments_are_the_mean_of_x_xt() -> None:
    moments = Moments(["fc"], where="rows")
    parts = [torch.randn(7, 6), torch.randn(3, 6)]
    for part in parts:
        moments.seen("r", "fc", part)
        moments.seen("r", "ignored", part)
    whole = torch.cat(parts).double()
    assert torch.allclose(moments.hessian("fc"), whole.T @ whole / 10, atol=1e-6)
    assert moments.num_inputs("fc") == 10
    with pytest.raises(DataError, match="no row reached 'ignored'"):
        moments.hessian("ignored")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_name_their_row(value: float) -> None:
    bad = torch.ones(2, 4)
    bad[1, 2] = value
    with pytest.raises(DataError, match=r"d/rows\.jsonl: row 'r7' gives 'fc' inputs"):
        Moments(["fc"], where="d/rows.jsonl").seen("r7", "fc", bad)


def test_shares() -> None:
    from paceline.quantize import parse_share

    assert parse_share("2%") == parse_share(" 0.02 ") == 0.02
    for text in ("2", "-1%", "two", "101%"):
        with pytest.raises(PlanError, match="no share"):
            parse_share(text)
