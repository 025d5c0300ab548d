"""Puts a transcript and the facts of its engines together into a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.eval.conditions import describe_cache
from paceline.eval.entries import build_entries, require_complete, sum_counters
from paceline.eval.fidelity import Key, Text, build_fidelity
from paceline.eval.result import (
    RESULT_FORMAT,
    build_arms,
    build_verdict,
    find_training_mismatch,
)
from paceline.eval.transcript import Transcript
from paceline.records import build_provenance
from paceline.rules import Rules

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = ["assemble_result", "compare_with_plain", "describe_protocol", "read_texts"]

_TARGET_KEYS = (
    "name",
    "architecture",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "tokenizer_sha256",
    "chat_template_sha256",
    "weights_fingerprint",
)


def assemble_result(
    transcript: Transcript,
    *,
    facts: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
    rules: Rules,
    target: TargetFacts,
    sampling: Mapping[str, Any],
    prompt_set: Mapping[str, Any],
    thinking: str,
    seed: int,
    provenance: Mapping[str, Any] | None,
    protocol: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """result.json as a dict. facts: arm -> draft, engine and memory; aliases: arm -> other arm.

    protocol: how a run of several cycles was made; None for a quick one.
    """
    ks = {name: own["engine"]["num_speculative_tokens"] for name, own in facts.items()}
    entries = build_entries(transcript, ks)
    require_complete(entries)
    counters = {name: sum_counters(transcript, name) for name in entries}
    arms = build_arms(entries, counters, facts, rules)
    target_record = {key: getattr(target, key) for key in _TARGET_KEYS}
    for arm in arms.values():
        arm["notes"] += find_training_mismatch(arm["draft"], target_record, thinking)
    fidelity = compare_with_plain(transcript, sampling, rules)
    for name, other in aliases.items():
        arms[name] = arms[other]
        if fidelity is not None and other in fidelity:
            fidelity[name] = fidelity[other]
    asked = {entry["id"]: entry["category"] for entry in next(iter(entries.values()))}
    sizes: dict[str, int] = {}
    for category in asked.values():
        sizes[category] = sizes.get(category, 0) + 1
    result: dict[str, Any] = {
        "format": RESULT_FORMAT,
        "provenance": dict(provenance) if provenance else build_provenance(seed=seed),
        "rules": {
            "name": rules.name,
            "version": rules.version,
            "title": rules.title,
            "provisional": list(rules.provisional),
            "sha256": rules.sha256,
            "text": rules.text,
        },
        "target": target_record,
        "sampling": dict(sampling),
        "thinking": thinking,
        "seed": seed,
        "cache_state": describe_cache(arms, rules)[0],
        "protocol": describe_protocol(transcript, protocol),
        "prompts": {**prompt_set, "num_prompts": sum(sizes.values()), "categories": sizes},
        "arms": arms,
        "aliases": dict(aliases),
        "fidelity": fidelity,
        "replay": None,
        "noise_floor": None,
        "samples": [],
    }
    return {**result, **build_verdict(result, rules, seed=seed)}


def describe_protocol(transcript: Transcript, protocol: Mapping[str, Any] | None) -> dict[str, Any]:
    """The protocol with what the transcript says of its blocks."""
    return {
        **(protocol or {"kind": "quick"}),
        "loads": [
            {"arm": arm, "block": block, **load}
            for (arm, block), load in sorted(transcript.loads.items())
        ],
        "voids": list(transcript.voids),
    }


def compare_with_plain(
    transcript: Transcript, sampling: Mapping[str, Any], rules: Rules
) -> dict[str, Any] | None:
    """Fidelity of every arm; None without a plain arm.

    "plain" is the target against itself: its later blocks against its first, where it has several.
    """
    texts = {arm: read_texts(transcript, arm) for arm in transcript.blocks}
    if not texts.get("plain"):
        return None
    found = {}
    for arm, own in texts.items():
        if arm == "plain":
            own = {key: text for key, text in own.items() if key[1] > 0}
            if not own:
                continue
        likelihoods = {
            (side, (key, block)): value
            for (name, key, block), value in transcript.likelihoods.items()
            for side, is_so in (
                ("plain", name == "plain" and block == 0),
                ("arm", name == arm and (key, block) in own),
            )
            if is_so
        }
        found[arm] = build_fidelity(
            texts["plain"],
            own,
            {
                (key, block): choice
                for (name, key, block), choice in transcript.forks.items()
                if name == arm
            },
            likelihoods,
            rules,
            greedy=not sampling["temperature"],
        )
    return found


def read_texts(transcript: Transcript, arm: str) -> dict[Key, Text]:
    """(request id, block) -> text of every answer of an arm."""
    return {
        (key, block): Text(output_ids=row["output_ids"], finish_reason=row["finish_reason"])
        for block, rows in transcript.blocks.get(arm, {}).items()
        for key, row in rows.items()
        if row["kind"] == "answer"
    }
