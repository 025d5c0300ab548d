"""What the room offers outside; torch is imported only when one of these runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import MissingExtraError
from paceline.target import TargetFacts
from paceline.train.launch import world_size
from paceline.train.places import require_free
from paceline.train.recipe import Recipe

if TYPE_CHECKING:
    from paceline.data import StatesPlan
    from paceline.draft import Draft
    from paceline.train.loop import Progress
    from paceline.train.replay import Replay, ReplayText

__all__ = ["replay_draft", "simulate_draft", "store_states", "train_draft"]


def _require_extra(doing: str) -> None:
    for package in ("torch", "transformers", "safetensors"):
        if find_spec(package) is None:
            raise MissingExtraError(
                f"{doing} needs {package}", fix="Run `pip install 'paceline[train]'`."
            )


def train_draft(
    recipe: Recipe,
    *,
    target: TargetFacts,
    data_dir: str | Path,
    out_dir: str | Path,
    device: str | None = None,
    resume: bool = False,
    sharded_target: bool = False,
    states_dir: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Draft:
    """Trains a draft on a data folder and writes its folder at out_dir.

    Checkpoints lie in `OUT.checkpoint` beside it until the draft is written; with `resume` the run
    goes on from there exactly: on the CPU the result is bit-equal to an uninterrupted run. device:
    "cpu" or "cuda", None takes a GPU if there is one.

    In processes started by torchrun (or `paceline train --nproc-per-node`) every one calls this and
    all train the same draft: the same batches, losses and checkpoints as one process alone. The
    first writes, and is told the progress; out_dir must be the same folder on every machine.
    sharded_target: the target's layers are spread over the processes, where one GPU cannot hold it.
    states_dir: the target's states are read from there (`store_states`) and it is not run.

    Raises RecipeError, DataError, TargetError,
    DraftError, StorageError; Ctrl-C leaves a checkpoint.
    """
    _require_extra("training")
    if world_size() == 1:  # several processes say it together, once they have met
        require_free(out_dir, resume=resume)
    from paceline.train.loop import run_training

    return run_training(
        recipe,
        target=target,
        data_dir=data_dir,
        out_dir=out_dir,
        device=device,
        resume=resume,
        sharded_target=sharded_target,
        states_dir=states_dir,
        on_progress=on_progress,
    )


def store_states(
    data_dir: str | Path,
    *,
    target: TargetFacts,
    out_dir: str | Path,
    aux_layer_ids: Sequence[int],
    dtype: str = "bfloat16",
    max_length: int,
    device: str | None = None,
    on_plan: Callable[[StatesPlan, int], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> StatesPlan:
    """Writes the target's states over a data folder; see paceline.train.stored."""
    _require_extra("storing states")
    from paceline.train import stored

    return stored.store_states(
        data_dir,
        target=target,
        out_dir=out_dir,
        aux_layer_ids=aux_layer_ids,
        dtype=dtype,
        max_length=max_length,
        device=device,
        on_plan=on_plan,
        on_progress=on_progress,
    )


def replay_draft(
    draft: Draft,
    target: TargetFacts,
    texts: Sequence[ReplayText],
    *,
    num_speculative_tokens: int | None = None,
    device: str = "cpu",
    dtype: str = "bfloat16",
) -> Replay:
    """Walks the steps a server took with the trainer's own forward.

    texts: (prompt_ids, output_ids, per_step_accepted) of each answer; every step drafted K tokens.
    """
    _require_extra("the replay")
    from paceline.train import replay

    return replay.replay_draft(
        draft,
        target,
        texts,
        num_speculative_tokens=num_speculative_tokens,
        device=device,
        dtype=dtype,
    )


def simulate_draft(
    draft: Draft,
    target: TargetFacts,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    device: str = "cpu",
    dtype: str = "bfloat16",
) -> list[tuple[int, ...]]:
    """Accepted tokens of each step along the target's greedy answers, before any server runs.

    texts: (prompt_ids, output_ids) of each answer.
    """
    _require_extra("the simulation")
    from paceline.train import replay

    return replay.simulate_draft(draft, target, texts, device=device, dtype=dtype)
