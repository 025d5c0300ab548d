"""Rules about config.json: keys, types, and what vLLM would make of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.draft import check_config_keys, find_variant
from paceline.draft.envelope import is_envelope
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding, from_problem

__all__ = ["check_code_keys", "check_config", "check_keys"]

_FILE = "config.json"
_CODE_KEYS = {
    "auto_map": "can make a loader import code",
    "custom_pipelines": "can make a loader import code",
    "trust_remote_code": "asks to run remote code",
    "_attn_implementation_internal": "can fetch and run a kernel",
    "_attn_implementation": "can fetch and run a kernel",
    "attn_implementation": "can fetch and run a kernel",
    "kernels": "can fetch and run a kernel",
    "use_kernels": "can fetch and run a kernel",
    "auto_class": "names a class to import",
    "code_revision": "names remote code",
    "custom_objects": "names classes to import",
    "custom_generate": "can make a loader import code",
    "quantizer": "names a class to import",
    "quantizer_class": "names a class to import",
    "_name_or_path": "can point a loader at another place",
}
# a kernel of the Hub is named owner/name, a built-in one by a word
_ATTENTION = ("_attn_implementation", "attn_implementation")
_PLAIN_WORD = re.compile(r"[a-z0-9_]{1,32}")
_PLACE = "_name_or_path"  # exporters leave the name of a model there, which is no harm
# Read by validate.quantization.
_OF_OTHERS = ("quantization_config", "compression_config")
_SPECULATORS = "speculators_config"  # read by validate.speculators
# What speculators itself leaves in an envelope: the class of its own config, in no file beside it.
_OWN_CLASS = re.compile(r"[A-Za-z0-9_.]{1,80}Config")


def _find_code_keys(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(JSON path, key) of every key that can load code, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{path}.{key}" if path else key
            if key in _CODE_KEYS and (key != _PLACE or _leads_away(inner)):
                yield here, key
            yield from _find_code_keys(inner, here)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_code_keys(inner, f"{path}[{index}]")


def _leads_away(value: Any) -> bool:
    """A path or an address, in place of the plain name of a model."""
    if value is None:
        return False
    return (
        not isinstance(value, str)
        or value.startswith(("/", ".", "~"))
        or any(part in value for part in ("://", "\\", "..", "\n"))
    )


def _names_own_class(value: Any) -> bool:
    """{"": "eagle3.Eagle3SpeculatorConfig"}: no auto class, no repository, no path."""
    name = value.get("") if isinstance(value, dict) and len(value) == 1 else None
    return isinstance(name, str) and _OWN_CLASS.fullmatch(name) is not None


def check_code_keys(case: Case) -> Iterator[Finding]:
    """Keys of config.json and spec.json, at any depth, by which a loader can run code."""
    config = case.scan.raw_config or {}
    in_envelope = is_envelope(config)
    for document, content in ((_FILE, config), ("spec.json", case.scan.spec or {})):
        for path, key in _find_code_keys(content):
            if path == "auto_map" and in_envelope and _names_own_class(config[key]):
                yield finding(
                    "cfg.auto_map",
                    document,
                    "key 'auto_map' names a class of the speculators package; vLLM 0.31.0 reads"
                    " nothing of an envelope by it",
                    where=path,
                    found=key,
                    expected="no such key",
                    fix="Remove it.",
                    severity="warning",
                )
                continue
            harmless = _tell_harmless(case, path, key)
            yield finding(
                "cfg.auto_map",
                document,
                f"key '{key}' {_CODE_KEYS[key]}" + (f"; {harmless}" if harmless else ""),
                where=path,
                found=key,
                expected="no such key",
                fix=f"Remove '{key}'.",
                severity="warning" if harmless else None,
            )


def _tell_harmless(case: Case, path: str, key: str) -> str:
    """Why vLLM 0.31.0 loads no code by this key; "" where that was not seen, and in a contest."""
    value = (case.scan.raw_config or {}).get(key)
    if case.is_contest:
        return ""
    if key == _PLACE:
        return "vLLM 0.31.0 looks nowhere by it" if isinstance(value, str) else ""
    if not case.scan.is_by_hand or path != key:
        return ""
    if key == "auto_map":
        return "vLLM 0.31.0 imports nothing by it unless it is started with trust_remote_code"
    is_plain = isinstance(value, str) and _PLAIN_WORD.fullmatch(value) is not None
    return "vLLM 0.31.0 chooses its attention itself" if key in _ATTENTION and is_plain else ""


def check_config(case: Case) -> Iterator[Finding]:
    """Rules that need config.json alone: the table of contracts, and what only EAGLE-3 has."""
    yield from check_code_keys(case)
    for item in check_keys(case, "eagle3"):
        # told as cfg.tie, cfg.eps, cfg.pos and cfg.rope, with what they mean for this family
        if item.rule == "cfg.default":
            continue
        if (item.rule, item.where) != ("cfg.unread", "tie_word_embeddings"):
            yield item
    yield from _check_epsilon(case.config)
    yield from _check_residual(case.config)
    yield from _check_tie(case.config)


def check_keys(case: Case, family: str) -> Iterator[Finding]:
    """Keys, types, ranges, architecture and model_type, as the table of contracts has them."""
    variant = find_variant(family, case.config)
    never = variant.never if variant is not None else {}
    skip = {*_CODE_KEYS, *_OF_OTHERS, _SPECULATORS} - {*never, _PLACE}
    yield from map(from_problem, check_config_keys(family, case.config, skip=skip))


def _check_epsilon(config: Mapping[str, Any]) -> Iterator[Finding]:
    """`cfg.eps`; a value that is none is refused with the other keys."""
    eps = config.get("rms_norm_eps")
    if eps is None:
        yield finding(
            "cfg.eps",
            _FILE,
            "rms_norm_eps is not stated; vLLM takes 1e-06",
            where="rms_norm_eps",
            found="nothing",
            expected="the value of training",
            fix="State it.",
            severity="warning",
        )
    elif isinstance(eps, float) and 1e-2 < eps <= 1.0:
        yield finding(
            "cfg.eps",
            _FILE,
            "rms_norm_eps is unusually large",
            where="rms_norm_eps",
            found=eps,
            expected="1e-12 to 1e-2",
            fix="Right only if training used it.",
            severity="warning",
        )


def _check_residual(config: Mapping[str, Any]) -> Iterator[Finding]:
    """`cfg.residual`."""
    if config.get("norm_before_residual") is None:
        yield finding(
            "cfg.residual",
            _FILE,
            "norm_before_residual is not stated; vLLM takes false here, and true for a draft in"
            " the speculators format",
            where="norm_before_residual",
            found="nothing",
            expected="true or false, as in training",
            fix="State it; the wrong value only shows as lower acceptance.",
        )


def _check_tie(config: Mapping[str, Any]) -> Iterator[Finding]:
    """`cfg.tie`."""
    if config.get("tie_word_embeddings") is True:
        yield finding(
            "cfg.tie",
            _FILE,
            "tie_word_embeddings has no effect: vLLM never ties an EAGLE-3 draft's own head",
            where="tie_word_embeddings",
            found="true",
            expected="false",
            fix="Write false; leave lm_head.weight out to borrow the target's head.",
        )
