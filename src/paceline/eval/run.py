"""Measures drafts: the same prompts through every arm, interleaved, one request at a time.

Endpoints are opened and closed by the caller; all are alive at once. Each finished request is
appended to requests.jsonl at once; the same call on the same folder goes on after a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.endpoint import Endpoint, Request
from paceline.eval.asking import EvalPrompt, ask_prompts, begin_segment, require_fair
from paceline.eval.assemble import assemble_result
from paceline.eval.conditions import require_alike
from paceline.eval.load import watch_load
from paceline.eval.result import RESULT_NAME, describe_draft, describe_memory, write_result
from paceline.eval.second_look import ask_plain
from paceline.eval.settings import build_settings, describe_facts, open_transcript
from paceline.eval.transcript import ALL_ARMS, REQUESTS_NAME, append_load, read_transcript
from paceline.records import read_json
from paceline.rules import Rules

if TYPE_CHECKING:
    from paceline.draft import Draft
    from paceline.target import TargetFacts

__all__ = ["measure_run"]


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
    require_fair(prompts, warm_up, rules)
    require_alike({name: endpoint.facts for name, endpoint in endpoints.items()})
    settings = build_settings(
        [*endpoints], drafts, prompts, warm_up, rules, target, thinking=thinking, seed=seed
    )
    for name, endpoint in endpoints.items():
        settings |= describe_facts(name, endpoint.facts)
    transcript = open_transcript(path, settings)
    segment = transcript.num_segments
    memory = {}
    for name, endpoint in endpoints.items():
        found = endpoint.memory(context_tokens=rules.context_tokens)
        memory[name] = describe_memory(found)
        begin_segment(path, name, endpoint, warm_up, segment=segment)
    on_gpu = any(endpoint.facts.platform == "cuda" for endpoint in endpoints.values())
    with watch_load(gpu=on_gpu) as watch:
        ask_prompts(
            path, transcript, endpoints, prompts, segment=segment, seed=seed, show=on_progress
        )
    append_load(path, arm=ALL_ARMS, block=segment, load=watch.record)
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
