"""D-PACE weights against the sum over prefixes, base by base, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_recipe

from paceline.target import TargetFacts
from paceline.train import train_draft
from paceline.train.pacing import confidences, pace_weights


def test_confidences_are_the_drafts_probabilities_of_the_labels() -> None:
    torch.manual_seed(0)
    student = torch.randn(3, 7, 5, dtype=torch.float64)
    labels = torch.randint(0, 11, (7,))
    for heads in ([torch.randn(11, 5).double()], [torch.randn(11, 5).double() for _ in range(3)]):
        found = confidences(student, heads, labels, block=4)
        for step in range(3):
            head = heads[step if len(heads) > 1 else 0]
            right = torch.softmax(student[step] @ head.T, -1)[torch.arange(7), labels]
            torch.testing.assert_close(found[step], right)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
def test_weights_are_the_sum_over_longer_prefixes(alpha: float) -> None:
    """One answer of nine tokens: step k predicts token m from base m - k; some are unsupervised."""
    torch.manual_seed(1)
    steps, tokens = 3, 9
    confidence = torch.rand(steps, tokens, dtype=torch.float64)
    base = torch.arange(tokens) - torch.arange(steps)[:, None]
    valid = base >= 0
    valid[0, 4] = False  # a token outside the vocabulary: bases that must pass it stop there
    valid[1:, 5] &= base[1:, 5] != 4
    found = pace_weights(confidence, base.clamp(min=0), valid, alpha=alpha)
    for start in range(tokens):
        smooth = []
        for step in range(steps):
            token = start + step
            if token >= tokens or not valid[step, token]:
                break
            smooth.append((1.0 - alpha) * float(confidence[step, token]) + alpha)
        for step in range(steps):
            token = start + step
            if token >= tokens:
                continue
            wanted = 0.0
            if step < len(smooth):
                for last in range(step, len(smooth)):
                    product = 1.0
                    for one in smooth[: last + 1]:
                        product *= one
                    wanted += product
            assert float(found[step, token]) == pytest.approx(wanted, abs=1e-12)
    if alpha == 1.0:
        assert found[0, 0] == 3.0  # nothing of the draft left: K, K - 1, ..., 1
        assert found[2, 2] == 1.0


def test_a_sure_draft_shifts_weight_to_later_steps() -> None:
    base = torch.zeros(3, 3, dtype=torch.int64)
    valid = torch.eye(3, dtype=torch.bool)
    shares = []
    for sure in (0.0, 0.9):
        found = pace_weights(
            torch.full((3, 3), sure, dtype=torch.float64), base, valid, alpha=0.5
        ).diagonal()
        shares.append(float(found[2] / found.sum()))
    assert shares[1] > 1.5 * shares[0]


def test_a_paced_run_is_trained_and_says_so(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """Through the loop: other weights than the fixed ones, so another first loss."""
    firsts = []
    for alpha in (None, 0.5, 1.0):
        losses: list[float] = []
        draft = train_draft(
            make_recipe(loss__pace_alpha=alpha, loss__hard=1.0),
            target=target,
            data_dir=data_dir,
            out_dir=tmp_path / f"d{alpha}",
            device="cpu",
            on_progress=lambda p, losses=losses: losses.append(p.loss),  # type: ignore[misc]
        )
        firsts.append(losses[0])
        assert losses[-1] < losses[0]
        assert draft.metadata["trained"]["recipe"]["loss"].get("pace_alpha") == alpha
    # alpha 1 weighs 3, 2, 1 against 1, 0.8, 0.64 of one mean; 0.5 less than that
    assert firsts[2] > firsts[1]
    assert len({round(first, 4) for first in firsts}) == 3
