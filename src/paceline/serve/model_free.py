"""What a plan says for methods without weights: `ngram` and `suffix`.

Paceline's own proposers run through vLLM's `custom_class` and draft exactly K tokens on every step:
verification keeps one shape, and a recurrent (hybrid) state never meets an empty draft (vLLM
#39273). `"proposer": "vllm"` in spec.json asks for vLLM's own variable-length method instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import PlanError
from paceline.methods import METHODS

if TYPE_CHECKING:
    from paceline.serve.plan import Plan

__all__ = [
    "PROPOSERS",
    "build_model_free",
    "check_model_free",
    "is_model_free",
    "read_proposer",
    "read_settings",
]

PROPOSERS = {
    "ngram": "paceline.serve.proposers.classes.NgramProposer",
    "suffix": "paceline.serve.proposers.classes.SuffixProposer",
}
_OURS, _VLLM = "paceline", "vllm"
_MAX_CACHE_TOKENS = 2**26
_STEP_TOKENS = 2048  # the smallest max_num_batched_tokens that vLLM 0.31.0 chooses by itself
_BOUNDS = ("prompt_lookup_min", "prompt_lookup_max")
_DEFAULT_BOUNDS = {_OURS: (1, 5), _VLLM: (5, 5)}  # vLLM's own choice is 5/5
_SUFFIX_KEYS = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
# (method, proposer) -> settings that have an effect
_SETTINGS: dict[tuple[str, str], tuple[str, ...]] = {
    ("ngram", _OURS): _BOUNDS,
    ("ngram", _VLLM): _BOUNDS,
    ("suffix", _OURS): ("cache_tokens",),
    ("suffix", _VLLM): _SUFFIX_KEYS,
}
_ALWAYS = ("family", "num_speculative_tokens", "proposer")


def is_model_free(method: str) -> bool:
    return method in PROPOSERS


def build_model_free(
    method: str,
    spec: Mapping[str, Any],
    k: int,
    *,
    bounds: tuple[int | None, int | None],
    where: str,
    notes: list[str],
) -> dict[str, Any]:
    """Engine arguments: speculative_config and, for our proposers, their settings.

    spec: spec.json, empty where the method was only named; bounds: n-gram minimum and maximum that
    go before it. Raises PlanError for a setting without effect.
    """
    proposer = spec.get("proposer", _OURS)
    if proposer not in (_OURS, _VLLM):
        raise PlanError(
            f"proposer {proposer!r} is unknown", where=where, expected=f"{_OURS} or {_VLLM}"
        )
    known = _SETTINGS[method, proposer]
    without = sorted(set(spec) - {*known, *_ALWAYS})
    if without:
        raise PlanError(
            f"key {without[0]!r} has no effect for family {method!r} with proposer {proposer!r}",
            where=where,
            expected=f"only {', '.join((*_ALWAYS, *known))}",
            fix="Remove it.",
        )
    settings = {name: spec[name] for name in known if name in spec}
    if method == "ngram":
        settings = dict(zip(_BOUNDS, _read_bounds(spec, bounds, proposer, notes), strict=True))
    elif proposer == _OURS:
        settings.setdefault("cache_tokens", 0)
        if settings["cache_tokens"]:
            notes.append(
                f"the suffix cache keeps {settings['cache_tokens']} tokens of finished answers:"
                " later requests are drafted from earlier ones, so the order of prompts matters"
            )
    config: dict[str, Any] = {
        "method": METHODS[method].vllm_method,
        "num_speculative_tokens": k,
        "rejection_sample_method": "standard",
        "draft_sample_method": "greedy",
    }
    if proposer == _VLLM:
        return {"speculative_config": {**config, **settings}}
    config |= {"method": "custom_class", "model": PROPOSERS[method]}
    return {"speculative_config": config, "additional_config": {"paceline": settings}}


def _read_bounds(
    spec: Mapping[str, Any],
    bounds: tuple[int | None, int | None],
    proposer: str,
    notes: list[str],
) -> tuple[Any, Any]:
    low, high = (
        given if given is not None else spec.get(name)
        for given, name in zip(bounds, _BOUNDS, strict=True)
    )
    if low is None and high is None:
        low, high = _DEFAULT_BOUNDS[proposer]
        notes.append(f"neither n-gram bound is set: effective min/max is {low}/{high}")
    elif low is None or high is None:
        low = high = low if low is not None else high
        notes.append(f"one n-gram bound is set: effective min/max is {low}/{high}")
    return low, high


def read_settings(plan: Plan) -> Mapping[str, Any]:
    """The settings of a model-free plan, whoever proposes."""
    own: Mapping[str, Mapping[str, Any]] = plan.engine_args.get("additional_config") or {}
    settings: Mapping[str, Any] = own.get("paceline") or plan.engine_args["speculative_config"]
    return settings


def read_proposer(plan: Plan) -> str | None:
    """The class that vLLM is to load as the proposer; None where it is one of vLLM's own."""
    config: Mapping[str, Any] = plan.engine_args.get("speculative_config") or {}
    return str(config["model"]) if config.get("method") == "custom_class" else None


def check_model_free(plan: Plan) -> None:
    """Raises PlanError where the settings, or vLLM's own proposer on this target, cannot work."""
    config = plan.engine_args["speculative_config"]
    padded = config["method"] == "custom_class"
    if plan.target.is_hybrid and not padded:
        raise PlanError(
            f"vLLM's own {plan.method!r} corrupts the answers of a hybrid target: a step without a"
            " draft reads a stale recurrent state (vLLM #39273, unfixed in 0.31.0)",
            where=plan.target.name,
            fix='Leave "proposer" out of spec.json: Paceline\'s own drafts K tokens on every step.',
        )
    if plan.target.is_hybrid:
        _check_budget(plan)
    settings = read_settings(plan)
    if plan.method == "ngram":
        _check_bounds(plan, settings)
    elif padded:
        _check_count("cache_tokens", settings["cache_tokens"], 0, _MAX_CACHE_TOKENS)


def _check_budget(plan: Plan) -> None:
    """A full batch must fit one step: vLLM would leave the last request without its draft."""
    needed = plan.max_num_seqs * (plan.num_speculative_tokens + 1)
    if needed > _STEP_TOKENS:
        raise PlanError(
            f"{plan.max_num_seqs} sequences of K + 1 tokens need {needed} tokens a step: the last"
            " ones would lose their drafts and read a stale recurrent state (vLLM #39273)",
            where="max_num_seqs",
            expected=f"at most {_STEP_TOKENS} tokens a step on a hybrid target",
            fix="Lower max_num_seqs or K.",
        )


def _check_bounds(plan: Plan, settings: Mapping[str, Any]) -> None:
    low, high = (settings[name] for name in _BOUNDS)
    for name, value in zip(_BOUNDS, (low, high), strict=True):
        _check_count(name, value, 1, None)
    if low > high:
        raise PlanError(
            f"the n-gram minimum {low} is above the maximum {high}",
            where="prompt_lookup_min",
            expected="minimum <= maximum",
        )
    if high >= plan.max_model_len:
        raise PlanError(
            f"the n-gram maximum {high} is not shorter than max_model_len = {plan.max_model_len}",
            where="prompt_lookup_max",
        )


def _check_count(name: str, value: Any, low: int, high: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        top = "" if high is None else f" and at most {high}"
        raise PlanError(
            f"is {value!r}", where=name, expected=f"a whole number of at least {low}{top}"
        )
