"""From transcript rows to one entry a request, and from entries to an arm's figures.

Entries go into result.json, so that every figure of an arm but vLLM's own counters can be
recomputed from that file alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from paceline.acceptance import Acceptance
from paceline.endpoint import Counters
from paceline.errors import ResultError
from paceline.eval.acceptance import (
    compute_tau,
    count_request_steps,
    describe_acceptance,
    subtract_counters,
)
from paceline.eval.lengths import bucket_names, find_bucket
from paceline.eval.statistics import geometric_mean
from paceline.eval.timing import read_times
from paceline.eval.transcript import Transcript, parse_answer
from paceline.rules import Rules

__all__ = ["build_entries", "require_complete", "sum_counters", "summarise_arm"]

Entry = dict[str, Any]


def build_entries(
    transcript: Transcript, num_speculative_tokens: Mapping[str, int]
) -> dict[str, list[Entry]]:
    """Arm -> entries, block after block, in the order in which its requests finished.

    A failed request stands as decoding without speculation: the plain arm's tokens (else another
    arm's) at one a step, and the plain arm's time.
    """
    entries: dict[str, dict[tuple[str, int], Entry]] = {}
    for arm, k in num_speculative_tokens.items():
        entries[arm] = {
            (name, block): _answer_entry(row, k)
            for block, rows in transcript.blocks.get(arm, {}).items()
            for name, row in rows.items()
            if row["kind"] == "answer"
        }
    result: dict[str, list[Entry]] = {}
    for arm in num_speculative_tokens:
        others = [other for other in ("plain", *entries) if other != arm and other in entries]
        result[arm] = [
            entries[arm][name, block]
            if (name, block) in entries[arm]
            else _failure_entry(row, _find_stand_in(entries, others, name, block))
            for block, rows in sorted(transcript.blocks.get(arm, {}).items())
            for name, row in rows.items()
        ]
    return result


def _find_stand_in(
    entries: Mapping[str, Mapping[tuple[str, int], Entry]],
    others: Sequence[str],
    name: str,
    block: int,
) -> tuple[str, Entry] | None:
    """An answer of another arm to the same prompt: of the same block, else of its first."""
    for other in others:
        for key in ((name, block), (name, 0)):
            if key in entries[other]:
                return other, entries[other][key]
    return None


def _answer_entry(row: Mapping[str, Any], k: int) -> Entry:
    answer = parse_answer(row)
    counts = count_request_steps(answer, num_speculative_tokens=k)
    acceptance = asdict(counts.acceptance)
    return {
        "id": answer.request_id,
        "block": row.get("block", 0),
        "category": row["category"],
        "num_prompt_tokens": len(answer.prompt_ids),
        "num_tokens": len(answer.output_ids),
        "finish_reason": answer.finish_reason,
        "delivered": counts.delivered,
        "steps": counts.steps,
        "num_drafting_steps": acceptance["num_steps"],
        "num_drafted": acceptance["num_drafted"],
        "num_accepted": acceptance["num_accepted"],
        "accepted_at": list(acceptance["accepted_at"]),
        "num_chunks": len(answer.chunk_tokens),
        **asdict(read_times(answer)),
        "failure": None,
        "stands_for": None,
    }


def _failure_entry(row: Mapping[str, Any], other: tuple[str, Entry] | None) -> Entry:
    name, stand_in = other if other else (None, None)
    return {
        "id": row["id"],
        "block": row.get("block", 0),
        "category": row["category"],
        "num_prompt_tokens": row["num_prompt_tokens"],
        "num_tokens": stand_in["num_tokens"] if stand_in else 0,
        "finish_reason": None,
        "delivered": stand_in["delivered"] if stand_in else 0,
        "steps": stand_in["delivered"] if stand_in else 0,
        "num_drafting_steps": 0,
        "num_drafted": 0,
        "num_accepted": 0,
        "accepted_at": [],
        "num_chunks": 0,
        "ttft_ms": None,
        "tpot_ms": stand_in["tpot_ms"] if stand_in and name == "plain" else None,
        "decode_ms": None,
        "itl_ms": None,
        "failure": row["error"],
        "stands_for": name,
    }


def sum_counters(transcript: Transcript, arm: str) -> Counters | None:
    """The engine's own counters of one arm, over all its segments; None without a segment."""
    total: Counters | None = None
    for (name, _, _), readings in sorted(transcript.readings.items()):
        if name != arm:
            continue
        for before, after in pairwise(readings):
            subtract_counters(after, before)  # a restart between two requests is an error
        part = subtract_counters(readings[-1], readings[0])
        total = part if total is None else _add(total, part)
    return total


