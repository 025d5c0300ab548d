"""Acceptance of one draft on the held-out prompts, prompt by prompt, and intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from curve_plan import Budget
from numpy.typing import NDArray
from served_acceptance import answer_held_out

from paceline.errors import DataError
from paceline.target import TargetFacts

__all__ = ["DRAWS", "resample_lengths", "serve_draft"]

DRAWS = 200
_Floats = NDArray[np.float64]


def serve_draft(target: TargetFacts, folder: Path, budget: Budget, *, device: str) -> list[Any]:
    """[prompt id, category, accepted tokens, drafting steps] of each prompt, greedy."""
    chosen, answers = answer_held_out(
        target,
        folder,
        num_prompts=budget.num_eval,
        max_tokens=budget.eval_tokens,
        concurrency=budget.eval_concurrency,
        device=device,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=budget.eval_concurrency,
    )
    taken = {a.request_id: a.per_step_accepted or () for a in answers}
    return [
        [p.prompt_id, p.category, sum(taken[p.prompt_id]), len(taken[p.prompt_id])] for p in chosen
    ]


def resample_lengths(served: Sequence[list[Any]], *, seed: int = 0) -> tuple[_Floats, _Floats]:
    """Lengths of each draft [N] (1 + accepted tokens a step, pooled) and of resamples [DRAWS, N].

    One resample draws prompts within their categories and is the same for every draft, so that
    differences between drafts are differences on the same prompts. Raises DataError when the drafts
    were asked other prompts.
    """
    asked = [[row[:2] for row in rows] for rows in served]
    if any(one != asked[0] for one in asked):
        raise DataError("the drafts were served on different prompts", expected="the same")
    counts = np.array([[row[2:] for row in rows] for rows in served], dtype=np.float64)  # N,P,2
    categories = np.array([category for _, category in asked[0]])
    dice = np.random.default_rng(seed)
    draws = []
    for _ in range(DRAWS):
        index = np.concatenate(
            [
                dice.choice(np.flatnonzero(categories == one), size=int((categories == one).sum()))
                for one in sorted(set(categories.tolist()))
            ]
        )
        draws.append(_pooled(counts[:, index]))
    return _pooled(counts), np.stack(draws)


def _pooled(counts: _Floats) -> _Floats:
    accepted, steps = counts.sum(axis=1).T
    return np.asarray(1.0 + accepted / np.maximum(steps, 1.0), dtype=np.float64)
