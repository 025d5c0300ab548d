"""Stored states of a target over a data folder: what they cost, and whether a folder holds them.

    STATES/
      states.json               what it is: rows, target, tapped layers, dtype, files
      states-00000.safetensors  one tensor a row, named by its place in rows.jsonl: [tokens, width]

A token's width is its tapped layers, ascending, then the state after the final norm: (taps + 1)
hidden sizes. Rows stand in file order and a file ends where it would grow past FILE_BYTES, so which
row lies where follows from the rows alone and an unfinished folder goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.data.rows import Row
from paceline.errors import DataError, StorageError
from paceline.records import read_json, sha256_file
from paceline.safetensors_header import read_header
from paceline.target import TargetFacts

__all__ = ["StatesPlan", "check_states", "plan_states", "read_states_plan", "require_states_room"]

FORMAT = "paceline-states/1"
RECORD_NAME = "states.json"
FILE_BYTES = 2**30
DTYPES = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}
_HEADER_BYTES = 2**17  # of one file at most, for thousands of rows
_FIX = "Make the states again under another --out."


@dataclass(frozen=True, kw_only=True)
class StatesPlan:
    """What a states folder holds. lengths: tokens of each row, cut to max_length."""

    rows_sha256: str
    weights_fingerprint: str
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    max_length: int
    lengths: tuple[int, ...]
    file_bytes: int = FILE_BYTES

    @property
    def width(self) -> int:
        return (len(self.aux_layer_ids) + 1) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        return self.width * DTYPES[self.dtype][1]

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths) * self.bytes_per_token

    @property
    def files(self) -> list[tuple[str, range]]:
        """(name, row numbers) of each file."""
        starts, held = [0], 0
        for number, length in enumerate(self.lengths):
            size = length * self.bytes_per_token
            if held and held + size > self.file_bytes:
                starts.append(number)
                held = 0
            held += size
        ends = [*starts, len(self.lengths)]
        return [
            (f"states-{number:05}.safetensors", range(a, b))
            for number, (a, b) in enumerate(pairwise(ends))
        ]

    def as_dict(self) -> dict[str, Any]:
        """What states.json says of it."""
        return {
            "rows_sha256": self.rows_sha256,
            "weights_fingerprint": self.weights_fingerprint,
            "aux_layer_ids": list(self.aux_layer_ids),
            "hidden_size": self.hidden_size,
            "dtype": self.dtype,
            "max_length": self.max_length,
            "file_bytes": self.file_bytes,
        }


def plan_states(
    data_dir: str | Path,
    rows: Sequence[Row],
    target: TargetFacts,
    *,
    aux_layer_ids: Sequence[int],
    dtype: str,
    max_length: int,
    file_bytes: int = FILE_BYTES,
) -> StatesPlan:
    """The folder for these rows. Raises DataError for layers that the target does not have."""
    top = target.num_hidden_layers
    ids = tuple(aux_layer_ids)
    if list(ids) != sorted(set(ids)) or not all(0 <= layer < top for layer in ids):
        raise DataError(
            f"layers {list(ids)} cannot be stored",
            expected=f"ascending ids from 0 to {top - 1}, each once; the last state is always kept",
        )
    if target.weights_fingerprint is None:
        raise DataError("the target has no weights to be run", where=str(target.path))
    return StatesPlan(
        rows_sha256=sha256_file(Path(data_dir) / "rows.jsonl"),
        weights_fingerprint=target.weights_fingerprint,
        aux_layer_ids=ids,
        hidden_size=target.hidden_size,
        dtype=dtype,
        max_length=max_length,
        lengths=tuple(min(len(row.input_ids), max_length) for row in rows),
        file_bytes=file_bytes,
    )


def require_states_room(plan: StatesPlan, out_dir: Path) -> int:
    """Bytes still to be written. Raises StorageError where the disk cannot hold them, before the
    target has read a token."""
    there = sum(file.stat().st_size for file in out_dir.glob("states-*.safetensors"))
    needed = max(0, plan.num_bytes + len(plan.files) * _HEADER_BYTES - there)
    folder = next(parent for parent in (out_dir.absolute() / "x").parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"the disk has no room for the states: {free / 1e9:,.2f} GB are free",
            where=str(folder),
            expected=f"{needed / 1e9:,.2f} GB: {sum(plan.lengths):,} tokens of "
            f"{plan.bytes_per_token:,} bytes",
            fix="Store fewer layers or shorter rows (--max-length), choose another disk, or train "
            "without stored states: the target is then run beside the draft.",
        )
    return needed


def read_states_plan(states_dir: str | Path, rows: Sequence[Row]) -> StatesPlan:
    """The plan of a finished folder, for the rows it was made of. Raises DataError."""
    path = Path(states_dir) / RECORD_NAME
    record = read_json(
        path, error=DataError, expected="a states folder, as `paceline data states` writes it"
    )
    if record.get("format") != FORMAT:
        raise DataError(f"format is {record.get('format')!r}", where=str(path), expected=FORMAT)
    if not record.get("complete"):
        raise DataError(
            "this states folder is unfinished",
            where=str(path),
            fix="Run the same `paceline data states` again; it goes on where it stopped.",
        )
    try:
        max_length = int(record["max_length"])
        plan = StatesPlan(
            rows_sha256=str(record["rows_sha256"]),
            weights_fingerprint=str(record["weights_fingerprint"]),
            aux_layer_ids=tuple(int(layer) for layer in record["aux_layer_ids"]),
            hidden_size=int(record["hidden_size"]),
            dtype=str(record["dtype"]),
            max_length=max_length,
            lengths=tuple(min(len(row.input_ids), max_length) for row in rows),
            file_bytes=int(record["file_bytes"]),
        )
    except (KeyError, TypeError, ValueError):
        raise DataError(
            "a key is missing or of the wrong kind", where=str(path), fix=_FIX
        ) from None
    if plan.dtype not in DTYPES:
        raise DataError(f"dtype is {plan.dtype!r}", where=str(path), expected=str([*DTYPES]))
    return plan


def check_states(
    states_dir: str | Path,
    rows: Sequence[Row],
    target: TargetFacts,
    *,
    rows_sha256: str,
    aux_layer_ids: Sequence[int],
    max_length: int,
) -> StatesPlan:
    """Raises DataError for the first thing that makes a folder useless for these rows, target and
    layers, down to the shape of every row: file, row and reason, from headers alone."""
    states_dir = Path(states_dir)
    plan = read_states_plan(states_dir, rows)
    for what, found, wanted in (
        ("rows", plan.rows_sha256, rows_sha256),
        ("target", plan.weights_fingerprint, str(target.weights_fingerprint)),
    ):
        if found != wanted:
            raise DataError(
                f"the states were made of another {what}: {found[:12]}…",
                where=f"{states_dir}/{RECORD_NAME}",
                expected=f"{wanted[:12]}…",
                fix=_FIX,
            )
    missing = sorted(set(aux_layer_ids) - set(plan.aux_layer_ids))
    if missing:
        raise DataError(
            f"the states hold layers {list(plan.aux_layer_ids)} and not {missing}",
            where=f"{states_dir}/{RECORD_NAME}",
            expected=f"layers {sorted(aux_layer_ids)}, which the draft reads",
            fix="Make the states with these layers, or set draft.aux_layer_ids.",
        )
    if plan.max_length < min(max_length, max(len(row.input_ids) for row in rows)):
        raise DataError(
            f"the states end at {plan.max_length} tokens of a row",
            where=f"{states_dir}/{RECORD_NAME}",
            expected=f"optim.max_length = {max_length}, or the longest row",
            fix="Lower optim.max_length, or make longer states.",
        )
    for name, numbers in plan.files:
        _check_file(states_dir / name, numbers, rows, plan)
    return plan


def _check_file(path: Path, numbers: range, rows: Sequence[Row], plan: StatesPlan) -> None:
    if not path.is_file():
        first = rows[numbers.start].row_id
        raise DataError(f"the file of row '{first}' is missing", where=str(path), fix=_FIX)
    tensors = read_header(path, error=DataError).tensors  # also refuses a file that was cut
    for number in numbers:
        info = tensors.get(str(number))
        wanted = (plan.lengths[number], plan.width)
        found = None if info is None else info.shape
        if found != wanted:
            raise DataError(
                f"row '{rows[number].row_id}' has states of shape {list(found or ())}",
                where=f"{path}: tensor '{number}'",
                expected=f"{list(wanted)}: its tokens by {len(plan.aux_layer_ids)} layers and the "
                "last state",
                fix=_FIX,
            )
        if info is not None and info.dtype != DTYPES[plan.dtype][0]:
            raise DataError(
                f"row '{rows[number].row_id}' has states in {info.dtype}",
                where=f"{path}: tensor '{number}'",
                expected=DTYPES[plan.dtype][0],
                fix=_FIX,
            )