def _add(a: Counters, b: Counters) -> Counters:
    def plus(x: int | None, y: int | None) -> int | None:
        return None if x is None or y is None else x + y

    positions = zip_longest(
        a.num_accepted_tokens_per_pos, b.num_accepted_tokens_per_pos, fillvalue=0
    )
    return Counters(
        num_drafts=a.num_drafts + b.num_drafts,
        num_draft_tokens=a.num_draft_tokens + b.num_draft_tokens,
        num_accepted_tokens=a.num_accepted_tokens + b.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(x + y for x, y in positions),
        prefix_cache_queries=plus(a.prefix_cache_queries, b.prefix_cache_queries),
        prefix_cache_hits=plus(a.prefix_cache_hits, b.prefix_cache_hits),
    )


def summarise_arm(
    entries: Sequence[Entry], rules: Rules, *, included: set[str], num_speculative_tokens: int
) -> dict[str, Any]:
    """An arm's figures from its entries. included: ids whose TPOT counts (the same in each arm)."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry["category"], []).append(entry)
    tau = compute_tau(
        {name: [(e["delivered"], e["steps"]) for e in group] for name, group in groups.items()}
    )
    tpot = [e["tpot_ms"] for e in entries if e["id"] in included]
    timed = [e for e in entries if e["decode_ms"] is not None and e["steps"]]
    steps = sum(e["steps"] for e in entries)
    total = _sum_acceptance(entries, num_speculative_tokens)
    speculates = num_speculative_tokens > 0
    return {
        "tau": {
            "value": tau.value,
            "by_category": {
                name: {
                    "value": tau.by_category[name],
                    "num_prompts": len({e["id"] for e in group}),
                    "delivered": sum(e["delivered"] for e in group),
                    "steps": sum(e["steps"] for e in group),
                }
                for name, group in groups.items()
            },
            "by_prompt_tokens": _tau_by_length(entries, rules),
        },
        "from_requests": describe_acceptance(total) if speculates else None,
        "position_acceptance_by_category": {
            name: list(_sum_acceptance(group, num_speculative_tokens).position_acceptance)
            for name, group in groups.items()
        }
        if speculates
        else {},
        "coverage": total.num_steps / steps if speculates and steps else None,
        "tpot_ms": {
            "median": _median(tpot),
            "geomean": geometric_mean(tpot) if tpot else None,
            "num_requests": len(tpot),
            "num_excluded": len(entries) - len(tpot),
        },
        "ttft_ms": {"median": _median([e["ttft_ms"] for e in entries if e["ttft_ms"] is not None])},
        "itl_ms_per_chunk": {
            "median": _median([e["itl_ms"] for e in entries if e["itl_ms"] is not None])
        },
        "step_ms": sum(e["decode_ms"] for e in timed) / sum(e["steps"] for e in timed)
        if timed
        else None,
        "failures": sum(1 for e in entries if e["failure"] is not None),
    }


def _sum_acceptance(entries: Sequence[Entry], k: int) -> Acceptance:
    zero = Acceptance(num_steps=0, num_drafted=0, num_accepted=0, accepted_at=(0,) * k)
    return reduce(
        lambda total, e: (
            total
            + Acceptance(
                num_steps=e["num_drafting_steps"],
                num_drafted=e["num_drafted"],
                num_accepted=e["num_accepted"],
                accepted_at=tuple(e["accepted_at"]),
            )
        ),
        entries,
        zero,
    )


def _tau_by_length(entries: Sequence[Entry], rules: Rules) -> dict[str, Any]:
    """tau pooled over prompts of a length: "<= 1024" -> value and number of prompts."""
    edges = rules.prompts.length_buckets
    groups: dict[str, list[Entry]] = {name: [] for name in bucket_names(edges)}
    for entry in entries:
        groups[find_bucket(entry["num_prompt_tokens"], edges)].append(entry)
    return {
        name: {
            "value": compute_tau({name: [(e["delivered"], e["steps"]) for e in group]}).value,
            "num_prompts": len({e["id"] for e in group}),
        }
        for name, group in groups.items()
    }


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(np.asarray(values, dtype=np.float64))) if values else None


def require_complete(entries: Mapping[str, Sequence[Entry]]) -> None:
    """Raises ResultError when the arms answered different prompts."""
    first, *others = entries
    wanted = {e["id"] for e in entries[first]}
    for other in others:
        blocks: dict[int, set[str]] = {}
        for e in entries[other]:
            blocks.setdefault(e["block"], set()).add(e["id"])
        missing = {name for names in blocks.values() or [set()] for name in wanted ^ names}
        if missing:
            raise ResultError(
                f"'{first}' and '{other}' differ in {len(missing)} prompts, "
                f"for example {min(missing)!r}",
                where="requests.jsonl",
                fix="Run the same paceline eval command again; it goes on where it stopped.",
            )
