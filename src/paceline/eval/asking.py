"""Asks engines the prompts of a run, one request at a time, and appends what they answer.

What is appended is never asked again: the same call goes on after a stop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.endpoint import Answer, Endpoint, Request
from paceline.errors import DataError, EngineError, ResultError
from paceline.eval.acceptance import count_request_steps
from paceline.eval.transcript import (
    Transcript,
    append_answer,
    append_failure,
    append_segment,
    require_sound,
)
from paceline.rules import Rules

__all__ = ["EvalPrompt", "ask_prompts", "begin_segment", "require_fair"]

_MAX_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """One measured prompt: its request and the category that its tau counts in."""

    category: str
    request: Request


def begin_segment(
    path: Path,
    name: str,
    endpoint: Endpoint,
    warm_up: Sequence[Request],
    *,
    segment: int,
    block: int = 0,
) -> None:
    """Warms an engine up and notes its counters: what it counted before is not the run's."""
    if warm_up:
        endpoint.generate(warm_up, concurrency=1)
    append_segment(path, arm=name, segment=segment, counters=endpoint.counters(), block=block)


def ask_prompts(
    path: Path,
    transcript: Transcript,
    endpoints: Mapping[str, Endpoint],
    prompts: Sequence[EvalPrompt],
    *,
    segment: int,
    seed: int,
    show: Callable[[int, int], None] | None,
    block: int = 0,
    before: int = 0,
    total: int | None = None,
) -> None:
    """Every prompt through every engine that has not answered it in this block.

    The prompts keep their order; the engines take turns, in an order of its own for each prompt.
    before, total: for `show`, answers of earlier blocks and of the whole run.
    """
    total = total or len(prompts) * len(endpoints)
    done = before + sum(len(transcript.find(name, block)) for name in endpoints)
    held: dict[str, list[dict[str, Any]]] = {name: [] for name in endpoints}
    if show:
        show(done, total)
    for prompt in prompts:
        request = prompt.request
        names = list(endpoints)
        # an order of its own for each prompt, the same when a run goes on after a stop
        random.Random(f"{seed}:{request.request_id}").shuffle(names)
        for name in names:
            if request.request_id in transcript.find(name, block):
                continue
            failure = _ask(path, name, endpoints[name], prompt, segment, block)
            if failure is None:
                _release(path, held[name])
            else:
                held[name].append(failure)
                if len(held[name]) >= _MAX_FAILURES_IN_A_ROW:
                    raise EngineError(
                        f"{len(held[name])} requests in a row failed; the last: {failure['error']}",
                        where=f"arm '{name}'",
                        fix="What was finished is kept: the same command goes on from there.",
                    )
            done += 1
            if show:
                show(done, total)
    for name in endpoints:
        _release(path, held[name])


def _ask(
    path: Path, name: str, endpoint: Endpoint, prompt: EvalPrompt, segment: int, block: int
) -> dict[str, Any] | None:
    """Asks one request and appends its answer; returns a failure instead, to be held back."""
    request = prompt.request
    error = "the answer is empty"
    answer = None
    try:
        (answer,) = endpoint.generate([request], concurrency=1)
    except EngineError as problem:
        error = str(problem)
    if answer is None or not answer.output_ids:
        return {
            "arm": name,
            "request_id": request.request_id,
            "category": prompt.category,
            "num_prompt_tokens": len(request.prompt_ids),
            "error": error,
            "block": block,
        }
    _require_usable(name, endpoint, request, answer)
    append_answer(
        path,
        answer,
        arm=name,
        category=prompt.category,
        segment=segment,
        counters=endpoint.counters(),
        block=block,
    )
    return None


def _require_usable(name: str, endpoint: Endpoint, request: Request, answer: Answer) -> None:
    """Raises EngineError at once for an answer from which nothing right could be computed."""
    try:
        require_sound(answer)
        if answer.request_id != request.request_id or answer.prompt_ids != request.prompt_ids:
            raise ResultError("the engine answered another request", where=request.request_id)
        k = endpoint.facts.num_speculative_tokens
        count_request_steps(answer, num_speculative_tokens=k)
    except ResultError as problem:
        raise EngineError(
            problem.what,
            where=f"arm '{name}', {problem.where}",
            expected=problem.expected,
            fix=problem.fix,
        ) from problem


def _release(path: Path, held: list[dict[str, Any]]) -> None:
    """Failures count only once the engine has answered again or the run has ended."""
    for failure in held:
        append_failure(path, **failure)
    held.clear()


def require_fair(prompts: Sequence[EvalPrompt], warm_up: Sequence[Request], rules: Rules) -> None:
    """Raises DataError for prompts that would bias a run."""
    if not prompts:
        raise DataError("there is no prompt to measure")
    seen_ids: set[str] = set()
    texts: set[tuple[int, ...]] = set()
    for prompt in prompts:
        name, text = prompt.request.request_id, prompt.request.prompt_ids
        if name in seen_ids or text in texts:
            raise DataError(
                f"an earlier prompt has the same {'id' if name in seen_ids else 'text'}",
                where=f"prompt {name!r}",
                expected="each prompt once",
                fix="Remove one: a repeated prompt rewards memory, not drafting.",
            )
        seen_ids.add(name)
        texts.add(text)
    again = {request.prompt_ids for request in warm_up} & texts
    if again:
        raise DataError(
            f"{len(again)} warm-up prompts are measured as well",
            where="warm-up",
            expected="other prompts",
        )
    if len(warm_up) < rules.protocol.num_warm_up_requests:
        raise DataError(
            f"{len(warm_up)} warm-up prompts",
            where="warm-up",
            expected=f"at least {rules.protocol.num_warm_up_requests}, as the rules say",
        )
    samplings = {prompt.request.sampling for prompt in prompts}
    if len(samplings) > 1:
        raise DataError("prompts differ in sampling", expected="the same sampling for each")
