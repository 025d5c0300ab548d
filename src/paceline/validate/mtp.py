"""Rules for an MTP head: its config is the target's, and vLLM 0.31.0 lets it own nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.draft import build_contract, build_mtp_config, check_tensors
from paceline.errors import DraftError
from paceline.problems import show_value
from paceline.safetensors_header import TensorInfo
from paceline.validate.case import Case
from paceline.validate.config import check_code_keys, check_keys
from paceline.validate.content import check_parameters
from paceline.validate.decoder import check_dtype
from paceline.validate.report import Finding, finding, from_problem

__all__ = ["check_mtp", "find_idle_layers"]

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


def find_idle_layers(case: Case) -> str | None:
    """A head of several layers that is served as it is meant, in words: at K = 1, beside a target
    of as many. vLLM 0.31.0 loads them all and runs the first alone at every step."""
    layers = case.config.get("mtp_num_hidden_layers")
    if case.family != "mtp" or case.num_speculative_tokens != 1:
        return None
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 2:
        return None
    if case.target is not None and case.target.num_mtp_layers != layers:
        return None
    return f"an MTP head of {layers} layers at K = 1, of which vLLM runs the first"


def check_mtp(case: Case) -> Iterator[Finding]:
    """Config, tensors, and the fit to the target."""
    config = case.config
    yield from check_code_keys(case)
    yield from check_keys(case, "mtp")
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
            files, num_beside = _take_head(case)
            yield from map(from_problem, check_tensors(contract, files))
            if num_beside:
                yield _tell_beside(num_beside)
    yield from check_parameters(case)
    yield from check_dtype(case)
    yield from _check_target(case)


def _take_head(case: Case) -> tuple[dict[str, dict[str, TensorInfo]], int]:
    """(tensors by file, number left out): by hand a whole target may be named for its head, and
    vLLM skips the names of its other layers."""
    files = case.scan.tensors_by_file
    if not case.scan.is_by_hand or case.is_contest:
        return files, 0
    taken = {
        file: {name: tensor for name, tensor in held.items() if _is_looked_at(name)}
        for file, held in files.items()
    }
    return taken, sum(map(len, files.values())) - sum(map(len, taken.values()))


def _is_looked_at(name: str) -> bool:
    return name.startswith("mtp.") or "embed_tokens" in name or "lm_head" in name


def _tell_beside(number: int) -> Finding:
    return finding(
        "ten.unread",
        "",
        f"{number} tensors beside the head have no effect: vLLM 0.31.0 skips them",
        found=f"{number} tensors",
        expected="the head alone",
        fix="Fine by hand; a draft folder holds the head alone.",
        severity="note",
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
