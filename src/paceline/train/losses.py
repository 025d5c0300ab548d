"""Losses against the target's distribution, with the vocabulary never held for a whole batch.

For each supervised token m (a position p of the text) the teacher is the target at p-1, and up to K
unroll steps predict it: step j from base p-2-j. With p_s the draft's and q the target's softmax:

    loss = sum_{k,m} w[k,m] * ( soft * KL(q || p_s) + hard * CE(p_s, label) )

where label is the target's likeliest token, since greedy serving accepts exactly that one. Over a
reduced draft vocabulary q is the target's softmax over those tokens alone.

`head_loss` walks the tokens in chunks: teacher logits once, then each step's logits, its loss and
at once its gradient, so no [tokens, vocabulary] array outlives its chunk.

Shapes: K steps, M supervised tokens, D hidden, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["HeadLoss", "head_loss"]


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """loss: scalar, differentiable. correct_KM: argmax equals the label (weight 0 included)."""

    loss: Tensor
    correct_KM: Tensor


def head_loss(
    student_KMD: Tensor,
    head_VD: Tensor,
    *,
    teacher_MD: Tensor,
    teacher_head_VD: Tensor,
    labels_M: Tensor,
    weights_KM: Tensor,
    soft: float,
    hard: float,
    chunk: int,
) -> HeadLoss:
    """The weighted sum above; the caller divides the weights by what it wants a mean over.

    head_VD may require a gradient (own head of a reduced vocabulary). labels_M are draft ids.
    Rows of weights_KM equal to 0 add nothing, whatever their student row holds.
    """
    loss, correct = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        student_KMD, head_VD, teacher_MD, teacher_head_VD, labels_M, weights_KM, soft, hard, chunk
    )
    return HeadLoss(loss=loss, correct_KM=correct)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_KMD: Tensor,
        head_VD: Tensor,
        teacher_MD: Tensor,
        teacher_head_VD: Tensor,
        labels_M: Tensor,
        weights_KM: Tensor,
        soft: float,
        hard: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = student_KMD.dtype
        wide = torch.promote_types(dtype, torch.float32)
        head = head_VD.to(dtype)
        teacher_head = teacher_head_VD.to(dtype)
        num_steps, num_tokens = student_KMD.shape[:2]
        d_student = torch.zeros_like(student_KMD)
        d_head = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        correct = torch.zeros(num_steps, num_tokens, dtype=torch.bool, device=student_KMD.device)
        total = torch.zeros((), dtype=wide, device=student_KMD.device)
        for start in range(0, num_tokens, chunk):
            part = slice(start, min(start + chunk, num_tokens))
            labels = labels_M[part, None]
            if soft:
                logits = (teacher_MD[part].to(dtype) @ teacher_head.T).to(wide)
                logits -= logits.logsumexp(-1, keepdim=True)
                teacher = logits.exp()
                entropy = (teacher * logits).sum(-1)  # sum q log q
                del logits
            for step in range(num_steps):
                weights = weights_KM[step, part].to(wide)
                scores = (student_KMD[step, part] @ head.T).to(wide)
                correct[step, part] = scores.argmax(-1) == labels[:, 0]
                log_sum = scores.logsumexp(-1)
                value = torch.zeros_like(log_sum)
                if hard:
                    value += hard * (log_sum - scores.gather(1, labels)[:, 0])
                if soft:
                    value += soft * (entropy + log_sum - (teacher * scores).sum(-1))
                total += (weights * value).sum()
                grad = scores.sub_(log_sum[:, None]).exp_().mul_(soft + hard)
                if soft:
                    grad.sub_(teacher, alpha=soft)
                if hard:
                    grad.scatter_add_(1, labels, torch.full_like(grad[:, :1], -hard))
                small = grad.mul_(weights[:, None]).to(dtype)
                d_student[step, part] = small @ head
                if d_head is not None:
                    d_head += small.T @ student_KMD[step, part]
        ctx.save_for_backward(d_student, d_head)
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, d_correct: Tensor) -> tuple[Tensor | None, ...]:
        d_student, d_head = ctx.saved_tensors
        grad_head = None if d_head is None else d_head * d_loss
        grad_student = d_student * d_loss.to(d_student.dtype)
        return (grad_student, grad_head, None, None, None, None, None, None, None)
