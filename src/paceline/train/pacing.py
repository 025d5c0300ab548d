"""Weights of the unroll's steps that follow the draft: what each is worth in accepted tokens.

D-PACE (arXiv:2605.18810): with c_j the draft's probability of the right token at step j of a base,
smoothed to s_j = (1 - alpha) c_j + alpha, a base gets past step m with prod_{i<=m} s_i, and the
length that it hopes for is the sum of these over m. What step j has a part in is

    w_j = sum_{m >= j} prod_{i <= m} s_i

taken as a number, without a gradient. Early steps weigh more while they fail; once they hold, the
later ones gain. A step that is not supervised (past the end of an answer, or outside a reduced
vocabulary) ends the sum. The weights are not divided by their sum: that would undo what they say.

Shapes: K steps, M supervised tokens, N bases of the batch, D hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["confidences", "pace_weights"]


@torch.no_grad()
def confidences(
    student_KMD: Tensor, heads: Sequence[Tensor], labels_M: Tensor, *, block: int
) -> Tensor:
    """The draft's probability of each label, [K, M]; block: tokens a matrix product."""
    wide = torch.promote_types(student_KMD.dtype, torch.float32)
    num_steps, num_tokens = student_KMD.shape[:2]
    found = torch.empty(num_steps, num_tokens, dtype=wide, device=student_KMD.device)
    for step in range(num_steps):
        head = heads[step if len(heads) > 1 else 0].to(student_KMD.dtype)
        for start in range(0, num_tokens, block):
            part = slice(start, start + block)
            scores = (student_KMD[step, part] @ head.T).to(wide)
            right = scores.gather(1, labels_M[part, None])[:, 0]
            found[step, part] = (right - scores.logsumexp(-1)).exp()
    return found


@torch.no_grad()
def pace_weights(
    confidence_KM: Tensor, source_KM: Tensor, valid_KM: Tensor, *, alpha: float
) -> Tensor:
    """w_j of step k at the base that predicts token m, [K, M]; 0 where nothing is supervised.

    source_KM: the base's number in the batch, from which step k predicts token m. alpha: above 0,
    at most 1 (then all steps count down: K, K - 1, ..., 1).
    """
    num_steps = len(confidence_KM)
    num_bases = int(source_KM.max()) + 1 if source_KM.numel() else 0
    smooth_KN = confidence_KM.new_zeros(num_steps, num_bases)  # a step that is not there ends it
    for step in range(num_steps):
        valid = valid_KM[step]
        smooth = (1.0 - alpha) * confidence_KM[step, valid] + alpha
        smooth_KN[step, source_KM[step, valid]] = smooth
    reached_KN = smooth_KN.cumprod(0)
    worth_KN = reached_KN.flip(0).cumsum(0).flip(0)
    return worth_KN.gather(1, source_KM) * valid_KM
