"""Measures in cycles of four blocks, A B B A: each block is one fresh server's whole life.

Two servers that run one after the other see another machine: warmer, busier, its memory laid out
anew. Blocks in this order cancel a steady drift, and enough of them show how much of a difference
is the server's and not the draft's. The order is random by a published seed, prompts keep theirs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.endpoint import Endpoint, EngineFacts, Request
from paceline.errors import EngineError
from paceline.eval.asking import EvalPrompt, ask_prompts, begin_segment, require_fair
from paceline.eval.assemble import assemble_result
from paceline.eval.conditions import require_alike
from paceline.eval.entries import build_entries
from paceline.eval.load import find_disturbance, watch_load
from paceline.eval.ratios import compute_ratios
from paceline.eval.result import (
    RESULT_NAME,
    describe_draft,
    describe_memory,
    read_memory_bytes,
    write_result,
)
from paceline.eval.second_look import ask_plain
from paceline.eval.settings import build_settings, describe_facts, open_transcript
from paceline.eval.transcript import (
    REQUESTS_NAME,
    Transcript,
    append_facts,
    append_load,
    append_void,
    read_transcript,
)
from paceline.records import read_json
from paceline.rules import Rules

if TYPE_CHECKING:
    from paceline.draft import Draft
    from paceline.target import TargetFacts

__all__ = ["Cycles", "OpenArm", "measure_cycles", "plan_order"]

OpenArm = Callable[[str], AbstractContextManager[Endpoint]]


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """num_cycles: the most there are. stop_at: enough when the score's half-width is no wider."""

    num_cycles: int
    stop_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Run:
    path: Path
    open_arm: OpenArm
    prompts: Sequence[EvalPrompt]
    warm_up: Sequence[Request]
    rules: Rules
    seed: int
    num_answers: int
    show: Callable[[int, int], None] | None


def plan_order(cycle: int, *, seed: int) -> tuple[str, ...]:
    """A B B A or B A A B for one cycle; A is the baseline."""
    first, second = random.Random(f"{seed}:cycle {cycle}").sample(["baseline", "candidate"], 2)
    return (first, second, second, first)


