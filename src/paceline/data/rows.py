"""The data folder: `data.json`, what it is; `rows.jsonl`, one conversation as token ids a line."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.prompt_set import PromptSet
from paceline.errors import DataError
from paceline.records import (
    append_jsonl,
    build_provenance,
    read_json,
    read_jsonl,
    sha256_file,
    storage_errors,
    write_json,
    write_text,
)
from paceline.target import TargetFacts

__all__ = ["Row", "read_data_record", "read_rows"]

FORMAT = "paceline-data/1"
RECORD_NAME = "data.json"
ROWS_NAME = "rows.jsonl"
_RECORD_KINDS = {
    "target": dict,
    "prompts": dict,
    "counts": dict,
    "thinking": str,
    "rejected": list,
    "rows_sha256": str,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """input_ids: the whole conversation. loss_spans: [start, end) of each assistant turn, end
    token included: the tokens to predict. finish_reason: "stop", "length" (cut), or "given"
    (the assistant's words came with the data)."""

    row_id: str
    category: str
    input_ids: tuple[int, ...]
    loss_spans: tuple[tuple[int, int], ...]
    finish_reason: str

    @property
    def num_supervised(self) -> int:
        return sum(end - start for start, end in self.loss_spans)


def read_data_record(data_dir: str | Path) -> dict[str, Any]:
    """`data.json` of a finished data folder. Raises DataError when it is absent or unfinished."""
    path = Path(data_dir) / RECORD_NAME
    record = read_json(
        path, error=DataError, expected="a data folder, as `paceline data answer --out` writes it"
    )
    _require_format(record, path)
    if not record.get("complete"):
        raise DataError(
            "this data folder is unfinished",
            where=str(path),
            fix="Run the same `paceline data` command again; it goes on where it stopped.",
        )
    for key, kind in _RECORD_KINDS.items():
        if not isinstance(record.get(key), kind):
            raise DataError(
                f"'{key}' is missing or of the wrong kind",
                where=str(path),
                fix="Restore the file, or make the data again under another --out.",
            )
    return record


def read_rows(data_dir: str | Path) -> list[Row]:
    """Rows of a data folder in file order. Raises DataError naming the line that is wrong."""
    path = Path(data_dir) / ROWS_NAME
    rows: list[Row] = []
    seen: set[str] = set()
    for number, value in enumerate(read_jsonl(path, error=DataError), 1):
        row = _parse_row(value, f"{path}:{number}")
        if row.row_id in seen:
            raise DataError(f"row {row.row_id!r} is there twice", where=f"{path}:{number}")
        seen.add(row.row_id)
        rows.append(row)
    return rows


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _parse_row(value: Mapping[str, Any], where: str) -> Row:
    texts = [value.get(key) for key in ("id", "category", "finish_reason")]
    ids, spans = value.get("input_ids"), value.get("loss_spans")
    if not all(isinstance(text, str) and text for text in texts):
        raise DataError("id, category and finish_reason must be text", where=where)
    if not _is_ids(ids) or not ids:
        raise DataError("input_ids is not a list of token ids", where=where)
    ends = 0
    if not isinstance(spans, list) or not spans:
        raise DataError("loss_spans is empty: nothing to learn from this row", where=where)
    for span in spans:
        if not _is_ids(span) or len(span) != 2 or not ends <= span[0] < span[1] <= len(ids):
            raise DataError(
                f"loss span {span!r} does not fit",
                where=where,
                expected=f"[start, end) in order within {len(ids)} tokens",
            )
        ends = span[1]
    return Row(
        row_id=str(texts[0]),
        category=str(texts[1]),
        input_ids=tuple(ids),
        loss_spans=tuple((span[0], span[1]) for span in spans),
        finish_reason=str(texts[2]),
    )


def append_row(data_dir: Path, row: Row) -> None:
    append_jsonl(
        data_dir / ROWS_NAME,
        {
            "id": row.row_id,
            "category": row.category,
            "input_ids": list(row.input_ids),
            "loss_spans": [list(span) for span in row.loss_spans],
            "finish_reason": row.finish_reason,
        },
    )


def order_rows(data_dir: Path, row_ids: Sequence[str]) -> None:
    """Puts the rows of a folder in this order; they were written as they were finished."""
    places = {row_id: place for place, row_id in enumerate(row_ids)}
    path = data_dir / ROWS_NAME
    with storage_errors(path):
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    found = [places.get(row.row_id, len(places)) for row in read_rows(data_dir)]
    if found != sorted(found):
        ordered = sorted(zip(found, lines, strict=True))
        write_text(path, "".join(f"{line}\n" for _, line in ordered))


def _require_format(record: Mapping[str, Any], path: Path) -> None:
    if record.get("format") != FORMAT:
        raise DataError(
            f"format is {record.get('format')!r}", where=str(path), expected=f"{FORMAT!r}"
        )


def build_settings(
    prompt_set: PromptSet,
    target: TargetFacts,
    *,
    made_by: str,
    sampling: Mapping[str, Any] | None,
    thinking: str,
) -> dict[str, Any]:
    """The part of the record that must not change when a stopped run goes on."""
    return {
        "made_by": made_by,
        "target": {
            "name": target.name,
            "architecture": target.architecture,
            "vocab_size": target.vocab_size,
            "tokenizer_sha256": target.tokenizer_sha256,
            "chat_template_sha256": target.chat_template_sha256,
            "weights_fingerprint": target.weights_fingerprint,
        },
        "sampling": None if sampling is None else dict(sampling),
        "thinking": thinking,
        "prompts": {
            "name": prompt_set.name,
            "sha256": prompt_set.sha256,
            "num_prompts": len(prompt_set.prompts),
        },
    }


@contextlib.contextmanager
def opened_folder(data_dir: Path, settings: Mapping[str, Any]) -> Iterator[bool]:
    """Holds the folder for one writer; yields True when it is already finished.

    A new folder gets its record at once, so that a later run can tell whether it is the same
    work. Raises DataError when other settings made the folder, or another process writes to it.
    """
    with storage_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = open(data_dir / ".lock", "w")  # noqa: SIM115
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                "another process is writing this data folder", where=str(data_dir)
            ) from None
        yield _begin(data_dir, settings)


