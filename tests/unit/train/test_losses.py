"""The chunked loss and its hand-written gradient against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.train.losses import Lesson, LossTerms, head_loss, heads_loss

K, M, D, V = 3, 7, 5, 11


def reference(
    student: Tensor,
    head: Tensor,
    teacher: Tensor,
    teacher_head: Tensor,
    labels: Tensor,
    weights: Tensor,
    terms: LossTerms,
) -> Tensor:
    q = torch.softmax(teacher @ teacher_head.T, -1)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(K):
        for m in range(M):
            p = torch.softmax(head @ student[k, m], -1)
            kl = (q[m] * (q[m] / p).log()).sum()
            value = terms.soft * kl - terms.hard * p[labels[m]].log()
            value = value + terms.variation * 0.5 * (p - q[m]).abs().sum()
            value = value + terms.reverse * (p * (p / q[m]).log()).sum()
            accepted = torch.minimum(p, q[m]).sum()
            value = value - terms.overlap * accepted.log()
            share = (-terms.hybrid_eta * accepted.detach()).exp()
            value = value + terms.hybrid * (share * kl + (1.0 - share) * (1.0 - accepted))
            total = total + weights[k, m] * value
    return total


@pytest.mark.parametrize(("block", "chunk"), [(4, 2), (3, 3), (5, 2), (100, 100)])
@pytest.mark.parametrize(
    "terms",
    [
        LossTerms(soft=1.0),
        LossTerms(hard=1.0),
        LossTerms(variation=1.0),
        LossTerms(reverse=1.0),
        LossTerms(overlap=1.0),
        LossTerms(hybrid=1.0),
        LossTerms(hybrid=0.8, hybrid_eta=0.5, hard=0.2),
        LossTerms(soft=0.7, hard=0.4, variation=0.6, reverse=0.3),
        LossTerms(soft=0.2, hard=0.4, variation=0.6, reverse=0.3, overlap=0.5, hybrid=0.9),
    ],
)
def test_value_and_gradients(terms: LossTerms, block: int, chunk: int) -> None:
    torch.manual_seed(0)
    student = torch.randn(K, M, D, dtype=torch.float64, requires_grad=True)
    head = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(M, D, dtype=torch.float64)
    teacher_head = torch.randn(V, D, dtype=torch.float64)
    labels = torch.randint(0, V, (M,))
    weights = torch.rand(K, M, dtype=torch.float64)
    weights[1, 2] = 0.0
    result = head_loss(
        student,
        head,
        Lesson(
            teacher_MD=teacher,
            teacher_head_VD=teacher_head,
            labels_M=labels,
            weights_KM=weights,
            terms=terms,
            block=block,
            chunk=chunk,
        ),
    )
    wanted = reference(student, head, teacher, teacher_head, labels, weights, terms)
    assert abs(result.loss.item() - wanted.item()) < 1e-10
    got = torch.autograd.grad(3.0 * result.loss, (student, head))
    right = torch.autograd.grad(3.0 * wanted, (student, head))
    for a, b in zip(got, right, strict=True):
        assert (a - b).abs().max() < 1e-10
    argmax = (student @ head.T).argmax(-1)
    assert torch.equal(result.correct_KM, argmax == labels)


def test_kl_of_the_teacher_itself_is_zero() -> None:
    torch.manual_seed(1)
    state = torch.randn(M, D, dtype=torch.float64)
    head = torch.randn(V, D, dtype=torch.float64)
    result = head_loss(
        state.expand(K, M, D).contiguous().requires_grad_(True),
        head,
        Lesson(
            teacher_MD=state,
            teacher_head_VD=head,
            labels_M=(state @ head.T).argmax(-1),
            weights_KM=torch.ones(K, M, dtype=torch.float64),
            terms=LossTerms(soft=1.0),
            block=4,
            chunk=4,
        ),
    )
    assert abs(result.loss.item()) < 1e-12
    assert bool(result.correct_KM.all())


def test_a_matrix_for_each_step_is_the_sum_of_single_steps() -> None:
    """heads_loss with K matrices: each step's loss and gradients from its own matrix alone."""
    torch.manual_seed(2)
    student = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    heads = [torch.randn(16, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    teacher = torch.randn(5, 8, dtype=torch.float64)
    teacher_head = torch.randn(16, 8, dtype=torch.float64)
    labels = torch.randint(0, 16, (5,))
    weights = torch.rand(3, 5, dtype=torch.float64)
    found = heads_loss(
        student,
        heads,
        Lesson(
            teacher_MD=teacher,
            teacher_head_VD=teacher_head,
            labels_M=labels,
            weights_KM=weights,
            terms=LossTerms(soft=1.0, hard=0.3),
            block=4,
            chunk=2,
        ),
    )
    found.loss.backward()
    mine = [student.grad, *(head.grad for head in heads)]
    again = student.detach().requires_grad_()
    others = [head.detach().requires_grad_() for head in heads]
    q = (teacher @ teacher_head.T).log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for step, head in enumerate(others):
        p = (again[step] @ head.T).log_softmax(-1)
        soft = (q.exp() * (q - p)).sum(-1)
        hard = -p.gather(1, labels[:, None])[:, 0]
        total = total + (weights[step] * (soft + 0.3 * hard)).sum()
        assert torch.equal(found.correct_KM[step], p.argmax(-1) == labels)
    total.backward()
    torch.testing.assert_close(found.loss, total)
    for one, other in zip(mine, [again.grad, *(head.grad for head in others)], strict=True):
        torch.testing.assert_close(one, other)
