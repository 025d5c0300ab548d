"""The training loop: recipe, target and data folder in, a draft folder out.

Precision: parameters, gradients and AdamW's moments are float32; every matrix product runs in the
recipe's dtype with the weight cast where it is used; norms, softmax and losses run in float32.

One process or many: a step is the same batch of `tokens_per_batch` whatever their number, computed
in parts (prepare.py) whose losses are shares of one sum, so gradients and loss are sums over parts.
Alone, a process computes all parts; many hold the draft in pieces (sharding.py). Everything that
decides how a run goes on (loss, norm, stop) is one sum that all see: none takes another turn.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.draft import Draft, write_draft
from paceline.errors import PacelineError, RecipeError
from paceline.target import TargetFacts
from paceline.train.batches import batch_order
from paceline.train.checkpoint import (
    Checkpoint,
    read_checkpoint,
    remove_checkpoint,
    require_room,
    restore_moments,
    restore_weights,
    write_checkpoint,
)
from paceline.train.families.eagle3_weights import export_tensors
from paceline.train.features import keep_ends, load_frozen_target
from paceline.train.launch import world_size
from paceline.train.places import checkpoint_path, require_free
from paceline.train.prepare import BatchSource
from paceline.train.ranks import Ranks, find_device, open_ranks, stop_requests
from paceline.train.recipe import Recipe, learning_rate
from paceline.train.setup import Setup, build_setup
from paceline.train.sharding import (
    clip_gradients,
    gather_state,
    shard_module,
    shard_target,
)
from paceline.train.step import DraftStep, backward

__all__ = ["Progress", "run_training"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One optimiser step, as told to on_progress.

    loss: this step's. position_accuracy[i]: share of this batch's supervised tokens that unroll
    step i predicts, the text's own tokens given; None when it supervises none. A teacher-forced
    number over all positions: served acceptance is another (see replay). tokens_per_s: real tokens
    of all processes since training (or the resume) began, features included.
    """

    step: int
    num_steps: int
    epoch: int
    loss: float
    position_accuracy: tuple[float | None, ...]
    learning_rate: float
    tokens_per_s: float
    row_ids: tuple[str, ...]


def run_training(
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
    """Trains and writes the draft folder; see paceline.train.train_draft."""
    out_dir = Path(out_dir)
    if sharded_target and states_dir is not None:
        raise RecipeError(
            "a target that is read from stored states runs on no process",
            expected="stored states, or a target spread over the processes",
            fix="Leave --sharded-target or --states out.",
        )
    if sharded_target and world_size() == 1:
        raise RecipeError(
            "a target cannot be spread over one process",
            expected="several processes",
            fix="Leave --sharded-target out, or give --nproc-per-node.",
        )
    with open_ranks(find_device(device)) as ranks:
        if ranks.is_first:
            require_free(out_dir, resume=resume)
        setup = build_setup(recipe, target=target, data_dir=data_dir, states_dir=states_dir)
        checkpoint = read_checkpoint(checkpoint_path(out_dir), run=setup.run) if resume else None
        ranks.require_same({**setup.run, "checkpoint": checkpoint.step if checkpoint else None})
        draft = _train(
            setup,
            ranks,
            checkpoint,
            out_dir=out_dir,
            sharded_target=sharded_target,
            on_progress=on_progress if ranks.is_first else None,
        )
        return ranks.share(draft)  # type: ignore[no-any-return]


def _train(
    setup: Setup,
    ranks: Ranks,
    checkpoint: Checkpoint | None,
    *,
    out_dir: Path,
    sharded_target: bool,
    on_progress: Callable[[Progress], None] | None,
) -> Draft | None:
    """The draft on the first process, None on the others."""
    recipe = setup.recipe
    dtype = torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32
    is_apart = sharded_target or setup.states is not None
    place = torch.device("cpu") if is_apart else ranks.device
    frozen = load_frozen_target(setup.target, device=place, dtype=dtype)
    module, taken = setup.build_module(frozen)
    shape = copy.deepcopy(module).to("meta")
    if ranks.is_first:
        require_room(checkpoint_path(out_dir), shape)
    if sharded_target:
        frozen = shard_target(frozen, ranks)
    if setup.states is not None:
        frozen = keep_ends(frozen, device=ranks.device)
    if checkpoint is not None:
        restore_weights(checkpoint, module)
    module.to(ranks.device)
    source = BatchSource(
        setup.rows,
        frozen,
        recipe,
        aux_layer_ids=setup.aux_layer_ids,
        draft_tokens=setup.draft_tokens,
        greedy_rows=setup.greedy_rows,
        ranks=ranks,
        stored=setup.states,
    )
    step = DraftStep(module, frozen, source.teacher_head_VD, recipe)
    if ranks.world > 1:
        shard_module(step, ranks)
    optimizer = build_optimizer(module, recipe)
    totals: dict[str, Any] = {"tokens": 0, "seconds": 0.0, "coverage": 0.0, "batches": 0}
    if checkpoint is not None:
        restore_moments(checkpoint, module, optimizer)
        totals.update(checkpoint.totals)
    num_steps = count_steps(recipe, len(source))
    _run(
        step,
        optimizer,
        source,
        setup,
        ranks,
        first=1 if checkpoint is None else checkpoint.step + 1,
        num_steps=num_steps,
        totals=totals,
        out_dir=out_dir,
        on_progress=on_progress,
    )
    state = gather_state(module)
    if not ranks.is_first:
        return None
    shape.load_state_dict(state, assign=True)
    with ranks.writing:
        draft = write_draft(
            out_dir,
            family=recipe.family,
            config=setup.config,
            tensors=export_tensors(shape, torch.bfloat16),
            num_speculative_tokens=recipe.draft.num_speculative_tokens,
            spec={},
            metadata=setup.metadata(out_dir, totals=totals, num_steps=num_steps, taken=taken),
        )
        remove_checkpoint(checkpoint_path(out_dir))
    return draft


def count_steps(recipe: Recipe, num_batches: int) -> int:
    if recipe.optim.num_steps is not None:
        return recipe.optim.num_steps
    return (recipe.optim.num_epochs or 0) * num_batches


def build_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.optim.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.optim.lr,
        betas=recipe.optim.betas,
        fused=True,
    )


