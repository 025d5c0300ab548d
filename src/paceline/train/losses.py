"""Losses against the target's distribution, with the vocabulary never held for a whole batch.

For each supervised token m (a position p of the text) the teacher is the target at p-1, and up to K
unroll steps predict it: step j from base p-2-j. With p_s the draft's and q the target's softmax,
TV = 1/2 sum |p_s - q| and a = 1 - TV, the probability that sampled serving accepts:

    loss = sum_{k,m} w[k,m] * ( soft * KL(q || p_s) + hard * CE(p_s, label)
                                + variation * TV + reverse * KL(p_s || q) + overlap * -log(a)
                                + hybrid * (b KL(q || p_s) + (1 - b) TV),  b = exp(-eta a) )

where label is the target's likeliest token, since greedy serving accepts exactly that one. That a
is the acceptance: Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5; soft, variation and reverse
as a draft's loss: DistillSpec, arXiv:2310.08461; overlap and hybrid: LK losses, arXiv:2602.23881.
b is taken as a number, without a gradient: KL while the two are far apart, TV once they are near.
Over a reduced draft vocabulary q is the target's softmax over those tokens alone.

`head_loss` walks the tokens in blocks: the logits of a block are one product, and become their own
gradient in place, chunk by chunk of a size that stays in the processor's cache; so no array of
[tokens, vocabulary] outlives its block, and the exponential is taken once a logit.

Shapes: K steps, M supervised tokens, D hidden, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from paceline.train.recipe import LossMix

__all__ = ["HeadLoss", "Lesson", "LossTerms", "build_terms", "head_loss", "heads_loss"]

_SMALLEST_OVERLAP = 1e-6  # below it -log(a) grows no further, and its gradient stays finite


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Weights of the terms above; a term of weight 0 costs nothing. hybrid_eta: eta of `hybrid`."""

    soft: float = 0.0
    hard: float = 0.0
    variation: float = 0.0
    reverse: float = 0.0
    overlap: float = 0.0
    hybrid: float = 0.0
    hybrid_eta: float = 3.0

    @property
    def needs_target(self) -> bool:
        return bool(self.soft or self.reverse or self.needs_overlap)

    @property
    def needs_overlap(self) -> bool:
        return bool(self.variation or self.overlap or self.hybrid)