def _begin(data_dir: Path, settings: Mapping[str, Any]) -> bool:
    path = data_dir / RECORD_NAME
    if not path.exists():
        if (data_dir / ROWS_NAME).exists():
            raise DataError(
                f"has {ROWS_NAME} but no {RECORD_NAME}: what made the rows is unknown",
                where=str(data_dir),
                fix="Choose another --out.",
            )
        record = {"format": FORMAT, "complete": False, **settings}
        write_json(path, {**record, "provenance": build_provenance()})
        return False
    record = read_json(
        path, error=DataError, expected="a data folder, as `paceline data answer --out` writes it"
    )
    _require_format(record, path)
    for key, wanted, found in _differences(settings, record):
        raise DataError(
            f"{key} is {wanted!r}, but the rows already there were made with {found!r}",
            where=str(path),
            fix="Use the same settings to go on, or choose another --out.",
        )
    return bool(record.get("complete"))


def _differences(
    wanted: Mapping[str, Any], found: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key, value in wanted.items():
        other = found.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{prefix}{key}.")
        elif value != other:
            yield f"{prefix}{key}", value, other


def finish_record(
    data_dir: Path,
    settings: Mapping[str, Any],
    *,
    rejected: Sequence[Mapping[str, Any]],
    seed: int | None,
) -> dict[str, Any]:
    """Writes and returns the finished record."""
    rows = read_rows(data_dir)
    reasons = sorted({row.finish_reason for row in rows})
    record = {
        "format": FORMAT,
        "complete": True,
        **settings,
        "counts": {
            "rows": len(rows),
            "rejected": len(rejected),
            "tokens": sum(len(row.input_ids) for row in rows),
            "supervised_tokens": sum(row.num_supervised for row in rows),
            "longest_row": max(len(row.input_ids) for row in rows),
            "finish_reasons": {r: sum(row.finish_reason == r for row in rows) for r in reasons},
        },
        "rejected": [dict(item) for item in rejected],
        "rows_sha256": sha256_file(data_dir / ROWS_NAME),
        "provenance": build_provenance(seed=seed),
    }
    write_json(data_dir / RECORD_NAME, record)
    return record
