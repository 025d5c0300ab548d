"""Measures drafts: the same prompts through every arm, interleaved, one request at a time.

Endpoints are opened and closed by the caller; all are alive at once. Each finished request is
appended to requests.jsonl at once; the same call on the same folder goes on after a stop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.endpoint import Answer, Endpoint, Request
from paceline.errors import DataError, EngineError, ResultError
from paceline.eval.acceptance import count_request_steps
from paceline.eval.assemble import assemble_result
from paceline.eval.conditions import require_alike
from paceline.eval.result import RESULT_NAME, describe_draft, describe_memory, write_result
from paceline.eval.second_look import ask_plain
from paceline.eval.transcript import (
    REQUESTS_NAME,
    Transcript,
    append_answer,
    append_failure,
    append_segment,
    append_settings,
    read_transcript,
    require_sound,
)
from paceline.records import read_json, sha256_bytes
from paceline.rules import Rules

if TYPE_CHECKING:
    from paceline.draft import Draft
    from paceline.target import TargetFacts

__all__ = ["EvalPrompt", "measure_run"]

_MAX_FAILURES_IN_A_ROW = 3
_ENGINE_SETTINGS = (
    "vllm_version",
    "platform",
    "device_name",
    "method",
    "num_speculative_tokens",
    "runner",
    "rejection_sample_method",
    "draft_sample_method",
    "dtype",
    "max_model_len",
    "prefix_caching",
    "enforce_eager",
)


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """One measured prompt: its request and the category that its tau counts in."""

    category: str
    request: Request


def measure_run(
    *,
    plain: Endpoint | None = None,
    baseline: Endpoint | None = None,
    candidate: Endpoint,
    drafts: Mapping[str, Draft | None],
    prompts: Sequence[EvalPrompt],
    warm_up: Sequence[Request],
    rules: Rules,
    target: TargetFacts,
    out_dir: str | Path,
    prompt_set_name: str,
    prompt_set_sha256: str | None = None,
    thinking: str = "none",
    seed: int = 0,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measures and writes the run folder; returns what result.json holds.

    drafts: arm name -> its Draft, or None for a method without one. Arms given the same endpoint
    object share their measurements: a candidate that is the baseline scores exactly 100.
    thinking: "none" | "on" | "off". Raises DataError for prompts that would bias the run,
    ResultError for a folder of another run, EngineError when an engine stops answering.
    """
    path = Path(out_dir) / REQUESTS_NAME
    endpoints, aliases = _find_arms({"plain": plain, "baseline": baseline, "candidate": candidate})
    _require_fair(prompts, warm_up, rules)
    require_alike({name: endpoint.facts for name, endpoint in endpoints.items()})
    settings = _build_settings(
        endpoints, drafts, prompts, warm_up, rules, target, thinking=thinking, seed=seed
    )
    transcript = _open_transcript(path, settings)
    segment = transcript.num_segments
    memory = {}
    for name, endpoint in endpoints.items():
        if warm_up:
            endpoint.generate(warm_up, concurrency=1)
        found = endpoint.memory(context_tokens=rules.context_tokens)
        memory[name] = describe_memory(found)
        append_segment(path, arm=name, segment=segment, counters=endpoint.counters())
    _measure(path, transcript, endpoints, prompts, segment=segment, seed=seed, show=on_progress)
    if plain is not None:
        ask_plain(path, plain, greedy=not prompts[0].request.sampling.temperature)
    result = assemble_result(
        read_transcript(out_dir),
        facts={
            name: {
                "draft": describe_draft(drafts.get(name)),
                "engine": asdict(endpoint.facts),
                "memory": memory[name],
            }
            for name, endpoint in endpoints.items()
        },
        aliases=aliases,
        rules=rules,
        target=target,
        sampling=asdict(prompts[0].request.sampling),
        prompt_set={"name": prompt_set_name, "sha256": prompt_set_sha256},
        thinking=thinking,
        seed=seed,
        provenance=provenance,
    )
    write_result(out_dir, result)
    return read_json(Path(out_dir) / RESULT_NAME)


