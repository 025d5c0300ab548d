"""Rows as text with the supervised tokens marked, for `paceline data show`."""

from __future__ import annotations

from pathlib import Path

from paceline.data.rows import Row, read_data_record, read_rows
from paceline.data.tokens import ChatTokenizer, open_tokenizer
from paceline.errors import DataError
from paceline.target import TargetFacts

__all__ = ["show_rows"]

_OPEN, _CLOSE = "⟦", "⟧"


def show_rows(data_dir: str | Path, target: TargetFacts, *, num_rows: int = 3) -> str:
    """The first rows of a data folder; what training learns to predict stands in ⟦ ⟧.

    Raises DataError when another tokenizer than the target's made the rows.
    """
    record = read_data_record(data_dir)
    made_with = record["target"]["tokenizer_sha256"]
    if made_with != target.tokenizer_sha256:
        raise DataError(
            f"the rows were made with the tokenizer {made_with}",
            where=str(data_dir),
            expected=f"{target.tokenizer_sha256}, that of target {target.name}",
            fix="Pass the target that made them.",
        )
    tokenizer = open_tokenizer(target, thinking=record["thinking"])
    counts = record["counts"]
    head = (
        f"{counts['rows']} rows, {counts['rejected']} rejected; "
        f"{counts['supervised_tokens']:,} of {counts['tokens']:,} tokens supervised"
    )
    rows = read_rows(data_dir)[:num_rows]
    return "\n\n".join([head, *(_show_row(row, tokenizer) for row in rows)])


def _show_row(row: Row, tokenizer: ChatTokenizer) -> str:
    parts = [
        f"{row.row_id} ({row.category}, {row.finish_reason}): "
        f"{row.num_supervised} of {len(row.input_ids)} tokens supervised\n"
    ]
    end = 0
    for start, stop in row.loss_spans:
        parts.append(tokenizer.decode(row.input_ids[end:start]))
        parts.append(_OPEN + tokenizer.decode(row.input_ids[start:stop]) + _CLOSE)
        end = stop
    parts.append(tokenizer.decode(row.input_ids[end:]))
    return "".join(parts)
