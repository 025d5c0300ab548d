"""Training from a sample of each row's bases, and a loss that computes only what has a weight.

A row of n bases gives its K n predictions to the loss. With `optim.anchors_per_row` only a sample
of A bases is run in a step, another one each epoch; its weights are multiplied by n / A, so the
expected loss and gradient are those of all bases. The sample is a function of seed, epoch and row
alone: it stays the same however a batch is split over parts and processes, and after a resume.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.train.losses import HeadLoss, Lesson, heads_loss

if TYPE_CHECKING:
    from paceline.train.prepare import Prepared

__all__ = ["sample_anchors", "sparse_loss"]


def sample_anchors(part: Prepared, *, anchors_per_row: int, seed: int, epoch: int) -> Prepared:
    """The part with at most so many bases a row that anything is asked of."""
    num_bases = part.bases_BN.shape[1]
    asked = torch.unique(part.source_KM[part.weights_KM > 0]).tolist()
    columns: list[list[int]] = [[] for _ in part.row_ids]
    for place in asked:
        columns[bisect.bisect_right(part.first_base_R, place) - 1].append(place)
    if max(map(len, columns), default=0) <= anchors_per_row:
        return part
    chosen_S: list[list[int]] = [[] for _ in part.bases_BN]
    factors = torch.zeros(part.bases_BN.numel())
    for row_id, own in zip(part.row_ids, columns, strict=True):
        dice = random.Random(f"anchors {seed} {epoch} {row_id}")
        chosen = sorted(dice.sample(own, min(anchors_per_row, len(own))))
        for place in chosen:
            chosen_S[place // num_bases].append(place)
            factors[place] = len(own) / len(chosen)
    width = max(map(len, chosen_S))
    bases = torch.zeros(len(chosen_S), width, dtype=torch.int64)
    table = torch.full((part.bases_BN.numel(),), -1, dtype=torch.int64)
    old_bases = part.bases_BN.flatten().cpu()
    for slot, places in enumerate(chosen_S):
        bases[slot, : len(places)] = old_bases[places]
        table[places] = slot * width + torch.arange(len(places))
    device = part.source_KM.device
    source_KM = table.to(device)[part.source_KM]
    return dataclasses.replace(
        part,
        bases_BN=bases.to(device),
        source_KM=source_KM.clamp(min=0),
        weights_KM=part.weights_KM * factors.to(device)[part.source_KM],
    )


def sparse_loss(student_KMD: Tensor, heads: Sequence[Tensor], lesson: Lesson) -> HeadLoss:
    """`losses.heads_loss`, from the predictions with a weight alone where those are few.

    A table of K steps by M tokens shares the target's logits of a token among its steps, single
    predictions do not: they cost less below (K + 1) M / 2 of them. Several output matrices need the
    table. correct_KM is false where nothing is asked.
    """
    weights_KM = lesson.weights_KM
    steps_P, places_P = weights_KM.nonzero(as_tuple=True)
    num_steps, num_tokens = weights_KM.shape
    is_full = 2 * len(steps_P) >= (num_steps + 1) * num_tokens
    if len(heads) > 1 or is_full or not len(steps_P):
        return heads_loss(student_KMD, heads, lesson)
    few = dataclasses.replace(
        lesson,
        teacher_MD=lesson.teacher_MD[places_P],
        labels_M=lesson.labels_M[places_P],
        weights_KM=weights_KM[steps_P, places_P][None],
        block=lesson.block * num_steps,
    )
    found = heads_loss(student_KMD[steps_P, places_P][None], heads, few)
    correct_KM = torch.zeros_like(weights_KM, dtype=torch.bool)
    correct_KM[steps_P, places_P] = found.correct_KM[0]
    return HeadLoss(loss=found.loss, correct_KM=correct_KM)
