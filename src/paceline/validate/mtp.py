"""Rules for an MTP head: its config is the target's, and vLLM 0.31.0 lets it own nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.draft import build_contract, build_mtp_config, check_tensors
from paceline.draft.mtp import MTP_ARCHITECTURES, MTP_CONFIG_KEYS, MTP_MODEL_TYPES
from paceline.errors import DraftError
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.config import check_code_keys, check_types
from paceline.validate.content import check_parameters
from paceline.validate.report import Finding, finding, from_problem

__all__ = ["check_mtp"]

_FILE = "config.json"
# Keys that change what the head computes; vLLM reads them in the target's config, not in this one.
_OF_TARGET = {
    "hidden_size": "cfg.hidden",
    "vocab_size": "cfg.vocab",
    "intermediate_size": "cfg.hidden",
    "num_attention_heads": "cfg.heads",
    "num_key_value_heads": "cfg.heads",
    "head_dim": "cfg.heads",
    "rope_parameters": "cfg.rope",
    "rms_norm_eps": "cfg.eps",
    "hidden_act": "cfg.act",
    "max_position_embeddings": "cfg.pos",
}
_INEXPRESSIBLE = {
    "quantization_config": "vLLM gives an MTP head the target's quantisation; one of its own cannot"
    " be expressed",
    "draft_vocab_size": "vLLM gives an MTP head the target's whole vocabulary; a smaller one cannot"
    " be expressed",
}


def check_mtp(case: Case) -> Iterator[Finding]:
    """Config, tensors, and the fit to the target."""
    config = case.config
    yield from check_code_keys(case)
    yield from _check_keys(config)
    yield from check_types(config, MTP_CONFIG_KEYS, "")
    for key, allowed, rule in (
        ("architectures", [*MTP_ARCHITECTURES], "cfg.arch"),
        ("model_type", MTP_MODEL_TYPES[0], "cfg.model_type"),
    ):
        if config.get(key) != allowed:
            yield finding(
                rule,
                _FILE,
                "this is not the config of a Qwen3.5 target, from which vLLM builds the MTP head",
                where=key,
                found=config.get(key),
                expected=show_value(allowed),
                fix="Copy the target's text config.",
            )
    try:
        contract = build_contract("mtp", config, case.target)
    except DraftError as problem:
        yield finding(
            "cfg.missing",
            _FILE,
            problem.what,
            where=problem.where.removeprefix("config.json: "),
            found="nothing, or no size",
            expected=problem.expected,
            fix=problem.fix or "State the target's own size.",
        )
    else:
        if case.scan.tensors_by_file:
            yield from map(from_problem, check_tensors(contract, case.scan.tensors_by_file))
    yield from check_parameters(case)
    yield from _check_target(case)


def _check_keys(config: dict[str, Any]) -> Iterator[Finding]:
    for key in config:
        if key not in MTP_CONFIG_KEYS:
            reason = _INEXPRESSIBLE.get(key)
            yield finding(
                "q.method" if key == "quantization_config" else "cfg.unknown",
                _FILE,
                reason or f"'{show_value(key)}' is not a config key of family mtp",
                where=key,
                found=key,
                expected="a key of the target's text config",
                fix="Remove it." if reason is None else "Remove it, or use the family eagle3.",
            )


def _check_target(case: Case) -> Iterator[Finding]:
    if case.target is None:
        return
    try:
        wanted = build_mtp_config(case.target)
    except DraftError as problem:
        yield finding("cfg.arch", _FILE, problem.what, expected=problem.expected, fix=problem.fix)
        return
    for key, rule in _OF_TARGET.items():
        found = case.config.get(key)
        if found != wanted.get(key):
            yield finding(
                rule,
                _FILE,
                f"{key} is {show_value(found)}, target '{case.target.name}' has"
                f" {show_value(wanted.get(key))}; vLLM builds the head by the target's",
                where=key,
                found=found,
                expected=show_value(wanted.get(key)),
                fix="Train the head for this target, or point --target at its own.",
                severity=None if rule == "cfg.pos" else "error",
            )
