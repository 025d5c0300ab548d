"""One optimiser step's forward and gradients, over the parts of a batch that a process computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.train.anchors import sparse_loss
from paceline.train.families.module import DraftModule
from paceline.train.features import FrozenTarget
from paceline.train.losses import Lesson, build_terms
from paceline.train.pacing import confidences, pace_weights
from paceline.train.prepare import Prepared, block_rows, chunk_rows
from paceline.train.ranks import Ranks
from paceline.train.recipe import Recipe
from paceline.train.sharding import square_gradients

__all__ = ["DraftStep", "StepResult", "backward", "train_step"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """loss: scalar with a gradient. correct_KM, counted_KM: per step and supervised token."""

    loss: Tensor
    correct_KM: Tensor
    counted_KM: Tensor


class DraftStep(nn.Module):
    """One part's loss as one forward: what FSDP gathers a draft's weights for, and lets go after.

    forward: (loss, hits [K], supervised tokens [K]).
    """

    def __init__(
        self, draft: DraftModule, frozen: FrozenTarget, teacher_head_VD: Tensor, recipe: Recipe
    ) -> None:
        super().__init__()
        self.draft = draft
        self._step: Callable[[Prepared], StepResult] = lambda part: train_step(
            draft, part, frozen, teacher_head_VD, recipe
        )

    def forward(self, part: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        result = self._step(part)
        return result.loss, result.correct_KM.sum(-1), result.counted_KM.sum(-1)


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
        batch.tokens_BT,
        batch.taps_BTF,
        batch.bases_BN,
        frozen.embedding_VD,
        num_steps=num_steps,
        places_BT=batch.places_BT,
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
    lesson = Lesson(
        teacher_MD=batch.final_MD,
        teacher_head_VD=teacher_head_VD,
        labels_M=batch.labels_M,
        weights_KM=weights_KM,
        terms=build_terms(mix),
        block=block,
        chunk=chunk_rows(len(heads[0]), heads[0].device),
    )
    result = sparse_loss(student_KMD, heads, lesson)
    counted = batch.weights_KM > 0
    return StepResult(loss=result.loss, correct_KM=result.correct_KM & counted, counted_KM=counted)


def backward(step_module: DraftStep, parts: Sequence[Prepared], ranks: Ranks) -> Tensor:
    """Adds up this process's gradients of one batch: [loss, square of the gradients, hits of each
    position, supervised tokens of each, 0], to be summed over processes."""
    sums: Tensor | None = None
    for number, part in enumerate(parts, 1):
        if ranks.world > 1:
            step_module.set_requires_gradient_sync(number == len(parts))  # type: ignore[operator]
        loss, hits, counted = step_module(part)
        loss.backward()
        one = torch.cat([x.detach().double().flatten() for x in (loss, hits, counted)])
        sums = one if sums is None else sums + one
    assert sums is not None  # every process computes at least one part
    square = square_gradients(step_module.parameters()).to(sums.device)
    return torch.cat([sums[:1], square[None], sums[1:], sums.new_zeros(1)])
