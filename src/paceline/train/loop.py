"""The training loop: recipe, target and data folder in, a draft folder out.

Precision: parameters, gradients and AdamW's moments are float32; every matrix product runs in the
recipe's dtype with the weight cast where it is used; norms, softmax and losses run in float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.draft import Draft, write_draft
from paceline.errors import RecipeError, StorageError
from paceline.target import TargetFacts
from paceline.train.batches import batch_order
from paceline.train.checkpoint import (
    checkpoint_path,
    read_checkpoint,
    remove_checkpoint,
    restore,
    write_checkpoint,
)
from paceline.train.families.eagle3_weights import export_tensors
from paceline.train.families.module import DraftModule
from paceline.train.features import FrozenTarget, load_frozen_target
from paceline.train.losses import build_terms, heads_loss
from paceline.train.pacing import confidences, pace_weights
from paceline.train.prepare import BatchSource, Prepared, block_rows, chunk_rows
from paceline.train.recipe import Recipe, learning_rate
from paceline.train.setup import Setup, build_setup

__all__ = ["Progress", "StepResult", "run_training", "train_step"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One optimiser step, as told to on_progress.

    loss: this step's. position_accuracy[i]: share of this batch's supervised tokens that unroll
    step i predicts, the text's own tokens given; None when it supervises none. A teacher-forced
    number over all positions: served acceptance is another (see replay). tokens_per_s: real tokens
    since training (or the resume) began, features included.
    """

    step: int
    num_steps: int
    epoch: int
    loss: float
    position_accuracy: tuple[float | None, ...]
    learning_rate: float
    tokens_per_s: float
    row_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """loss: scalar with a gradient. correct_KM, counted_KM: per step and supervised token."""

    loss: Tensor
    correct_KM: Tensor
    counted_KM: Tensor


