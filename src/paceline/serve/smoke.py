"""Boots the exact artefact in a sandbox and looks at what it does: the `run.*` rules.

What a header cannot tell: the engine that came up, whose weights it runs on, whether it drafts at
full length, whether its logits are numbers, and the memory it takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.draft import Draft
from paceline.endpoint import Answer, EngineFacts, MemoryFacts, Request
from paceline.errors import DraftError, EngineError, PlanError
from paceline.serve.checks import check_plan
from paceline.serve.confined import build_confined_env, build_sandbox
from paceline.serve.endpoint import VllmEndpoint, await_facts, check_facts
from paceline.serve.plan import Plan, build_plan
from paceline.serve.process import EngineProcess
from paceline.serve.sandbox import Isolation, SandboxWatch, wrap_command
from paceline.serve.staging import make_staging, remove_staging
from paceline.target import TargetFacts

__all__ = ["Observed", "SmokeTest", "observe_draft"]

_WORKER = "paceline.serve.smoke_worker.SmokeInspector"
_SILENCE_S = 180.0


@dataclass(frozen=True, kw_only=True)
class SmokeTest:
    """What is asked of a draft.

    requests: ordinary prompts, answered together. long_request: one prompt of the contest's length,
    or as long as time and positions allow. context_tokens: for which memory is measured.
    time_s, memory_bytes: limits of the whole run; memory_bytes None is derived from the files.
    """

    requests: tuple[Request, ...]
    long_request: Request | None
    context_tokens: int
    time_s: float = 900.0
    memory_bytes: int | None = None
    device: str | None = None


@dataclass(kw_only=True)
class Observed:
    """What was seen, as far as it got. error: why it ended early, and `doing` what."""

    isolation: Isolation | None = None
    memory_limit_bytes: int = 0
    peak_bytes: int = 0
    start_s: float | None = None
    doing: str = "planning"
    error: EngineError | PlanError | None = None
    ended_for: str = ""
    facts: EngineFacts | None = None
    facts_problem: EngineError | None = None
    architectures: tuple[str, ...] = ()
    memory: MemoryFacts | None = None
    answers: list[Answer] = field(default_factory=list)
    long_answer: Answer | None = None
    long_s: float | None = None
    logits: dict[str, Any] | None = None


def observe_draft(
    target: TargetFacts,
    draft: Draft,
    test: SmokeTest,
    *,
    log_path: Path,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Observed:
    """Runs the whole test and never raises for what the draft does; nothing of it is left running.

    Raises MissingExtraError without vLLM, StorageError without room, and KeyboardInterrupt.
    """
    seen = Observed()
    try:
        plan = _plan(target, draft, test)
        check_plan(plan)
        with _booted(plan, test, seen, log_path, on_stage) as (endpoint, process):
            _ask_all(endpoint, process, test, seen, on_stage)
    except (EngineError, PlanError, DraftError) as problem:
        seen.error = problem if not isinstance(problem, DraftError) else PlanError(str(problem))
    return seen


def _plan(target: TargetFacts, draft: Draft, test: SmokeTest) -> Plan:
    everything = [*test.requests, *([test.long_request] if test.long_request else [])]
    longest = max(len(item.prompt_ids) + item.sampling.max_tokens for item in everything)
    plan = build_plan(
        target,
        draft,
        device=test.device,
        max_model_len=longest + draft.num_speculative_tokens + 1,
        max_num_seqs=max(1, len(test.requests)),
        enforce_eager=True,  # a captured graph would hide the draft's logits
    )
    return dataclasses.replace(
        plan, engine_args={**plan.engine_args, "worker_extension_cls": _WORKER}
    )


@contextlib.contextmanager
def _booted(
    plan: Plan, test: SmokeTest, seen: Observed, log_path: Path, on_stage: Callable[[str], None]
) -> Iterator[tuple[VllmEndpoint, EngineProcess]]:
    """The engine inside the sandbox, ready or not to be had; ended with all it started."""
    begun = time.monotonic()
    staging = make_staging(plan)
    process: EngineProcess | None = None
    watch: SandboxWatch | None = None
    try:
        sandbox = build_sandbox(plan, staging, time_s=test.time_s, memory_bytes=test.memory_bytes)
        seen.isolation, seen.memory_limit_bytes = sandbox.isolation, sandbox.memory_bytes
        on_stage(f"sandbox: {sandbox.isolation}")
        seen.doing = "starting"
        process = EngineProcess(
            env=build_confined_env(plan, staging, sandbox),
            log_path=log_path,
            wrap=lambda command: wrap_command(command, sandbox),
        )
        watch = SandboxWatch(process.pid, memory_bytes=sandbox.memory_bytes, time_s=test.time_s)
        # the watch ends it after time_s; twice that is for an engine which outlives its watch
        deadline = begun + 2.0 * test.time_s
        seen.facts = await_facts(plan, process, staging, begun=begun, deadline=deadline)
        seen.start_s = seen.facts.start_s
        try:
            check_facts(plan, seen.facts)
        except EngineError as problem:
            seen.facts_problem = problem
        yield VllmEndpoint(plan, process, seen.facts, silence_s=_SILENCE_S), process
    finally:
        if process is not None:
            process.close()
        if watch is not None:
            watch.close()
            seen.peak_bytes, seen.ended_for = watch.peak_bytes, watch.ended_for
        remove_staging(staging)


def _ask_all(
    endpoint: VllmEndpoint,
    process: EngineProcess,
    test: SmokeTest,
    seen: Observed,
    on_stage: Callable[[str], None],
) -> None:
    def inspect(method: str) -> Any:
        process.request({"op": "inspect", "method": method, "args": []})
        while True:
            event = process.receive(timeout_s=_SILENCE_S, doing=seen.doing)
            if event["event"] == "done":
                return event["result"]

    seen.doing = "measuring memory"
    seen.memory = endpoint.memory(context_tokens=test.context_tokens)
    watched = inspect("paceline_watch")
    seen.architectures = tuple(watched["architectures"])
    seen.doing = "answering"
    on_stage(f"answering {len(test.requests)} prompts")
    seen.answers = endpoint.generate(test.requests, concurrency=len(test.requests))
    if test.long_request is not None:
        num_tokens = len(test.long_request.prompt_ids)
        seen.doing = f"answering a prompt of {num_tokens:,} tokens"
        on_stage(seen.doing)
        begun = time.monotonic()
        seen.long_answer = endpoint.generate([test.long_request])[0]
        seen.long_s = time.monotonic() - begun
    seen.doing = "reading what was seen"
    if watched["watched"]:
        seen.logits = inspect("paceline_logits")