def _find_arms(
    given: Mapping[str, Endpoint | None],
) -> tuple[dict[str, Endpoint], dict[str, str]]:
    """Arms to measure, and for an arm that shares an earlier one's endpoint that arm's name."""
    endpoints: dict[str, Endpoint] = {}
    aliases: dict[str, str] = {}
    for name, endpoint in given.items():
        same = next((other for other, known in endpoints.items() if known is endpoint), None)
        if same is not None:
            aliases[name] = same
        elif endpoint is not None:
            endpoints[name] = endpoint
    return endpoints, aliases


def _measure(
    path: Path,
    transcript: Transcript,
    endpoints: Mapping[str, Endpoint],
    prompts: Sequence[EvalPrompt],
    *,
    segment: int,
    seed: int,
    show: Callable[[int, int], None] | None,
) -> None:
    total = len(prompts) * len(endpoints)
    done = sum(len(transcript.find(name)) for name in endpoints)
    held: dict[str, list[dict[str, Any]]] = {name: [] for name in endpoints}
    if show:
        show(done, total)
    for prompt in prompts:
        request = prompt.request
        names = list(endpoints)
        # an order of its own for each prompt, the same when a run goes on after a stop
        random.Random(f"{seed}:{request.request_id}").shuffle(names)
        for name in names:
            if request.request_id in transcript.find(name):
                continue
            failure = _measure_one(path, name, endpoints[name], prompt, segment)
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


def _measure_one(
    path: Path, name: str, endpoint: Endpoint, prompt: EvalPrompt, segment: int
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
        }
    _require_usable(name, endpoint, request, answer)
    append_answer(
        path,
        answer,
        arm=name,
        category=prompt.category,
        segment=segment,
        counters=endpoint.counters(),
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


def _require_fair(prompts: Sequence[EvalPrompt], warm_up: Sequence[Request], rules: Rules) -> None:
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


def _build_settings(
    endpoints: Mapping[str, Endpoint],
    drafts: Mapping[str, Draft | None],
    prompts: Sequence[EvalPrompt],
    warm_up: Sequence[Request],
    rules: Rules,
    target: TargetFacts,
    *,
    thinking: str,
    seed: int,
) -> dict[str, Any]:
    """What must be the same for a stopped run to go on."""
    asked = [(p.request.request_id, p.category, p.request.prompt_ids) for p in prompts]
    warmed = [request.prompt_ids for request in warm_up]
    settings: dict[str, Any] = {
        "rules": rules.sha256,
        "target weights": target.weights_fingerprint,
        "target tokenizer": target.tokenizer_sha256,
        "prompts": sha256_bytes(repr(asked).encode()),
        "warm-up prompts": sha256_bytes(repr(warmed).encode()),
        "sampling": asdict(prompts[0].request.sampling),
        "thinking": thinking,
        "seed": seed,
        "arms": sorted(endpoints),
    }
    for name, endpoint in endpoints.items():
        draft = drafts.get(name)
        settings[f"draft of '{name}'"] = draft.sha256 if draft else None
        for fact in _ENGINE_SETTINGS:
            settings[f"{fact} of '{name}'"] = getattr(endpoint.facts, fact)
    return settings


def _open_transcript(path: Path, settings: dict[str, Any]) -> Transcript:
    if not path.exists():
        if (path.parent / RESULT_NAME).exists():
            raise ResultError(
                f"holds a {RESULT_NAME} but no {REQUESTS_NAME}",
                where=str(path.parent),
                fix="Choose another --out.",
            )
        append_settings(path, settings)
    transcript = read_transcript(path.parent)
    if transcript.settings is None:  # stopped before the first line was whole
        append_settings(path, settings)
        return transcript
    for key in sorted(transcript.settings.keys() | settings.keys()):
        old, new = transcript.settings.get(key), settings.get(key)
        if old != new:
            raise ResultError(
                f"the folder holds a run with other settings: {key} was {old!r}, now {new!r}",
                where=str(path.parent),
                fix="Choose another --out, or use the settings of that run.",
            )
    return transcript