def run_training(
    recipe: Recipe,
    *,
    target: TargetFacts,
    data_dir: str | Path,
    out_dir: str | Path,
    device: str | None = None,
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Draft:
    """Trains and writes the draft folder; see paceline.train.train_draft."""
    out_dir = Path(out_dir)
    _require_free(out_dir, resume=resume)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32
    setup = build_setup(recipe, target=target, data_dir=data_dir)
    checkpoint = read_checkpoint(checkpoint_path(out_dir), run=setup.run) if resume else None
    frozen = load_frozen_target(target, device=place, dtype=dtype)
    module, taken = setup.build_module(frozen)
    module.to(place)
    optimizer = build_optimizer(module, recipe)
    totals: dict[str, Any] = {"tokens": 0, "seconds": 0.0, "coverage": 0.0, "batches": 0}
    first = 1
    if checkpoint is not None:
        restore(checkpoint, module, optimizer)
        totals.update(checkpoint.totals)
        first = checkpoint.step + 1
    source = BatchSource(
        setup.rows,
        frozen,
        setup.recipe,
        aux_layer_ids=setup.aux_layer_ids,
        draft_tokens=setup.draft_tokens,
        greedy_rows=setup.greedy_rows,
        device=place,
    )
    num_steps = count_steps(recipe, len(source))
    _run(
        module,
        optimizer,
        source,
        frozen,
        setup,
        first=first,
        num_steps=num_steps,
        totals=totals,
        out_dir=out_dir,
        on_progress=on_progress,
    )
    draft = write_draft(
        out_dir,
        family=recipe.family,
        config=setup.config,
        tensors=export_tensors(module, torch.bfloat16),
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


def train_step(
    module: DraftModule,
    batch: Prepared,
    frozen: FrozenTarget,
    teacher_head_VD: Tensor,
    recipe: Recipe,
) -> StepResult:
    """Forward of one batch: the K-step unroll and its loss."""
    heads = module.output_heads(frozen.head_VD)
    num_steps, mix = len(batch.source_KM), recipe.loss
    block = block_rows(len(heads[0]), num_steps, heads[0].device)
    outputs, _ = module.unroll(
        batch.tokens_BT, batch.taps_BTF, batch.bases_BN, frozen.embedding_VD, num_steps=num_steps
    )
    student_KMD = torch.stack(
        [out.flatten(0, 1)[source] for out, source in zip(outputs, batch.source_KM, strict=True)]
    )
    weights_KM = batch.weights_KM
    if mix.pace_alpha is not None:
        confidence_KM = confidences(student_KMD, heads, batch.labels_M, block=block)
        weights_KM = weights_KM * pace_weights(
            confidence_KM, batch.source_KM, batch.weights_KM > 0, alpha=mix.pace_alpha
        )
    result = heads_loss(
        student_KMD,
        heads,
        teacher_MD=batch.final_MD,
        teacher_head_VD=teacher_head_VD,
        labels_M=batch.labels_M,
        weights_KM=weights_KM,
        terms=build_terms(mix),
        block=block,
        chunk=chunk_rows(len(heads[0]), heads[0].device),
    )
    counted = batch.weights_KM > 0
    return StepResult(loss=result.loss, correct_KM=result.correct_KM & counted, counted_KM=counted)


def _run(
    module: DraftModule,
    optimizer: torch.optim.Optimizer,
    source: BatchSource,
    frozen: FrozenTarget,
    setup: Setup,
    *,
    first: int,
    num_steps: int,
    totals: dict[str, Any],
    out_dir: Path,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    recipe = setup.recipe
    path = checkpoint_path(out_dir)
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
        )

    module.train()
    try:
        for step in range(first, num_steps + 1):
            epoch, cursor = divmod(step - 1, len(source))
            number = batch_order(len(source), seed=recipe.seed, epoch=epoch)[cursor]
            batch = source.get(number)
            result = train_step(module, batch, frozen, source.teacher_head_VD, recipe)
            result.loss.backward()  # type: ignore[no-untyped-call]
            loss = float(result.loss.detach())
            norm = float(nn.utils.clip_grad_norm_(module.parameters(), recipe.optim.grad_clip))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise _diverged(step, loss, norm, batch.row_ids, path)
            rate = learning_rate(recipe.optim, step, num_steps=num_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            updating = True
            optimizer.step()
            finished, tokens_here = step, tokens_here + batch.num_tokens
            totals["tokens"] += batch.num_tokens
            totals["coverage"] += batch.coverage
            totals["batches"] += 1
            elapsed = time.monotonic() - started
            totals["seconds"] = seconds_before + elapsed
            updating = False
            optimizer.zero_grad(set_to_none=True)
            if step % recipe.optim.checkpoint_steps == 0 and step < num_steps:
                save()
            if on_progress is not None:
                on_progress(
                    Progress(
                        step=step,
                        num_steps=num_steps,
                        epoch=epoch,
                        loss=loss,
                        position_accuracy=_shares(result),
                        learning_rate=rate,
                        tokens_per_s=tokens_here / max(elapsed, 1e-9),
                        row_ids=batch.row_ids,
                    )
                )
    except KeyboardInterrupt:
        if finished and not updating:  # inside an update the weights are between two steps
            save()
        raise


def _shares(result: StepResult) -> tuple[float | None, ...]:
    right = result.correct_KM.sum(-1).tolist()
    counted = result.counted_KM.sum(-1).tolist()
    return tuple(r / n if n else None for r, n in zip(right, counted, strict=True))


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


def _require_free(out_dir: Path, *, resume: bool) -> None:
    if out_dir.exists():
        raise StorageError(
            "already exists", where=str(out_dir), fix="Choose another --out, or remove it first."
        )
    path = checkpoint_path(out_dir)
    if path.exists() and not resume:
        raise RecipeError(
            "an unfinished training lies beside --out",
            where=str(path),
            fix="Go on with --resume, or remove that folder to start again.",
        )
