"""A started engine behind the Endpoint protocol: `start(plan)` proves it is the planned one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.endpoint import Answer, Counters, EngineFacts, MemoryFacts, Request, TokenChoice
from paceline.errors import EngineError, PlanError
from paceline.methods import METHODS
from paceline.serve.checks import check_plan
from paceline.serve.model_free import read_proposer
from paceline.serve.plan import Plan
from paceline.serve.process import EngineProcess, build_child_env
from paceline.serve.requests import check_ids, check_requests, read_answer, show_request
from paceline.serve.staging import make_staging, remove_staging

__all__ = ["VllmEndpoint", "check_facts", "launch", "resolve_engine_args", "start"]

_START_S = {"cpu": 300.0, "cuda": 900.0}
_SILENCE_S = 120.0


def resolve_engine_args(plan: Plan, folder: Path) -> dict[str, Any]:
    """The plan's engine arguments with the names of target and draft turned into paths.

    folder: Path() for an engine that works in its staging folder. Its models then have the same
    paths whenever they are the same, and vLLM finds what it compiled for them.
    """
    args = dict(plan.engine_args)
    args["model"] = str(folder / args["model"])
    if plan.draft_name is not None:
        path = str(folder / plan.draft_name)
        args["speculative_config"] = {**args["speculative_config"], "model": path}
    return args


def check_facts(plan: Plan, facts: EngineFacts) -> None:
    """Raises EngineError, naming both sides, where the started engine is not the planned one."""
    args = plan.engine_args
    speculative: Mapping[str, Any] = args.get("speculative_config") or {}
    planned: dict[str, Any] = {
        "platform": plan.device,
        "method": METHODS[plan.method].vllm_method,
        "proposer": read_proposer(plan),
        "num_speculative_tokens": plan.num_speculative_tokens,
        "runner": plan.runner,
        "target_architecture": plan.target.architecture,
        "rejection_sample_method": speculative.get("rejection_sample_method"),
        "draft_sample_method": speculative.get("draft_sample_method"),
        "dtype": args["dtype"],
        "max_model_len": args["max_model_len"],
        "prefix_caching": args["enable_prefix_caching"],
        "enforce_eager": args["enforce_eager"],
    }
    for name, wanted in planned.items():
        found = getattr(facts, name)
        if found != wanted:
            raise EngineError(
                f"the engine resolved {name} to {found!r}, the plan says {wanted!r}",
                where=f"vLLM {facts.vllm_version}",
                fix="A number measured on it would be about something else; nothing was measured.",
            )
    if METHODS[plan.method].has_weights and facts.draft_architecture is None:
        raise EngineError("the engine loaded no draft model", expected=f"a {plan.method} draft")


def start(
    plan: Plan,
    *,
    log_path: str | Path,
    timeout_s: float | None = None,
    silence_s: float = _SILENCE_S,
) -> VllmEndpoint:
    """Starts vLLM for a plan in its own process and waits until it is ready and proven.

    log_path: the engine's output is appended there. timeout_s: for the whole start; None is 300 s
    on a CPU, 900 s on CUDA. silence_s: an engine that finishes no step for so long is taken for
    hung. Raises PlanError before anything starts, EngineError afterwards; Ctrl-C ends the engine.
    """
    check_plan(plan)
    return launch(plan, log_path=log_path, timeout_s=timeout_s, silence_s=silence_s)


def launch(
    plan: Plan,
    *,
    log_path: str | Path,
    timeout_s: float | None = None,
    silence_s: float = _SILENCE_S,
) -> VllmEndpoint:
    """`start` for a plan that was checked elsewhere; what runs is still proven to be the plan."""
    begun = time.monotonic()
    deadline = begun + (timeout_s if timeout_s is not None else _START_S[plan.device])
    staging = make_staging(plan)
    process: EngineProcess | None = None
    try:
        env = build_child_env(plan.env, staging)
        process = EngineProcess(env=env, log_path=Path(log_path))
        facts = await_facts(plan, process, staging, begun=begun, deadline=deadline)
        check_facts(plan, facts)
        return VllmEndpoint(plan, process, facts, silence_s=silence_s)
    except BaseException:
        if process is not None:
            process.close()
        raise
    finally:
        remove_staging(staging)  # all is loaded: nothing is left to clean up after a kill


def await_facts(
    plan: Plan, process: EngineProcess, staging: Path, *, begun: float, deadline: float
) -> EngineFacts:
    """Sends a process its plan and waits until it is ready; what it says it is, not yet checked.

    begun, deadline: on the monotonic clock; the start is counted from `begun`. Raises EngineError.
    """
    process.request(
        {
            "folder": str(staging),
            "engine_args": resolve_engine_args(plan, Path()),
            "eos_token_ids": list(plan.target.eos_token_ids),
        }
    )
    while True:
        left = max(0.1, deadline - time.monotonic())
        event = process.receive(timeout_s=left, doing="starting")
        if event["event"] == "ready":
            break
    settings = {**plan.engine_args, "env": dict(plan.env), "num_threads": plan.num_threads}
    return EngineFacts(**event["facts"], start_s=time.monotonic() - begun, settings=settings)


class VllmEndpoint:
    """One running engine; implements paceline.endpoint.Endpoint. Not for use from two threads.

    After any exception out of a call, Ctrl-C included, the engine is gone.
    """

    def __init__(
        self,
        plan: Plan,
        process: EngineProcess,
        facts: EngineFacts,
        *,
        silence_s: float,
    ) -> None:
        self.plan = plan
        self._process = process
        self._facts = facts
        self._silence_s = silence_s
        self._closed = False

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def pid(self) -> int:
        """Process id of the engine, which is also its session."""
        return self._process.pid

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int = 1,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        """Answers in request order, `concurrency` in flight; on_answer as each finishes.

        Raises PlanError for requests this engine cannot take (nothing is sent then).
        """
        if not requests:
            return []
        check_requests(self.plan, requests, concurrency)
        answers: list[Answer | None] = [None] * len(requests)

        def take(event: dict[str, Any]) -> None:
            index = event["index"]
            answers[index] = answer = read_answer(requests[index], event)
            if on_answer is not None:
                on_answer(answer)

        message = {"requests": [show_request(request) for request in requests]}
        self._ask("generate", {**message, "concurrency": concurrency}, take)
        done = [answer for answer in answers if answer is not None]
        if len(done) != len(requests):
            raise self._fail(f"answered {len(done)} of {len(requests)} requests")
        return done

    def next_token(self, prefixes: Sequence[Sequence[int]], *, top: int = 2) -> list[TokenChoice]:
        """The `top` likeliest next tokens after each prefix, by the target, best first."""
        if not prefixes:
            return []
        for number, prefix in enumerate(prefixes):
            check_ids(self.plan, f"prefix {number}", prefix, 1)
        if not 1 <= top <= 20:
            raise PlanError(f"top = {top}", expected="1 to 20, what vLLM returns")
        message = {
            "prefixes": [list(prefix) for prefix in prefixes],
            "top": top,
            "concurrency": self.plan.max_num_seqs,
        }
        return [
            TokenChoice(token_ids=tuple(c["token_ids"]), logprobs=tuple(c["logprobs"]))
            for c in self._ask("next_token", message)
        ]

    def text_logprobs(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, ...]]:
        """(prompt ids, answer ids) -> each answer token's log-probability, one prefill a text."""
        if not texts:
            return []
        for number, (prompt_ids, output_ids) in enumerate(texts):
            check_ids(self.plan, f"prompt of text {number}", prompt_ids, 1)
            check_ids(self.plan, f"text {number}", [*prompt_ids, *output_ids], 1)
        message = {
            "texts": [
                {"prompt_ids": list(prompt_ids), "output_ids": list(output_ids)}
                for prompt_ids, output_ids in texts
            ],
            "concurrency": self.plan.max_num_seqs,
        }
        return [tuple(found) for found in self._ask("text_logprobs", message)]

    def counters(self) -> Counters:
        """vLLM's speculation counters since the start; all 0 without speculation."""
        found = self._ask("counters", {})
        return Counters(
            num_drafts=found.get("spec_decode_num_drafts", 0),
            num_draft_tokens=found.get("spec_decode_num_draft_tokens", 0),
            num_accepted_tokens=found.get("spec_decode_num_accepted_tokens", 0),
            num_accepted_tokens_per_pos=tuple(
                found.get("spec_decode_num_accepted_tokens_per_pos", ())
            ),
            prefix_cache_queries=found.get("prefix_cache_queries"),
            prefix_cache_hits=found.get("prefix_cache_hits"),
        )

    def memory(self, *, context_tokens: int = 16384) -> MemoryFacts | None:
        """Draft memory for one sequence of context_tokens; None without a draft model."""
        found = self._ask("memory", {"context_tokens": context_tokens})
        if found is None:
            return None
        values = {field.name: found[field.name] for field in fields(MemoryFacts)}
        return MemoryFacts(**{**values, "shared": tuple(values["shared"])})

    def pool(self, *, context_tokens: int = 16384) -> tuple[dict[str, Any], dict[str, Any]]:
        """What one sequence takes of the cache pool: with the draft, without (serve/pool.py)."""
        ask = {"method": "paceline_pool", "args": [context_tokens]}
        with_draft, without = self._ask("inspect", ask)
        return with_draft, without

    def kernels(self) -> dict[str, dict[str, int]]:
        """ "target" and "draft" -> kernel -> number of matrices; "plain" for 16-bit ones."""
        found: dict[str, dict[str, int]] = self._ask(
            "inspect", {"method": "paceline_kernels", "args": []}
        )
        return found

    def inspect(self, method: str, *args: Any) -> Any:
        """Calls a method of the plan's worker extension, on the first worker."""
        return self._ask("inspect", {"method": method, "args": list(args)})

    def close(self) -> None:
        """Ends the engine and everything it started. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._process.close()

    def __enter__(self) -> VllmEndpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(
        self,
        operation: str,
        message: Mapping[str, Any],
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> Any:
        if self._closed:
            raise EngineError("the engine is closed", fix="Start it again.")
        try:
            self._process.request({"op": operation, **message})
            while True:
                event = self._process.receive(timeout_s=self._silence_s, doing=_DOING[operation])
                if event["event"] == "done":
                    return event["result"]
                if event["event"] == "answer" and on_event is not None:
                    on_event(event)
        except BaseException:
            self.close()
            raise

    def _fail(self, what: str) -> EngineError:
        error = self._process.failure(what)
        self.close()
        return error


_DOING = {
    "generate": "generating",
    "next_token": "scoring next tokens",
    "text_logprobs": "scoring texts",
    "counters": "reading its counters",
    "memory": "measuring memory",
    "inspect": "looking into the worker",
}