def _run(
    step_module: DraftStep,
    optimizer: torch.optim.Optimizer,
    source: BatchSource,
    setup: Setup,
    ranks: Ranks,
    *,
    first: int,
    num_steps: int,
    totals: dict[str, Any],
    out_dir: Path,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    recipe, module = setup.recipe, step_module.draft
    path, k = checkpoint_path(out_dir), setup.recipe.num_unrolled
    started, tokens_here, seconds_before = time.monotonic(), 0, totals["seconds"]
    finished, updating = first - 1, False

    def save() -> None:
        write_checkpoint(
            path,
            step=finished,
            run=setup.run,
            totals=totals,
            module=module,
            optimizer=optimizer,
            ranks=ranks,
        )

    step_module.train()
    with stop_requests(ranks) as asked:
        try:
            for step in range(first, num_steps + 1):
                epoch, cursor = divmod(step - 1, len(source))
                number = batch_order(len(source), seed=recipe.seed, epoch=epoch)[cursor]
                parts = source.get(number, epoch=epoch)
                sums = backward(step_module, parts, ranks)
                sums[-1] = float(asked())
                loss, square, *shares, stop = ranks.sum(sums)
                norm = math.sqrt(square) if square >= 0 else math.nan
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    raise _diverged(step, loss, norm, source.row_ids(number), path)
                clip_gradients(module.parameters(), norm=norm, limit=recipe.optim.grad_clip)
                rate = learning_rate(recipe.optim, step, num_steps=num_steps)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                updating = True
                optimizer.step()
                finished, tokens_here = step, tokens_here + parts[0].num_tokens
                totals["tokens"] += parts[0].num_tokens
                totals["coverage"] += parts[0].coverage
                totals["batches"] += 1
                elapsed = time.monotonic() - started
                totals["seconds"] = seconds_before + elapsed
                updating = False
                optimizer.zero_grad(set_to_none=True)
                if stop or (step % recipe.optim.checkpoint_steps == 0 and step < num_steps):
                    save()
                if on_progress is not None:
                    on_progress(
                        Progress(
                            step=step,
                            num_steps=num_steps,
                            epoch=epoch,
                            loss=loss,
                            position_accuracy=tuple(
                                hits / n if n else None
                                for hits, n in zip(shares[:k], shares[k:], strict=True)
                            ),
                            learning_rate=rate,
                            tokens_per_s=tokens_here / max(elapsed, 1e-9),
                            row_ids=source.row_ids(number),
                        )
                    )
                if stop:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            # inside an update the weights are between two steps; several processes save together
            if ranks.world == 1 and finished and not updating:
                save()
            raise
        except torch.OutOfMemoryError as problem:
            raise _no_memory(problem, source.largest_part, recipe) from None


def _diverged(
    step: int, loss: float, norm: float, row_ids: tuple[str, ...], path: Path
) -> RecipeError:
    shown = ", ".join(row_ids[:8]) + (", …" if len(row_ids) > 8 else "")
    number = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
    kept = f" The checkpoint in {path} is from before it." if path.is_dir() else ""
    return RecipeError(
        f"training broke at step {step}: {number} on rows {shown}",
        expected="finite numbers",
        fix=f"Lower optim.lr, or look at these rows with `paceline data show`.{kept}",
    )


def _no_memory(problem: Exception, largest: int, recipe: Recipe) -> PacelineError:
    said = str(problem).splitlines()[0]
    return RecipeError(
        f"the GPU has no room for a part of {largest:,} padded tokens: {said}",
        where=recipe.path,
        fix="Set optim.tokens_per_part below that (the result stays the same), lower "
        "optim.feature_cache_bytes, or spread the target with --sharded-target.",
    )
