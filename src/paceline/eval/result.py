"""result.json: what a run measured and what follows from it, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.endpoint import Counters, MemoryFacts
from paceline.errors import ResultError
from paceline.eval.acceptance import describe_acceptance, read_counters_acceptance
from paceline.eval.conditions import find_deviations, find_invalid
from paceline.eval.entries import Entry, summarise_arm
from paceline.eval.gate import find_withheld
from paceline.eval.noise import is_tie
from paceline.eval.pairing import included_for_tpot
from paceline.eval.ratios import compute_ratios
from paceline.eval.slices import build_slices
from paceline.methods import METHODS
from paceline.records import write_json
from paceline.rules import Rules

if TYPE_CHECKING:
    from paceline.draft import Draft

__all__ = [
    "RESULT_FORMAT",
    "RESULT_NAME",
    "add_replay",
    "build_arms",
    "build_verdict",
    "describe_counters",
    "describe_draft",
    "describe_memory",
    "find_training_mismatch",
    "write_result",
]

RESULT_FORMAT = "paceline-result/1"
RESULT_NAME = "result.json"

_REPLAY_KEYS = {"num_steps", "num_agree", "gaps", "position_1_served", "position_1_trained"}


def build_arms(
    entries: Mapping[str, Sequence[Entry]],
    counters: Mapping[str, Counters | None],
    facts: Mapping[str, Mapping[str, Any]],
    rules: Rules,
) -> dict[str, dict[str, Any]]:
    """Arm -> everything that follows from its requests. facts: arm -> draft, engine, memory."""
    included, _ = included_for_tpot(entries, min_tokens=rules.protocol.min_tokens_for_tpot)
    arms: dict[str, dict[str, Any]] = {}
    for name, own in entries.items():
        k = facts[name]["engine"]["num_speculative_tokens"]
        figures = summarise_arm(own, rules, included=included, num_speculative_tokens=k)
        from_requests = figures.pop("from_requests")
        arm = {
            **facts[name],
            **figures,
            **describe_counters(counters[name], from_requests, k),
            "requests": list(own),
        }
        arm["notes"] = _build_notes(name, arm, arms.get("baseline"), rules)
        arms[name] = arm
    return arms


def describe_counters(
    counters: Counters | None, from_requests: Mapping[str, Any] | None, k: int
) -> dict[str, Any]:
    """vLLM's own figures by its counters and by its per-request record, and the prefix cache."""
    cache = None
    if counters is not None and None not in (
        counters.prefix_cache_queries,
        counters.prefix_cache_hits,
    ):
        cache = {"queries": counters.prefix_cache_queries, "hits": counters.prefix_cache_hits}
    if not k or counters is None or from_requests is None:
        return {"vllm": None, "prefix_cache": cache}
    own = describe_acceptance(read_counters_acceptance(counters))
    counted = ("num_steps", "num_drafted", "num_accepted", "position_acceptance")
    agrees = all(own[key] == from_requests[key] for key in counted)
    return {
        "vllm": {**own, "from_requests": dict(from_requests), "agrees": agrees},
        "prefix_cache": cache,
    }


def build_verdict(result: Mapping[str, Any], rules: Rules, *, seed: int) -> dict[str, Any]:
    """{"ratios", "score", "withheld", "notes"} of a result that holds its arms and its fidelity.

    The gate comes first: with an arm withheld there is no score, whatever its ratios.
    """
    arms = result["arms"]
    withheld = find_withheld(result["fidelity"], rules)
    if "baseline" not in arms:
        notes = ["no ratios and no score: no baseline"]
        return {"ratios": None, "score": None, "withheld": withheld, "notes": notes}
    memory = {name: read_memory_bytes(arm) for name, arm in arms.items()}
    entries = {name: arm["requests"] for name, arm in arms.items()}
    ratios, score, notes = compute_ratios(entries, memory, rules, seed=seed)
    included, _ = included_for_tpot(entries, min_tokens=rules.protocol.min_tokens_for_tpot)
    sides = (entries["baseline"], entries["candidate"])
    ratios |= build_slices(*sides, included, rules, seed=seed)
    if withheld:
        score = None
        notes.append(f"no score: {' and '.join(sorted(withheld))} withheld by the fidelity gate")
    if score is not None:
        reasons = find_invalid({**result, "ratios": ratios}, rules)
        score = {
            **score,
            "ranked": not reasons,
            "reasons": reasons,
            "deviations": find_deviations(result, rules),
            "tie": is_tie(score["value"], result.get("noise_floor"), rules),
        }
    return {"ratios": ratios, "score": score, "withheld": withheld, "notes": notes}


