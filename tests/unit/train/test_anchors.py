"""A sample of bases stands for all of them; a sparse loss is the loss."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from paceline.train.anchors import sample_anchors, sparse_loss
from paceline.train.batches import build_batch
from paceline.train.losses import Lesson, LossTerms, heads_loss
from paceline.train.prepare import Prepared

from paceline.data import Row  # isort: skip

K = 3


def make_part(*lengths: int, packed: bool = False) -> Prepared:
    """Rows with two spans each; weights as a recipe's position weights give them."""
    rows = [
        Row(
            row_id=f"row-{number}",
            category="chat",
            input_ids=tuple(range(3, 3 + length)),
            loss_spans=((2, 7), (9, length)),
            finish_reason="stop",
        )
        for number, length in enumerate(lengths)
    ]
    batch = build_batch([rows] if packed else [[row] for row in rows], num_speculative_tokens=K)
    weights = batch.valid_KM * torch.tensor([1.0, 0.8, 0.64])[:, None]
    num_tokens = len(batch.slot_M)
    return Prepared(
        row_ids=batch.row_ids,
        num_tokens=batch.num_tokens,
        tokens_BT=batch.tokens_BT,
        places_BT=batch.places_BT,
        first_base_R=batch.first_base_R,
        bases_BN=batch.bases_BN,
        source_KM=batch.source_KM,
        taps_BTF=torch.zeros(1),
        final_MD=torch.zeros(num_tokens, 1),
        labels_M=torch.zeros(num_tokens, dtype=torch.int64),
        weights_KM=weights / weights.sum(),
        coverage=1.0,
    )


def list_asked(part: Prepared) -> list[tuple[int, int, int, float]]:
    """(step, supervised token, base, weight) of every prediction with a weight."""
    bases = part.bases_BN.flatten()
    return [
        (step, token, int(bases[part.source_KM[step, token]]), float(part.weights_KM[step, token]))
        for step, token in part.weights_KM.nonzero().tolist()
    ]


def test_anchors_are_bases_of_the_row_with_all_their_predictions() -> None:
    whole = make_part(20, 31, 12)
    part = sample_anchors(whole, anchors_per_row=4, seed=1, epoch=0)
    assert part.bases_BN.shape == (3, 4)
    before = {(step, token): (base, weight) for step, token, base, weight in list_asked(whole)}
    # a base's predictions all stay, or none; a short row keeps fewer than the longest
    row_of = (whole.source_KM[0] // whole.bases_BN.shape[1]).tolist()
    kept: dict[tuple[int, int], set[tuple[int, int]]] = {}
    all_of: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for (step, token), (base, _) in before.items():
        all_of.setdefault((row_of[token], base), set()).add((step, token))
    for step, token, base, _ in list_asked(part):
        assert before[step, token][0] == base
        kept.setdefault((row_of[token], base), set()).add((step, token))
    assert Counter(row for row, _ in kept) == {0: 4, 1: 4, 2: 4}
    assert all(asked == all_of[anchor] for anchor, asked in kept.items())
    counts = Counter(row for row, _ in all_of)
    for step, token, _, weight in list_asked(part):
        assert weight == pytest.approx(before[step, token][1] * counts[row_of[token]] / 4)


def test_the_sample_is_unbiased_over_epochs() -> None:
    whole = make_part(20, 31)
    total = torch.zeros_like(whole.weights_KM)
    num_epochs = 600
    for epoch in range(num_epochs):
        total += sample_anchors(whole, anchors_per_row=4, seed=1, epoch=epoch).weights_KM
    mean = total / num_epochs
    n = 26  # of the longer row; the standard error of a weight that is n/4 times in 4 of n epochs
    error = whole.weights_KM * ((n / 4 - 1) / num_epochs) ** 0.5
    assert bool(((mean - whole.weights_KM).abs() <= 4.5 * error).all())


def test_the_sample_of_a_row_does_not_depend_on_its_neighbours() -> None:
    both = sample_anchors(make_part(20, 31), anchors_per_row=5, seed=7, epoch=3)
    alone = sample_anchors(make_part(20), anchors_per_row=5, seed=7, epoch=3)
    other = sample_anchors(make_part(20), anchors_per_row=5, seed=7, epoch=4)
    assert both.bases_BN[0].tolist() == alone.bases_BN[0].tolist()
    assert other.bases_BN[0].tolist() != alone.bases_BN[0].tolist()


def test_rows_with_fewer_bases_stay_as_they_are() -> None:
    whole = make_part(14, 12)
    assert sample_anchors(whole, anchors_per_row=200, seed=1, epoch=0) is whole
    idle = make_part(20)
    idle.weights_KM.zero_()
    assert sample_anchors(idle, anchors_per_row=2, seed=1, epoch=0) is idle


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_sparse_loss_equals_the_table_s(share: float) -> None:
    torch.manual_seed(0)
    num_tokens, width, vocab = 40, 6, 11
    student = torch.randn(K, num_tokens, width, dtype=torch.float64)
    head = torch.randn(vocab, width, dtype=torch.float64)
    weights = torch.rand(K, num_tokens, dtype=torch.float64)
    weights *= torch.rand(K, num_tokens) < share
    found: list[tuple[Tensor, ...]] = []
    for loss in (heads_loss, sparse_loss):
        states, matrix = student.clone().requires_grad_(), head.clone().requires_grad_()
        result = loss(
            states,
            [matrix],
            Lesson(
                teacher_MD=torch.sin(
                    torch.arange(num_tokens * width).view(num_tokens, width).double()
                ),
                teacher_head_VD=head * 0.7,
                labels_M=torch.arange(num_tokens) % vocab,
                weights_KM=weights,
                terms=LossTerms(soft=1.0, hard=0.3, variation=0.2),
                block=16,
                chunk=8,
            ),
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        assert states.grad is not None
        assert matrix.grad is not None
        asked = result.correct_KM & (weights > 0)
        found.append((result.loss.detach(), states.grad, matrix.grad, asked))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-12, atol=1e-12)


def test_sparse_loss_computes_fewer_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def watch(student: Tensor, heads: list[Tensor], lesson: Lesson) -> object:
        shapes.append(tuple(student.shape[:2]))
        return heads_loss(student, heads, lesson)

    monkeypatch.setattr("paceline.train.anchors.heads_loss", watch)
    weights = torch.zeros(K, 40)
    weights[1, 5] = weights[2, 6] = 1.0
    sparse_loss(
        torch.randn(K, 40, 4),
        [torch.randn(7, 4)],
        Lesson(
            teacher_MD=torch.randn(40, 4),
            teacher_head_VD=torch.randn(7, 4),
            labels_M=torch.zeros(40, dtype=torch.int64),
            weights_KM=weights,
            terms=LossTerms(soft=1.0),
            block=16,
            chunk=8,
        ),
    )
    assert shapes == [(1, 2)]
