"""The ratios again in each category and each length of prompt: what a mean may hide.

A slice never enters the score. Thinking on and off are two runs and never one slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.eval.lengths import bucket_names, find_bucket
from paceline.eval.pairing import build_pairing
from paceline.eval.ratios import measure_intervals
from paceline.rules import Rules

__all__ = ["build_slices"]

Entry = Mapping[str, Any]


def build_slices(
    baseline: Sequence[Entry],
    candidate: Sequence[Entry],
    included: set[str],
    rules: Rules,
    *,
    seed: int,
) -> dict[str, Any]:
    """{"by_category", "worst_category", "by_prompt_tokens"} as result.json's ratios hold them.

    Each slice: num_prompts and the tau and TPOT ratios with their intervals. Prompts of a length
    are one pool over all categories. The worst category is the one of the smallest tau ratio.
    """
    edges = rules.prompts.length_buckets
    lengths = {e["id"]: find_bucket(e["num_prompt_tokens"], edges) for e in baseline}
    categories = {e["id"]: e["category"] for e in baseline}

    def measure(groups: Mapping[str, str], name: str) -> dict[str, Any]:
        ids = {key for key, group in groups.items() if group == name}
        theirs, ours = (
            [{**e, "category": name} for e in arm if e["id"] in ids]
            for arm in (baseline, candidate)
        )
        pairing = build_pairing(theirs, ours, included)
        tau, tpot, _ = measure_intervals(pairing, None, rules, seed=seed)
        return {"num_prompts": len(ids), "tau": tau, "tpot": tpot}

    by_category = {name: measure(categories, name) for name in sorted(set(categories.values()))}
    known = {
        name: found["tau"]["value"]
        for name, found in by_category.items()
        if found["tau"]["value"] is not None
    }
    present = set(lengths.values())
    return {
        "by_category": by_category,
        "worst_category": min(known, key=lambda name: (known[name], name)) if known else None,
        "by_prompt_tokens": {
            name: measure(lengths, name) for name in bucket_names(edges) if name in present
        },
    }
