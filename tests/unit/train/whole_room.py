"""A draft through the whole room: trained, its losses watched, its own steps replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.draft import Draft
from paceline.target import TargetFacts
from paceline.train import Recipe, replay_draft, train_draft
from paceline.train.entry import simulate_draft

TEXTS = [([5, 9, 17, 30], list(range(20, 40))), ([8, 3, 44], [7, 9, 11, 13, 15])]


def train_and_watch(
    recipe: Recipe, target: TargetFacts, data_dir: Path, out: Path, **settings: Any
) -> tuple[Draft, list[float]]:
    """The draft and the loss of each step."""
    losses: list[float] = []
    draft = train_draft(
        recipe,
        target=target,
        data_dir=data_dir,
        out_dir=out,
        device="cpu",
        on_progress=lambda p: losses.append(p.loss),
        **settings,
    )
    return draft, losses


def require_learnt(losses: list[float], *, share: float) -> None:
    """The last five losses are below this share of the first five."""
    assert sum(losses[-5:]) < share * sum(losses[:5])


def require_replay_agrees(
    draft: Draft,
    target: TargetFacts,
    texts: list[tuple[list[int], list[int]]] | None = None,
    *,
    min_steps: int = 1,
) -> None:
    """Steps simulated along the texts are the steps that the replay finds, in float32."""
    texts = TEXTS if texts is None else texts
    walked = simulate_draft(draft, target, texts, dtype="float32")
    served = [(p, o, took) for (p, o), took in zip(texts, walked, strict=True)]
    replay = replay_draft(draft, target, served, dtype="float32")
    assert replay.num_agree == replay.num_steps >= min_steps
