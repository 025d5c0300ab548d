"""The one checkpoint format: a folder of weights, optimiser state and a readable record.

    OUT.checkpoint/
      weights.safetensors     float32 masters (and d2t), by tensor name
      optimizer.safetensors   AdamW's two moments, `first.NAME` and `second.NAME`
      meta.json               step, what the run is, what the data is

Nothing else is needed to go on: the learning rate and the order of batches are pure functions of
the step and the seed. The folder is written beside its name and swapped in: a kill leaves the old.
It holds whole tensors, however many processes made it, so any number of them can go on from it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import RecipeError, StorageError
from paceline.records import atomic_folder, read_json, storage_errors, write_json
from paceline.train.ranks import Ranks
from paceline.train.sharding import spread, whole

__all__ = [
    "Checkpoint",
    "read_checkpoint",
    "remove_checkpoint",
    "require_room",
    "restore",
    "restore_moments",
    "restore_weights",
    "save_tensors",
    "write_checkpoint",
]

_FORMAT = "paceline-checkpoint/1"
_FILES = ("weights.safetensors", "optimizer.safetensors", "meta.json")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """step: optimiser steps finished. run: what must be equal to go on. totals: running sums."""

    step: int
    run: dict[str, Any]
    totals: dict[str, Any]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def require_room(path: Path, module: nn.Module) -> None:
    """Raises StorageError when the disk cannot hold what training writes: a checkpoint and the next
    one beside it (weights and two moments in float32), then the draft in 16 bit."""
    num = sum(parameter.numel() for parameter in module.parameters())
    needed = num * (2 * 3 * 4 + 2)
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"the disk has no room for checkpoints: {free / 1e3:,.0f} kB are free",
            where=str(folder),
            expected=f"{needed / 1e3:,.0f} kB for {num:,} parameters",
            fix="Free some space, or choose another --out.",
        )


def write_checkpoint(
    path: Path,
    *,
    step: int,
    run: Mapping[str, Any],
    totals: Mapping[str, Any],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks | None = None,
) -> None:
    """Writes all of it or nothing. Every process calls it, the first writes. Raises StorageError.

    A parameter that is not trained has no moments.
    """
    ranks = ranks or Ranks()
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}

    def keep(into: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        gathered = whole(tensor.detach())
        if ranks.is_first:
            into[name] = gathered.cpu().contiguous()

    for name, tensor in module.state_dict().items():
        keep(weights, name, tensor)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            keep(moments, f"first.{name}", state["exp_avg"])
            keep(moments, f"second.{name}", state["exp_avg_sq"])
    if ranks.is_first:
        with ranks.writing, atomic_folder(path, replace=True) as folder:
            save_tensors(weights, folder / "weights.safetensors")
            save_tensors(moments, folder / "optimizer.safetensors")
            write_json(
                folder / "meta.json",
                {"format": _FORMAT, "step": step, "run": dict(run), "totals": dict(totals)},
            )
    ranks.wait()


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Raises OSError, which the library hides in an error of its own."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, str(path))
    except SafetensorError as problem:
        number = re.search(r"os error (\d+)", str(problem))
        if number is None:
            raise
        raise OSError(int(number[1]), str(problem), str(path)) from None


def read_checkpoint(path: Path, *, run: Mapping[str, Any]) -> Checkpoint:
    """Reads a checkpoint of the same run. Raises RecipeError naming what is missing or differs."""
    if not path.is_dir():
        raise RecipeError(
            "there is no checkpoint to go on from",
            where=str(path),
            fix="Start without --resume.",
        )
    for file in _FILES:
        if not (path / file).is_file():
            raise RecipeError(
                f"the checkpoint lacks {file}",
                where=str(path),
                expected=f"the files {', '.join(_FILES)}",
                fix="A run cannot go on exactly without it. Remove the folder to start again, or "
                "put the file back.",
            )
    meta = read_json(path / "meta.json", error=RecipeError)
    if meta.get("format") != _FORMAT:
        raise RecipeError(
            f"format is {meta.get('format')!r}", where=f"{path}/meta.json", expected=_FORMAT
        )
    _require_same(meta["run"], dict(run), path)
    return Checkpoint(
        step=int(meta["step"]),
        run=meta["run"],
        totals=meta["totals"],
        weights=_load(path / "weights.safetensors"),
        optimizer=_load(path / "optimizer.safetensors"),
    )


def _load(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as problem:
        raise RecipeError(
            f"cannot be read: {problem}", where=str(path), fix="Remove the checkpoint folder."
        ) from None


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            result.update(_flat(inner, f"{prefix}{key}."))
        else:
            result[prefix + key] = inner
    return result


def _require_same(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    before, now = _flat(old), _flat(new)
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise RecipeError(
                f"the checkpoint was made with another {key}: {before.get(key)!r}",
                where=f"{path}/meta.json",
                expected=f"{now.get(key)!r}, as this run has",
                fix="Go on with the same recipe, target and data, or remove the checkpoint folder "
                "to start again.",
            )


def restore(checkpoint: Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts weights and moments back into a fresh optimiser. Raises RecipeError on a mismatch."""
    restore_weights(checkpoint, module)
    restore_moments(checkpoint, module, optimizer)


def restore_weights(checkpoint: Checkpoint, module: nn.Module) -> None:
    """Before a module is spread over processes."""
    try:
        module.load_state_dict(checkpoint.weights)
    except RuntimeError as problem:
        raise RecipeError(f"the checkpoint's weights do not fit: {problem}") from None


def restore_moments(
    checkpoint: Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """After it: each process keeps its piece."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        first, second = (checkpoint.optimizer.get(f"{m}.{name}") for m in ("first", "second"))
        if first is None or second is None or first.shape != parameter.shape:
            raise RecipeError(f"the checkpoint lacks the optimiser's state of '{name}'")
        optimizer.state[parameter] = {
            "step": torch.tensor(float(checkpoint.step), device=parameter.device),
            "exp_avg": spread(first, parameter),
            "exp_avg_sq": spread(second, parameter),
        }


def remove_checkpoint(path: Path) -> None:
    """After the draft is written; a checkpoint that was never made is fine."""
    with storage_errors(path):
        if path.is_dir():
            shutil.rmtree(path)
