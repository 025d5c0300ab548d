"""States of a target written to a folder once, and read back in place of running it (data/states).

The file of a run of rows is written whole under another name and then renamed: a stop loses at most
one file's work. Rows of like length are read together, padded on the right: the values are those
of a row alone up to the rounding of its matrix products, and the same again after a stop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.data import Row, StatesPlan, plan_states, read_data_record, read_rows
from paceline.data.states import FORMAT, RECORD_NAME, require_states_room
from paceline.errors import DataError
from paceline.records import build_provenance, read_json, storage_errors, write_json
from paceline.target import TargetFacts
from paceline.train.batches import Batch, plan_batches
from paceline.train.checkpoint import save_tensors
from paceline.train.features import TextFeatures, load_frozen_target
from paceline.train.vetting import require_described, require_known_tokens, require_same_target

__all__ = ["StatesRun", "StoredStates", "store_states"]

_ROWS_TOGETHER, _TOKENS_TOGETHER = 256, 8192  # tokens are padded ones

StatesRun = Callable[[Sequence[Row]], Iterable[Tensor]]


def store_states(
    data_dir: str | Path,
    *,
    target: TargetFacts,
    out_dir: str | Path,
    aux_layer_ids: Sequence[int],
    dtype: str = "bfloat16",
    max_length: int,
    device: str | None = None,
    file_bytes: int | None = None,
    run: StatesRun | None = None,
    on_plan: Callable[[StatesPlan, int], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> StatesPlan:
    """Writes the states of every row; the same call on an unfinished folder goes on.

    run: what reads rows in place of the target through transformers, such as an engine: for each
    row [tokens, width], its layers and last state side by side. on_plan: told the plan and the
    bytes to come, before the target is loaded. on_progress: rows done, rows in all. Raises
    DataError, StorageError (also where the disk cannot hold them, before the first token) and
    TargetError.
    """
    data_dir, out_dir = Path(data_dir), Path(out_dir)
    record, rows = read_data_record(data_dir), read_rows(data_dir)
    require_same_target(record, target, data_dir)
    require_described(rows, record, data_dir)
    require_known_tokens(rows, target, data_dir)
    sizes: dict[str, Any] = {} if file_bytes is None else {"file_bytes": file_bytes}
    plan = plan_states(
        data_dir,
        rows,
        target,
        aux_layer_ids=aux_layer_ids,
        dtype=dtype,
        max_length=max_length,
        **sizes,
    )
    _begin(plan, out_dir)
    to_come = require_states_room(plan, out_dir)
    if on_plan is not None:
        on_plan(plan, to_come)
    waiting = [(name, numbers) for name, numbers in plan.files if not (out_dir / name).exists()]
    if waiting:
        run = run or _run_target(target, plan, device)
        done = len(rows) - sum(len(numbers) for _, numbers in waiting)
        for name, numbers in waiting:
            asked = [rows[number] for number in numbers]
            tensors: dict[str, Tensor] = {}
            for number, states in zip(numbers, run(asked), strict=True):
                _require_right(states, rows[number], plan, f"{data_dir}/rows.jsonl:{number + 1}")
                tensors[str(number)] = states.contiguous().cpu()
                done += 1
                if on_progress is not None:
                    on_progress(done, len(rows))
            _write(out_dir / name, tensors)
    write_json(out_dir / RECORD_NAME, {**_describe(plan), "complete": True})
    return plan


def _describe(plan: StatesPlan) -> dict[str, Any]:
    return {"format": FORMAT, **plan.as_dict(), "provenance": build_provenance()}


def _begin(plan: StatesPlan, out_dir: Path) -> None:
    """Raises DataError where the folder was begun for something else."""
    path = out_dir / RECORD_NAME
    if not path.exists():
        with storage_errors(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
        write_json(path, {**_describe(plan), "complete": False})
        return
    found = read_json(path, error=DataError)
    for key, wanted in plan.as_dict().items():
        if found.get(key) != wanted:
            raise DataError(
                f"the states already there were made with another {key}: {found.get(key)!r}",
                where=str(path),
                expected=repr(wanted),
                fix="Use the same settings to go on, or choose another --out.",
            )


def _run_target(target: TargetFacts, plan: StatesPlan, device: str | None) -> StatesRun:
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    frozen = load_frozen_target(target, device=place, dtype=getattr(torch, plan.dtype))

    def run(rows: Sequence[Row]) -> Iterator[Tensor]:
        for start in range(0, len(rows), _ROWS_TOGETHER):
            yield from together(rows[start : start + _ROWS_TOGETHER])

    def together(rows: Sequence[Row]) -> list[Tensor]:
        ids = [torch.tensor(row.input_ids[: plan.max_length]) for row in rows]
        states = [torch.empty(0)] * len(rows)
        lengths = [len(one) for one in ids]
        for numbers in plan_batches(lengths, tokens_per_batch=_TOKENS_TOGETHER, seed=0):
            tokens_BT = pad_sequence([ids[n] for n in numbers], batch_first=True).to(place)
            found = frozen.features(tokens_BT, plan.aux_layer_ids)
            taps = [found.taps_BTF] if plan.aux_layer_ids else []
            states_BTF = torch.cat([*taps, found.final_BTD], -1).cpu()
            for number, row_TF in zip(numbers, states_BTF, strict=True):
                states[number] = row_TF[: lengths[number]].clone()
        return states

    return run


def _require_right(states: Tensor, row: Row, plan: StatesPlan, where: str) -> None:
    wanted = (min(len(row.input_ids), plan.max_length), plan.width)
    if tuple(states.shape) != wanted:
        raise DataError(
            f"row '{row.row_id}' was given states of shape {list(states.shape)}",
            where=where,
            expected=f"{list(wanted)}: one a token",
        )
    if not bool(states.isfinite().all()):
        raise DataError(
            f"the target's own states of row '{row.row_id}' are not finite numbers",
            where=where,
            fix="Look at the row with `paceline data show`; if there are more, check the target's "
            "weights (`paceline target show`) or store float32.",
        )


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    beside = path.with_name(f".{path.name}.new")
    with storage_errors(path):
        try:
            save_tensors(tensors, beside)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


class StoredStates:
    """States of rows by their ids, read from the folder when asked. State: the open files."""

    def __init__(
        self,
        states_dir: str | Path,
        plan: StatesPlan,
        rows: Sequence[Row],
        *,
        aux_layer_ids: Sequence[int],
    ) -> None:
        """plan: of a checked folder (`check_states`); rows: of the whole data folder."""
        self.plan = plan
        self._dir, self._width = Path(states_dir), plan.hidden_size
        self._file_of = {n: name for name, numbers in plan.files for n in numbers}
        self._number_of = {row.row_id: number for number, row in enumerate(rows)}
        self._places = [plan.aux_layer_ids.index(layer) for layer in aux_layer_ids]
        self._dtype, self._open = getattr(torch, plan.dtype), dict[str, Any]()

    def features(self, batch: Batch, *, device: torch.device) -> TextFeatures:
        """Of a batch of these rows, padded with zeros. Raises DataError for what cannot be read."""
        size, width = batch.tokens_BT.shape, self._width
        taps_BTF = torch.zeros(*size, width * max(1, len(self._places)), dtype=self._dtype)
        final_BTD = torch.zeros(*size, width, dtype=self._dtype)
        rows = zip(batch.row_ids, batch.lengths_R, batch.corners_R, strict=True)
        for row_id, length, (slot, first) in rows:
            states = self._read(self._number_of[row_id])[:length]
            here = slice(first, first + length)
            layers = states.view(length, -1, width)
            final_BTD[slot, here] = layers[:, -1]
            taps = layers[:, self._places] if self._places else layers[:, -1:]
            taps_BTF[slot, here] = taps.flatten(1)
        return TextFeatures(taps_BTF=taps_BTF.to(device), final_BTD=final_BTD.to(device))

    def _read(self, number: int) -> Tensor:
        from safetensors import SafetensorError, safe_open

        name = self._file_of[number]
        try:
            if name not in self._open:
                self._open[name] = safe_open(str(self._dir / name), framework="pt")
            states: Tensor = self._open[name].get_tensor(str(number))
        except (OSError, SafetensorError) as problem:
            raise DataError(f"cannot be read: {problem}", where=str(self._dir / name)) from None
        return states
