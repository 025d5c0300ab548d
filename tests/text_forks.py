"""Texts with a draft against texts without, and what was delivered against what vLLM reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.acceptance import count_decode_steps
from paceline.endpoint import Answer, Endpoint
from paceline.eval.fidelity import classify_fork, find_fork

__all__ = ["Forks", "count_forks", "delivered_tau", "reported_length"]


@dataclass(frozen=True, kw_only=True)
class Forks:
    """How many texts are identical, differ first at a near tie, or fork for real; the gaps."""

    identical: int
    near_tie: int
    real_fork: int
    gaps: tuple[float | None, ...]


def count_forks(
    plain: Sequence[Answer], arm: Sequence[Answer], target: Endpoint, *, tolerance: float
) -> Forks:
    """target: the target alone; it is asked for its own view of each first difference."""
    cases = []
    for one, other in zip(plain, arm, strict=True):
        place = find_fork(one.output_ids, other.output_ids)
        if place is None:
            assert len(one.output_ids) == len(other.output_ids)
        else:
            cases.append((one, other, place))
    prefixes = [one.prompt_ids + one.output_ids[:place] for one, _, place in cases]
    found = [
        classify_fork(
            choice,
            plain_token=one.output_ids[place],
            token=other.output_ids[place],
            tolerance=tolerance,
        )
        for (one, other, place), choice in zip(
            cases, target.next_token(prefixes, top=20), strict=True
        )
    ]
    kinds = [kind for kind, _ in found]
    return Forks(
        identical=len(plain) - len(cases),
        near_tie=kinds.count("near_tie"),
        real_fork=kinds.count("real_fork"),
        gaps=tuple(gap for _, gap in found),
    )


def delivered_tau(answers: Sequence[Answer]) -> float:
    """Delivered tokens after the first, over target decode steps."""
    steps = sum(
        count_decode_steps(
            num_output_tokens=len(answer.output_ids), accepted=answer.per_step_accepted or ()
        )
        for answer in answers
    )
    return sum(len(answer.output_ids) - 1 for answer in answers) / steps


def reported_length(answers: Sequence[Answer]) -> float | None:
    """vLLM's own acceptance length: over the steps that carried a draft."""
    accepted = [took for answer in answers for took in answer.per_step_accepted or ()]
    return 1 + sum(accepted) / len(accepted) if accepted else None