def build_terms(mix: LossMix) -> LossTerms:
    """The terms of a recipe's [loss]."""
    return LossTerms(**{entry.name: getattr(mix, entry.name) for entry in fields(LossTerms)})


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """loss: scalar, differentiable. correct_KM: argmax equals the label (weight 0 included)."""

    loss: Tensor
    correct_KM: Tensor


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a draft's states are held to, and how much is computed at a time.

    labels_M: draft ids. weights_KM: 0 adds nothing, whatever the student's row holds; the caller
    divides by what it wants a mean over. block, chunk: tokens a matrix product, tokens an
    elementwise pass.
    """

    teacher_MD: Tensor
    teacher_head_VD: Tensor
    labels_M: Tensor
    weights_KM: Tensor
    terms: LossTerms
    block: int
    chunk: int


def head_loss(student_KMD: Tensor, head_VD: Tensor, lesson: Lesson) -> HeadLoss:
    """The weighted sum above; head_VD may require a gradient (own head of a reduced vocabulary)."""
    loss, correct = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        student_KMD, head_VD, lesson
    )
    return HeadLoss(loss=loss, correct_KM=correct)


def heads_loss(student_KMD: Tensor, heads: Sequence[Tensor], lesson: Lesson) -> HeadLoss:
    """`head_loss` with one matrix [V, D] for all K steps, or K of them."""
    if len(heads) == 1:
        return head_loss(student_KMD, heads[0], lesson)
    found = [
        head_loss(
            student_KMD[step : step + 1],
            head,
            dataclasses.replace(lesson, weights_KM=lesson.weights_KM[step : step + 1]),
        )
        for step, head in zip(range(len(student_KMD)), heads, strict=True)
    ]
    return HeadLoss(
        loss=torch.stack([one.loss for one in found]).sum(),
        correct_KM=torch.cat([one.correct_KM for one in found]),
    )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_KMD: Tensor,
        head_VD: Tensor,
        lesson: Lesson,
    ) -> tuple[Tensor, Tensor]:
        dtype, device = student_KMD.dtype, student_KMD.device
        wide, terms = torch.promote_types(dtype, torch.float32), lesson.terms
        head, teacher_head = head_VD.to(dtype), lesson.teacher_head_VD.to(dtype)
        num_steps, num_tokens = student_KMD.shape[:2]
        d_student = torch.empty_like(student_KMD)
        d_head = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        correct = torch.empty(num_steps, num_tokens, dtype=torch.bool, device=device)
        total = torch.zeros((), dtype=wide, device=device)
        for start in range(0, num_tokens, lesson.block):
            rows = slice(start, min(start + lesson.block, num_tokens))
            student_KBD = student_KMD[:, rows]
            scores_KBV = student_KBD @ head.T  # turns into its own gradient below
            teacher_BV = None
            if terms.needs_target:
                teacher_BV = lesson.teacher_MD[rows].to(dtype) @ teacher_head.T
            weights_KB, labels_B = lesson.weights_KM[:, rows].to(wide), lesson.labels_M[rows]
            for first in range(0, rows.stop - rows.start, lesson.chunk):
                part = slice(first, first + lesson.chunk)
                value, right = _in_place(
                    scores_KBV[:, part],
                    None if teacher_BV is None else teacher_BV[part],
                    labels_B[part],
                    weights_KB[:, part],
                    terms,
                )
                total += value
                correct[:, rows][:, part] = right
            d_student[:, rows] = scores_KBV @ head
            if d_head is not None:
                d_head += scores_KBV.flatten(0, 1).T @ student_KBD.flatten(0, 1)
        ctx.save_for_backward(d_student, d_head)
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, d_correct: Tensor) -> tuple[Tensor | None, ...]:
        d_student, d_head = ctx.saved_tensors
        grad_head = None if d_head is None else d_head * d_loss
        grad_student = d_student * d_loss.to(d_student.dtype)
        return grad_student, grad_head, None


def _in_place(
    scores_KCV: Tensor,
    teacher_CV: Tensor | None,
    labels_C: Tensor,
    weights_KC: Tensor,
    terms: LossTerms,
) -> tuple[Tensor, Tensor]:
    """Overwrites logits by the weighted loss's gradient; answers (its sum, argmax == label)."""
    wide, hard = weights_KC.dtype, terms.hard
    labels = labels_C[:, None]
    correct = torch.empty(weights_KC.shape, dtype=torch.bool, device=weights_KC.device)
    total = torch.zeros((), dtype=wide, device=weights_KC.device)
    if teacher_CV is not None:
        logits = teacher_CV.to(wide)
        logits -= logits.logsumexp(-1, keepdim=True)
        teacher = logits.exp()
        entropy = _dot(teacher, logits)  # sum q log q
    for step, stored in enumerate(scores_KCV):
        weights = weights_KC[step]
        scores = stored.to(wide, copy=True)
        top, best = scores.max(-1)
        correct[step] = best == labels_C
        scores -= top[:, None]  # so the largest is 0
        value = torch.zeros_like(top)
        soft = torch.full_like(top, terms.soft)  # of each row, since `hybrid` mixes row by row
        if hard:
            value -= hard * scores.gather(1, labels)[:, 0]
        divergence = entropy - _dot(teacher, scores) if terms.soft or terms.hybrid else None
        extra = None
        if terms.reverse:
            extra = scores - logits  # log p - log q, but for the row's log of the scale
        scale = scores.exp_().sum(-1)
        value += hard * scale.log()
        if terms.needs_overlap or terms.reverse:
            added, share, extra = _both_ways(scores, scale, teacher, extra, terms)
            value += added
            soft += share
        if divergence is not None:
            value += soft * (divergence + scale.log())
        total += (weights * value).sum()
        scores *= ((soft + hard) * weights / scale)[:, None]
        if extra is not None:
            scores.addcmul_(extra, weights[:, None].expand_as(extra))
        if divergence is not None:
            scores.addcmul_(teacher, (soft * weights)[:, None].expand_as(teacher), value=-1.0)
        if hard:
            scores.scatter_add_(1, labels, (-hard * weights)[:, None])
        stored.copy_(scores)
    return total, correct


def _both_ways(
    exps_CV: Tensor,
    scale_C: Tensor,
    teacher_CV: Tensor,
    ratio_CV: Tensor | None,
    terms: LossTerms,
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and gradient of the terms that average over the draft's own distribution p.

    exps_CV / scale_C is p; ratio_CV: log(p scale) - log q, for the reverse KL. Either term is
    sum p f (f = sign(p - q) / 2 up to a constant, or log p - log q), with gradient p (f - sum p f).
    In the middle: what `hybrid` gives each row's KL(q || p).
    """
    p_CV = exps_CV / scale_C[:, None]
    f_CV = torch.zeros_like(p_CV)
    value_C, share_C = torch.zeros_like(scale_C), torch.zeros_like(scale_C)
    if terms.needs_overlap:
        difference = p_CV - teacher_CV
        variation_C = 0.5 * difference.abs().sum(-1)
        accepted_C = (1.0 - variation_C).clamp(min=_SMALLEST_OVERLAP)
        weight_C = torch.full_like(scale_C, terms.variation)
        if terms.hybrid:
            share_C = terms.hybrid * (-terms.hybrid_eta * accepted_C).exp()
            weight_C += terms.hybrid - share_C
        value_C += weight_C * variation_C
        if terms.overlap:
            value_C -= terms.overlap * accepted_C.log()
            weight_C += terms.overlap / accepted_C
        f_CV += (0.5 * weight_C)[:, None] * difference.sign_()
    if ratio_CV is not None:
        ratio_CV -= scale_C.log()[:, None]
        value_C += terms.reverse * _dot(p_CV, ratio_CV)
        f_CV += terms.reverse * ratio_CV
    f_CV -= _dot(p_CV, f_CV)[:, None]
    return value_C, share_C, f_CV.mul_(p_CV)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row, without an array of the products."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]