def measure_cycles(
    open_arm: OpenArm,
    *,
    cycles: Cycles,
    with_plain: bool,
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
    """Measures baseline and candidate in cycles, writes the run folder, returns its result.

    open_arm: starts a fresh server of an arm ("baseline", "candidate", "plain") and ends it. The
    target alone is served before and after the cycles: against itself it is the floor of fidelity.
    Raises as measure_run does; the same call on the same folder goes on after a stop.
    """
    names = ["baseline", "candidate", *(["plain"] if with_plain else [])]
    require_fair(prompts, warm_up, rules)
    settings = build_settings(
        names,
        drafts,
        prompts,
        warm_up,
        rules,
        target,
        thinking=thinking,
        seed=seed,
        protocol={"protocol": "cycles"},
    )
    path = Path(out_dir) / REQUESTS_NAME
    open_transcript(path, settings)
    blocks = 4 * cycles.num_cycles + (2 if with_plain else 0)
    run = _Run(
        path=path,
        open_arm=open_arm,
        prompts=prompts,
        warm_up=warm_up,
        rules=rules,
        seed=seed,
        num_answers=blocks * len(prompts),
        show=on_progress,
    )
    if with_plain:
        _measure_block(run, "plain", 0)
    orders, stopped = [], "cycles"
    for cycle in range(cycles.num_cycles):
        order = plan_order(cycle, seed=seed)
        orders.append(list(order))
        for place, name in enumerate(order):
            _measure_block(run, name, 2 * cycle + order[:place].count(name))
        half = _half_width(run)
        if cycles.stop_at is not None and half is not None and half <= cycles.stop_at:
            stopped = "width"
            break
    if with_plain:
        _measure_block(run, "plain", 1, ask=True)
    transcript = read_transcript(out_dir)
    facts = {
        name: {"draft": describe_draft(drafts.get(name)), **transcript.facts[name]}
        for name in names
    }
    result = assemble_result(
        transcript,
        facts=facts,
        aliases={},
        rules=rules,
        target=target,
        sampling=asdict(prompts[0].request.sampling),
        prompt_set={"name": prompt_set_name, "sha256": prompt_set_sha256},
        thinking=thinking,
        seed=seed,
        provenance=provenance,
        protocol={
            "kind": "cycles",
            "num_cycles": len(orders),
            "max_cycles": cycles.num_cycles,
            "stop_at": cycles.stop_at,
            "stopped_by": stopped,
            "order": orders,
        },
    )
    write_result(out_dir, result)
    return read_json(Path(out_dir) / RESULT_NAME)


def _measure_block(run: _Run, name: str, block: int, *, ask: bool = False) -> None:
    """One block, again where it is void; one that is whole already is left as it is.

    ask: this server of the target alone is asked about every text of the run as well.
    """
    transcript = read_transcript(run.path.parent)
    if _is_whole(transcript, name, block, run):
        if ask:
            with run.open_arm(name) as endpoint:
                _ask_plain(run, endpoint)
        return
    if transcript.find(name, block):
        append_void(run.path, arm=name, block=block, reason="stopped in the middle")
    for attempt in range(run.rules.protocol.max_block_reruns + 1):
        with run.open_arm(name) as endpoint:
            load = _ask_block(run, name, block, endpoint)
            transcript = read_transcript(run.path.parent)
            pair = transcript.loads.get((_other(name), block))
            disturbed = find_disturbance(load, pair, run.rules)
            again = disturbed and attempt < run.rules.protocol.max_block_reruns
            if disturbed and again:
                append_void(run.path, arm=name, block=block, reason=disturbed)
                continue
            append_load(run.path, arm=name, block=block, load={**load, "disturbed": disturbed})
            if ask:
                _ask_plain(run, endpoint)
            return


def _other(name: str) -> str:
    return {"baseline": "candidate", "candidate": "baseline"}.get(name, name)


def _is_whole(transcript: Transcript, name: str, block: int, run: _Run) -> bool:
    return (name, block) in transcript.loads and len(transcript.find(name, block)) == len(
        run.prompts
    )


def _find_prompts(run: _Run, block: int) -> Sequence[EvalPrompt]:
    """The same prompts in the same order; sampled ones with a seed of this block's own."""
    if not run.prompts[0].request.sampling.temperature:
        return run.prompts
    seeded = []
    for prompt in run.prompts:
        sampling = replace(prompt.request.sampling, seed=run.seed + block)
        seeded.append(replace(prompt, request=replace(prompt.request, sampling=sampling)))
    return seeded


def _ask_block(run: _Run, name: str, block: int, endpoint: Endpoint) -> dict[str, Any]:
    transcript = read_transcript(run.path.parent)
    _require_same_engine(run, transcript, name, endpoint)
    begin_segment(
        run.path, name, endpoint, run.warm_up, segment=transcript.num_segments, block=block
    )
    done = sum(len(rows) for own in transcript.blocks.values() for rows in own.values())
    with watch_load(gpu=endpoint.facts.platform == "cuda") as watch:
        ask_prompts(
            run.path,
            transcript,
            {name: endpoint},
            _find_prompts(run, block),
            segment=transcript.num_segments,
            seed=run.seed,
            show=run.show,
            block=block,
            before=done,
            total=run.num_answers,
        )
    return watch.record


def _require_same_engine(run: _Run, transcript: Transcript, name: str, endpoint: Endpoint) -> None:
    """Every server of an arm is the same, and alike to the other arms'. Notes the first's facts."""
    if name not in transcript.facts:
        memory = describe_memory(endpoint.memory(context_tokens=run.rules.context_tokens))
        append_facts(run.path, arm=name, engine=asdict(endpoint.facts), memory=memory)
    others = {arm: EngineFacts(**found["engine"]) for arm, found in transcript.facts.items()}
    before = others.pop(name, None)
    if before is not None:
        then, now = describe_facts(name, before), describe_facts(name, endpoint.facts)
        for key, value in then.items():
            if now[key] != value:
                raise EngineError(
                    f"{key} was {value!r} on an earlier server, now {now[key]!r}",
                    where=f"arm '{name}'",
                    expected="the same engine in every block",
                    fix="Choose another --out and measure again.",
                )
    require_alike({name: endpoint.facts, **others})


def _ask_plain(run: _Run, endpoint: Endpoint) -> None:
    ask_plain(run.path, endpoint, greedy=not run.prompts[0].request.sampling.temperature)


def _half_width(run: _Run) -> float | None:
    """Half of the score's interval so far; None where it has none yet."""
    transcript = read_transcript(run.path.parent)
    facts = transcript.facts
    ks = {
        name: facts[name]["engine"]["num_speculative_tokens"] for name in ("baseline", "candidate")
    }
    memory = {name: read_memory_bytes(facts[name]) for name in ks}
    entries = build_entries(transcript, ks)
    _, score, _ = compute_ratios(entries, memory, run.rules, seed=run.seed)
    if score is None or score["low"] is None:
        return None
    return float(score["high"] - score["value"])