def read_memory_bytes(arm: Mapping[str, Any]) -> int | None:
    """Draft memory of an arm; 0 for a method without weights, None when it was not measured."""
    if arm["memory"] is not None:
        return int(arm["memory"]["total_bytes"])
    method = arm["engine"]["method"]
    weightless = [row.vllm_method for row in METHODS.values() if not row.has_weights]
    return 0 if method in weightless else None


def describe_draft(draft: Draft | None) -> dict[str, Any] | None:
    """What result.json says of a draft."""
    if draft is None:
        return None
    return {
        "name": draft.metadata.get("name") or Path(draft.path).name,
        "sha256": draft.sha256,
        "family": draft.family,
        "num_speculative_tokens": draft.num_speculative_tokens,
        "num_parameters": draft.num_parameters,
        "files_bytes": draft.files_bytes,
        "metadata": dict(draft.metadata),
    }


def describe_memory(memory: MemoryFacts | None) -> dict[str, Any] | None:
    return None if memory is None else {**asdict(memory), "total_bytes": memory.total_bytes}


def add_replay(
    result: Mapping[str, Any], replay: Mapping[str, Any], rules: Rules
) -> dict[str, Any]:
    """The result with trained-against-served figures in it. Changes no other number.

    replay: arm -> num_steps, num_agree, position_1_served, position_1_trained, and gaps: for each
    step that differs, how far apart the draft's own logits hold the two tokens. Which of them are
    near ties, and whether the arm passes, is worked out here, by the rules.
    """
    added = dict(result.get("replay") or {})
    for arm, figures in replay.items():
        if arm not in result["arms"] or not set(figures) >= _REPLAY_KEYS:
            raise ResultError(
                f"the replay of '{arm}' does not fit the result",
                where="replay",
                expected=f"an arm of the result with {', '.join(sorted(_REPLAY_KEYS))}",
            )
        served, trained = figures["position_1_served"], figures["position_1_trained"]
        steps, gaps = figures["num_steps"], figures["gaps"]
        near = [gap for gap in gaps if gap <= rules.replay.near_tie_logits]
        explained = (figures["num_agree"] + len(near)) / steps if steps else None
        passed = None
        if explained is not None and served is not None and trained is not None:
            close = abs(served - trained) <= rules.replay.max_position_1_difference
            passed = explained >= rules.replay.minimum_share and close
        added[arm] = {
            **{key: value for key, value in figures.items() if key != "gaps"},
            "share": figures["num_agree"] / steps if steps else None,
            "num_near_tie": len(near),
            "num_real": len(gaps) - len(near),
            "max_near_tie_gap": max(near, default=None),
            "near_tie_logits": rules.replay.near_tie_logits,
            "passed": passed,
        }
    return {**result, "replay": added}


def write_result(out_dir: str | Path, result: Mapping[str, Any]) -> None:
    """Writes result.json of a run folder, atomically."""
    write_json(Path(out_dir) / RESULT_NAME, result)


def _build_notes(
    name: str, arm: Mapping[str, Any], baseline: Mapping[str, Any] | None, rules: Rules
) -> list[str]:
    notes = []
    vllm = arm["vllm"]
    if vllm:
        steps, length = vllm["num_steps"], vllm["acceptance_length"]
        if steps >= rules.checks.min_steps_without_acceptance and f"{length:.2f}" == "1.00":
            notes.append(f"the draft contributes nothing: acceptance length 1.00 in {steps} steps")
        if not vllm["agrees"]:
            other = vllm["from_requests"]
            notes.append(
                f"the engine's counters say {vllm['num_accepted']} tokens accepted in {steps} "
                f"steps, its per-request records {other['num_accepted']} in {other['num_steps']}"
            )
    if arm["failures"]:
        notes.append(f"{arm['failures']} requests failed; they count as decoding without a draft")
    if baseline and baseline["engine"]["runner"] != arm["engine"]["runner"]:
        notes.append(
            f"runs on vLLM's {arm['engine']['runner']} runner, the baseline on "
            f"{baseline['engine']['runner']}: part of the time difference is the engine's"
        )
    return notes


def find_training_mismatch(
    draft: Mapping[str, Any] | None, target: Mapping[str, Any], thinking: str
) -> list[str]:
    """Notes on a draft whose record says that it was trained for something else."""
    trained = ((draft or {}).get("metadata") or {}).get("trained")
    if not isinstance(trained, Mapping):
        return []
    notes = []
    if trained.get("thinking") not in (None, thinking):
        notes.append(f"trained with thinking {trained['thinking']}, measured with {thinking}")
    for key in ("tokenizer_sha256", "chat_template_sha256", "weights_fingerprint"):
        if trained.get(key) and target.get(key) and trained[key] != target[key]:
            notes.append(f"trained on a target with another {key}")
    return notes
