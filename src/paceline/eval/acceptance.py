"""Acceptance of served answers: tau by our definition, and vLLM's own figures beside it.

tau = delivered decode tokens / target decode steps. The first token of an answer comes from
prefill, so an answer of n tokens delivers n - 1. Steps without a draft count, tokens past a stop
do not. vLLM's own acceptance length knows only drafting steps and counts before the stop cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.acceptance import (
    Acceptance,
    build_acceptance,
    conditional_acceptance,
    count_decode_steps,
)
from paceline.endpoint import Answer, Counters
from paceline.errors import ResultError

__all__ = [
    "RequestSteps",
    "Tau",
    "compute_tau",
    "count_request_steps",
    "describe_acceptance",
    "read_counters_acceptance",
    "subtract_counters",
]


@dataclass(frozen=True, kw_only=True)
class RequestSteps:
    """delivered: tokens after the first; steps: target decode passes; acceptance: vLLM's view."""

    delivered: int
    steps: int
    acceptance: Acceptance


@dataclass(frozen=True, kw_only=True)
class Tau:
    """value: unweighted mean over categories with a step; None where there was none."""

    value: float | None
    by_category: dict[str, float | None]


def count_request_steps(answer: Answer, *, num_speculative_tokens: int) -> RequestSteps:
    """Steps behind one answer. Raises ResultError when the per-step record cannot be right."""
    where = f"request {answer.request_id!r}"
    delivered = len(answer.output_ids) - 1
    accepted = answer.per_step_accepted or ()
    drafted = answer.per_step_drafted or ()
    if num_speculative_tokens and (
        answer.per_step_accepted is None or answer.per_step_drafted is None
    ):
        raise ResultError(
            "the engine speculates but gave no per-step record",
            where=where,
            fix="Start the engine with per-request speculation metrics, detailed.",
        )
    acceptance = build_acceptance(accepted, drafted, num_speculative_tokens=num_speculative_tokens)
    # only the last step may be cut, and it delivers at least one token
    if accepted and sum(took + 1 for took in accepted[:-1]) >= delivered:
        raise ResultError(
            f"{len(accepted)} drafting steps for {delivered} delivered tokens",
            where=where,
            expected="all steps but the last to fit into the answer",
        )
    by_record = count_decode_steps(num_output_tokens=len(answer.output_ids), accepted=accepted)
    # where a stop cuts the last step, the record hides as many steps without a draft as tokens
    # were cut; each chunk after the first took a step of its own, so chunks bring them back
    steps = max(by_record, len(answer.chunk_tokens) - 1)
    return RequestSteps(delivered=delivered, steps=steps, acceptance=acceptance)


def compute_tau(counts: Mapping[str, Sequence[tuple[int, int]]]) -> Tau:
    """tau from category -> (delivered, steps) of each request: sums within, mean across.

    compute_tau({"code": [(9, 3), (3, 3)], "chat": [(4, 4)]}).value == (12/6 + 4/4) / 2 == 1.5
    """
    by_category: dict[str, float | None] = {}
    for category, pairs in counts.items():
        steps = sum(pair[1] for pair in pairs)
        by_category[category] = sum(pair[0] for pair in pairs) / steps if steps else None
    known = [value for value in by_category.values() if value is not None]
    return Tau(value=sum(known) / len(known) if known else None, by_category=by_category)


def subtract_counters(after: Counters, before: Counters) -> Counters:
    """What happened between two readings. Raises ResultError when a counter went back."""
    width = max(len(after.num_accepted_tokens_per_pos), len(before.num_accepted_tokens_per_pos))

    def difference(name: str, late: int, early: int) -> int:
        if late < early:
            raise ResultError(
                f"the server restarted: {name} went from {early} to {late}",
                where="engine counters",
                expected="counters that only grow",
                fix="Run the measurement again.",
            )
        return late - early

    result: dict[str, Any] = {}
    for field in fields(Counters):
        late, early = getattr(after, field.name), getattr(before, field.name)
        if late is None or early is None:
            result[field.name] = None
        elif isinstance(late, tuple):
            late, early = (v + (0,) * (width - len(v)) for v in (late, early))
            result[field.name] = tuple(
                difference(f"{field.name}[{i}]", a, b)
                for i, (a, b) in enumerate(zip(late, early, strict=True))
            )
        else:
            result[field.name] = difference(field.name, late, early)
    return Counters(**result)


def read_counters_acceptance(counters: Counters) -> Acceptance:
    """vLLM's counters of a run (a difference of two readings) as sums over drafting steps."""
    return Acceptance(
        num_steps=counters.num_drafts,
        num_drafted=counters.num_draft_tokens,
        num_accepted=counters.num_accepted_tokens,
        accepted_at=counters.num_accepted_tokens_per_pos,
    )


def describe_acceptance(acceptance: Acceptance) -> dict[str, Any]:
    """vLLM's figures as JSON: null, never 1.0, where there was no step."""
    positions = acceptance.position_acceptance
    return {
        "acceptance_length": acceptance.acceptance_length,
        "acceptance_rate": acceptance.acceptance_rate,
        "num_steps": acceptance.num_steps,
        "num_drafted": acceptance.num_drafted,
        "num_accepted": acceptance.num_accepted,
        "position_acceptance": list(positions),
        "conditional_acceptance": list(conditional_acceptance(positions)),
    }
