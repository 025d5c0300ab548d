"""What is wrong with rows is said before a target is loaded: which row, which file, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from paceline.data import Row, Thinking, open_tokenizer, plain_thinking
from paceline.errors import DataError, RecipeError
from paceline.records import sha256_file
from paceline.target import TargetFacts
from paceline.train.vocabulary import count_supervised

__all__ = [
    "require_covered",
    "require_described",
    "require_ended",
    "require_known_tokens",
    "require_one_template",
    "require_same_target",
]

_MIN_SHARE = 0.5  # of what the best vocabulary of that size says
_ROWS = "rows.jsonl"
_FINGERPRINTS = ("tokenizer_sha256", "chat_template_sha256")


def require_described(rows: Sequence[Row], record: Mapping[str, Any], data_dir: Path) -> None:
    """Raises DataError when rows.jsonl is not the file whose hash data.json holds."""
    if sha256_file(data_dir / _ROWS) == record["rows_sha256"]:
        return
    counted = record["counts"].get("rows")
    differs = f"it holds {len(rows):,} rows and data.json counts {counted:,}"
    if counted == len(rows) or not isinstance(counted, int):
        differs = "its content was changed since"
    raise DataError(
        f"the rows are not those that data.json describes: {differs}",
        where=f"{data_dir}/{_ROWS}",
        expected=f"sha256 {str(record['rows_sha256'])[:12]}…, as data.json has it",
        fix="Restore the file, or make the data again under another --out; parts of other data "
        "folders have other answers, templates or targets.",
    )


def require_ended(rows: Sequence[Row], target: TargetFacts, data_dir: Path) -> None:
    """Raises DataError for an answer that is said to have ended and lacks its end token."""
    ends = set(target.eos_token_ids)
    for number, row in enumerate(rows, 1):
        if row.finish_reason == "stop" and row.input_ids[-1] not in ends:
            raise DataError(
                f"row '{row.row_id}' was cut: it says that the answer ended by itself, and its "
                f"last token is {row.input_ids[-1]}",
                where=f"{data_dir}/{_ROWS}:{number}",
                expected=f"an end token ({', '.join(map(str, sorted(ends)))}), or finish_reason "
                '"length"',
            )


def require_one_template(
    rows: Sequence[Row], record: Mapping[str, Any], target: TargetFacts, data_dir: Path
) -> None:
    """Raises DataError when some rows ask for their answer as the target's template does, in the
    thinking mode of the record, and others do not. Rows that none of them do were made by hand."""
    if target.chat_template_sha256 is None or not (target.path / "tokenizer.json").is_file():
        return
    thinking: Thinking = record["thinking"]
    if thinking == "none":  # of rows made by hand, where the template has a switch
        thinking = plain_thinking(target)
    tokenizer = open_tokenizer(target, thinking=thinking)
    one, other = (
        tokenizer.encode_prompt(({"role": "user", "content": words},)) for words in ("7", "why")
    )
    pairs = zip(reversed(one), reversed(other), strict=False)
    tail = one[len(one) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
    fits = [row.input_ids[: row.loss_spans[-1][0]][-len(tail) :] == tail for row in rows]
    if not tail or all(fits) or not any(fits):
        return
    number = fits.index(False)
    row = rows[number]
    found = row.input_ids[: row.loss_spans[-1][0]][-len(tail) :]
    raise DataError(
        f"row '{row.row_id}' is in another template than the others: before its answer stands "
        f"{tokenizer.decode(found)!r}",
        where=f"{data_dir}/{_ROWS}:{number + 1}",
        expected=f"{tokenizer.decode(tail)!r} (thinking {thinking}), as in {sum(fits):,} rows",
        fix="Answer all prompts in one mode, with one template.",
    )


def require_covered(draft_tokens: Sequence[int], rows: Sequence[Row], source: str) -> None:
    """Raises RecipeError when a vocabulary taken over from a draft was made for other texts."""
    counts, known = count_supervised(rows), set(draft_tokens)
    said = sum(n for token, n in counts.items() if token in known)
    best = sum(n for _, n in counts.most_common(len(known)))
    if said < _MIN_SHARE * best:
        raise RecipeError(
            f"the draft to start from can say {100 * said / counts.total():.0f} % of the tokens of "
            "these rows: its vocabulary was made for other texts",
            where=source,
            expected=f"at least half of {100 * best / counts.total():.0f} %, what a vocabulary of "
            "that size made for them says",
            fix="Start from the target, or train on the data that the vocabulary was made for.",
        )


def require_same_target(record: Mapping[str, Any], target: TargetFacts, data_dir: Path) -> None:
    """Raises DataError for rows that another tokenizer or template made."""
    made_for = record.get("target")
    if not isinstance(made_for, Mapping):
        raise DataError("key 'target' is missing", where=f"{data_dir}/data.json")
    for name in _FINGERPRINTS:
        if made_for.get(name) != getattr(target, name):
            raise DataError(
                f"the data was made for a target with another {name}",
                where=f"{data_dir}/data.json",
                expected=f"{getattr(target, name)} (target '{target.name}')",
                fix="Answer the prompts with this target, or train for the target of the data.",
            )


def require_known_tokens(rows: Sequence[Row], target: TargetFacts, data_dir: Path) -> None:
    """Raises DataError for the first row with an id beyond the target's vocabulary."""
    for row in rows:
        worst = max(row.input_ids)
        if worst >= target.vocab_size or min(row.input_ids) < 0:
            raise DataError(
                f"row '{row.row_id}' holds token {worst}",
                where=f"{data_dir}/rows.jsonl",
                expected=f"ids from 0 to {target.vocab_size - 1}",
            )
