"""The same draft booted again, and the target alone: what `run.repeat` and `run.fidelity` need.

Each engine in its own sandbox, one after the other, with the plan of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from paceline.draft import Draft
from paceline.endpoint import Answer, TokenChoice
from paceline.errors import EngineError, PlanError
from paceline.serve.confined import open_confined
from paceline.serve.plan import Plan, build_plan
from paceline.serve.run_case import RunCase, Told, finding
from paceline.serve.smoke import Observed, SmokeTest
from paceline.target import TargetFacts

__all__ = ["Beside", "check_repeat", "observe_beside"]

_CANDIDATES_AT_A_FORK = 5
_TAU_TOLERANCE = 0.02  # of two boots on the same prompts, relative
_STANDARD_ERRORS = 3.0  # of the paired differences, where they are wider


@dataclass(kw_only=True)
class Beside:
    """What was seen beside the first boot, request by request; None where an engine ended.

    again: the draft's answers on its second boot. plain: the target's own. choices: request id ->
    the target's candidates where the first boot's answer parts from its own.
    """

    again: list[Answer] | None = None
    plain: list[Answer] | None = None
    choices: dict[str, TokenChoice] = field(default_factory=dict)
    again_error: EngineError | PlanError | None = None
    plain_error: EngineError | PlanError | None = None


def observe_beside(
    target: TargetFacts,
    draft: Draft,
    test: SmokeTest,
    seen: Observed,
    *,
    log_path: Path,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Beside:
    """Boots the draft once more and the target alone; never raises for what they do.

    seen: of the first boot, which must have answered.
    """
    beside = Beside()
    on_stage("the same draft on a second boot")
    try:
        with open_confined(
            _plan(target, draft, test), log_path=log_path, time_s=test.time_s
        ) as endpoint:
            beside.again = endpoint.generate(test.requests, concurrency=len(test.requests))
    except (EngineError, PlanError) as problem:
        beside.again_error = problem
    on_stage("the target alone")
    try:
        with open_confined(
            _plan(target, None, test), log_path=log_path, time_s=test.time_s
        ) as endpoint:
            plain = endpoint.generate(test.requests, concurrency=len(test.requests))
            forks = dict(_list_forks(plain, seen.answers))
            found = endpoint.next_token(list(forks.values()), top=_CANDIDATES_AT_A_FORK)
            beside.plain, beside.choices = plain, dict(zip(forks, found, strict=True))
    except (EngineError, PlanError) as problem:
        beside.plain_error = problem
    return beside


def _plan(target: TargetFacts, draft: Draft | None, test: SmokeTest) -> Plan:
    k = draft.num_speculative_tokens if draft is not None else 0
    longest = max(len(item.prompt_ids) + item.sampling.max_tokens for item in test.requests)
    return build_plan(
        target,
        draft,
        method=None if draft is not None else "none",
        device=test.device,
        max_model_len=longest + k + 1,
        max_num_seqs=len(test.requests),
        enforce_eager=True,
    )


def _list_forks(
    plain: Sequence[Answer], other: Sequence[Answer]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(request id, prompt and shared beginning) of every answer that parts from the target's."""
    for mine, theirs in zip(plain, other, strict=True):
        pairs = zip(mine.output_ids, theirs.output_ids, strict=False)
        for position, (left, right) in enumerate(pairs):
            if left != right:
                yield mine.request_id, (*mine.prompt_ids, *mine.output_ids[:position])
                break


def check_repeat(case: RunCase, beside: Beside) -> Iterator[Told]:
    """run.repeat: two boots of one draft deliver as many tokens a step on the same prompts."""
    if beside.again is None:
        problem = beside.again_error
        yield finding(
            "run.repeat",
            "",
            f"the second boot ended: {problem.what if problem is not None else 'nothing was seen'}",
            found="no answers",
            expected="an engine that starts each time",
            fix=(problem.fix if problem is not None else "") or "Read the engine's log.",
        )
        return
    pairs = list(zip(map(_count, case.seen.answers), map(_count, beside.again), strict=True))
    steps = [(one, two) for one, two in pairs if one[1] and two[1]]
    if not steps:
        return
    first, second = (
        sum(pair[at][0] for pair in steps) / sum(pair[at][1] for pair in steps) for at in (0, 1)
    )
    differences = [two[0] / two[1] - one[0] / one[1] for one, two in steps]
    error = stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else 0.0
    allowed = max(_TAU_TOLERANCE * first, _STANDARD_ERRORS * error)
    if max(abs(second - first), abs(mean(differences))) > allowed:
        yield finding(
            "run.repeat",
            "",
            f"two boots delivered {first:.3f} and {second:.3f} tokens a step on the same prompts",
            found=f"{second - first:+.3f}",
            expected=f"at most {allowed:.3f} apart",
            fix="A draft does the same each time: look for tensors that no file fills (run.loaded)"
            " and for NaN (--deep).",
        )


def _count(answer: Answer) -> tuple[int, int]:
    """(tokens after the first chunk, decode steps) of one answer."""
    return len(answer.output_ids) - answer.chunk_tokens[0], len(answer.chunk_tokens) - 1
