"""Whether a run may be ranked, and where it differs from its contest's conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.endpoint import EngineFacts
from paceline.errors import EngineError
from paceline.methods import METHODS
from paceline.rules import Rules

__all__ = ["describe_cache", "find_deviations", "find_invalid", "require_alike"]

_ALIKE = (
    "vllm_version",
    "platform",
    "device_name",
    "target_architecture",
    "dtype",
    "max_model_len",
    "prefix_caching",
    "enforce_eager",
)


def require_alike(arms: Mapping[str, EngineFacts]) -> None:
    """Raises EngineError when two arms run on engines that cannot be compared."""
    first, *others = arms
    for other in others:
        for name in _ALIKE:
            a, b = getattr(arms[first], name), getattr(arms[other], name)
            if a != b:
                raise EngineError(
                    f"'{first}' has {name} {a!r}, '{other}' has {b!r}",
                    where="engines to compare",
                    expected="the same for every arm",
                )


def describe_cache(arms: Mapping[str, Mapping[str, Any]], rules: Rules) -> tuple[str, str | None]:
    """(cache state, why the run is invalid or None): prefix cache counters, proposers' caches."""
    for name, arm in arms.items():
        if keeps_answers(arm["engine"].get("settings") or {}):
            return f"warm; '{name}' drafts from answers to earlier prompts", (
                f"'{name}' keeps finished answers across requests: a ranked draft has no state"
                " but the request's own (cache_tokens 0)"
            )
    worst = 0.0
    on = False
    for name, arm in arms.items():
        cache = arm["prefix_cache"]
        if cache is None:
            return "unknown", f"cache state unknown: '{name}' gave no prefix cache counters"
        if cache["queries"]:
            worst = max(worst, cache["hits"] / cache["queries"])
        on = on or bool(arm["engine"]["prefix_caching"])
    if worst > rules.protocol.max_prefix_hit_share:
        return f"warm; {worst:.1%} of prefix queries hit", (
            f"warm prefix cache: {worst:.1%} of its queries hit, "
            f"at most {rules.protocol.max_prefix_hit_share:.1%} may"
        )
    if on:
        return f"cold; prefix caching on, {worst:.1%} of its queries hit", None
    return "cold; prefix caching off", None


def keeps_answers(settings: Mapping[str, Any]) -> bool:
    """Whether a proposer with these engine settings drafts from answers to earlier requests."""
    own = (settings.get("additional_config") or {}).get("paceline") or {}
    speculative = settings.get("speculative_config") or {}
    kept = speculative.get("suffix_decoding_max_cached_requests", 10000)  # vLLM's default
    return bool(own.get("cache_tokens")) or (speculative.get("method") == "suffix" and kept != 0)


def find_invalid(result: Mapping[str, Any], rules: Rules) -> list[str]:
    """Reasons for which a run is not ranked, whatever its score."""
    arms, reasons = result["arms"], []
    ratio = result["ratios"]["tau"]["value"]
    if ratio < rules.gate.minimum_tau_ratio:
        reasons.append(
            f"acceptance is {ratio:.3f} of the baseline's, below the gate of "
            f"{rules.gate.minimum_tau_ratio:g}"
        )
    cache = describe_cache(arms, rules)[1]
    if cache:
        reasons.append(cache)
    for name, arm in arms.items():
        share = arm["failures"] / len(arm["requests"])
        if share > rules.protocol.max_failure_share:
            reasons.append(f"'{name}' failed on {share:.1%} of the prompts")
        method = arm["engine"]["rejection_sample_method"]
        if method is not None and method != rules.speculation.rejection_sample_method:
            reasons.append(f"'{name}' rejects by {method!r}, which fakes acceptance")
    for load in (result.get("protocol") or {}).get("loads", []):
        if load.get("disturbed"):
            reasons.append(
                f"block {load['block']} of '{load['arm']}' stayed disturbed: {load['disturbed']}"
            )
    if result["fidelity"] is None:
        reasons.append("the texts were not compared with the target's own: it was not served alone")
    return reasons


def find_deviations(result: Mapping[str, Any], rules: Rules) -> list[str]:
    """Where a run differs from what its rules say: the score is then not the contest's."""
    arms, found = result["arms"], []

    def compare(what: str, is_so: object, must_be: object) -> None:
        if is_so != must_be:
            found.append(f"{what} is {is_so}, the rules say {must_be}")

    compare("target", result["target"]["name"], rules.target.name)
    compare("prompt set", result["prompts"]["name"], rules.prompts.name)
    for key in ("temperature", "top_p", "top_k", "max_tokens"):
        compare(key, result["sampling"][key], getattr(rules.sampling, key))
    sizes = result["prompts"]["categories"]
    if len(sizes) < rules.prompts.num_categories:
        found.append(f"{len(sizes)} categories, the rules say {rules.prompts.num_categories}")
    few = sum(1 for size in sizes.values() if size < rules.prompts.min_prompts_per_category)
    if few:
        least = rules.prompts.min_prompts_per_category
        found.append(f"{few} categories have fewer than {least} prompts")
    wanted = {
        "baseline": rules.speculation.baseline_num_speculative_tokens,
        "candidate": rules.speculation.entry_num_speculative_tokens,
    }
    for name, arm in arms.items():
        engine, memory = arm["engine"], arm["memory"]
        compare(f"vLLM of '{name}'", engine["vllm_version"], rules.engine.version)
        compare(f"dtype of '{name}'", engine["dtype"], rules.target.dtype)
        if name in wanted:
            compare(f"K of '{name}'", engine["num_speculative_tokens"], wanted[name])
        if memory:
            compare(f"context of '{name}'", memory["context_tokens"], rules.context_tokens)
    if "baseline" in arms:
        compare("baseline", read_family(arms["baseline"]), rules.speculation.baseline_family)
    family = read_family(arms["candidate"])
    if family not in rules.families:
        found.append(f"family {family} is not one of {', '.join(rules.families)}")
    return found


def read_family(arm: Mapping[str, Any]) -> str:
    """Family of an arm: its draft's, else the row of the methods table its engine runs."""
    if arm["draft"]:
        return str(arm["draft"]["family"])
    method = arm["engine"]["method"]
    names = [name for name, row in METHODS.items() if row.vllm_method == method]
    return names[0] if names else str(method)
