"""Rules about config.json: keys, types, and what vLLM would make of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.draft.eagle3 import EAGLE3_ARCHITECTURES, EAGLE3_CONFIG_KEYS, EAGLE3_MODEL_TYPES
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_code_keys", "check_config", "check_types"]

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
    "_name_or_path": "can point a loader at another place",
}
# Read by validate.quantization.
_OF_OTHERS = ("quantization_config", "compression_config")
_EAGLE_CONFIG_KEYS = {
    "eagle_aux_hidden_state_layer_ids": "int list",
    "use_aux_hidden_state": "bool",
    "norm_before_fc": "bool",
}
# null does not stand for "not stated" here: the config class or the model of vLLM stops at it.
_NEVER_NULL = (
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
    "use_cache",
    "target_hidden_size",
    "logit_scale",
)


def _find_code_keys(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(JSON path, key) of every key that can load code, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{path}.{key}" if path else key
            if key in _CODE_KEYS:
                yield here, key
            yield from _find_code_keys(inner, here)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_code_keys(inner, f"{path}[{index}]")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _has_type(value: Any, kind: str) -> bool:
    if kind == "int":
        return _is_int(value)
    if kind == "number":
        return _is_int(value) or isinstance(value, float)
    if kind == "float":  # the config class refuses a whole number here
        return isinstance(value, float)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "str":
        return isinstance(value, str)
    if kind == "object":
        return isinstance(value, dict)
    if kind == "str list":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == "int list":
        return isinstance(value, list) and all(_is_int(item) for item in value)
    return _is_int(value) or _has_type(value, "int list")


def check_code_keys(case: Case) -> Iterator[Finding]:
    """Keys of config.json and spec.json, at any depth, by which a loader can run code."""
    for document, content in ((_FILE, case.config), ("spec.json", case.scan.spec or {})):
        for path, key in _find_code_keys(content):
            yield finding(
                "cfg.auto_map",
                document,
                f"key '{key}' {_CODE_KEYS[key]}",
                where=path,
                found=key,
                expected="no such key",
                fix=f"Remove '{key}'.",
            )


def check_config(case: Case) -> Iterator[Finding]:
    """Rules that need config.json alone."""
    config = case.config
    yield from check_code_keys(case)
    yield from _check_keys(config)
    yield from check_types(config, EAGLE3_CONFIG_KEYS, "")
    yield from _check_nulls(config)
    eagle_config = config.get("eagle_config")
    if isinstance(eagle_config, dict):
        yield from check_types(eagle_config, _EAGLE_CONFIG_KEYS, "eagle_config.")
    yield from _check_architecture(config)
    yield from _check_norms(config)


def _check_keys(config: Mapping[str, Any]) -> Iterator[Finding]:
    special = {
        "speculators_config": (
            "cfg.spec",
            "the speculators format fixes method and target by itself",
            "Write a plain config.json; the method belongs in spec.json.",
        ),
    }
    nested = config.get("eagle_config")
    inner = nested if isinstance(nested, dict) else {}
    for key in config:
        if key in special:
            rule, message, fix = special[key]
            yield finding(rule, _FILE, message, where=key, found=key, expected="no key", fix=fix)
        elif key not in EAGLE3_CONFIG_KEYS and key not in (*_CODE_KEYS, *_OF_OTHERS):
            yield _unknown(key)
    for key in inner:
        if key not in _EAGLE_CONFIG_KEYS and key not in _CODE_KEYS:
            yield _unknown(f"eagle_config.{key}")


def _unknown(key: str) -> Finding:
    return finding(
        "cfg.unknown",
        _FILE,
        f"'{show_value(key)}' is not a config key of family eagle3",
        where=key,
        found=key,
        expected="a key that vLLM's EAGLE-3 draft reads",
        fix="Remove it.",
    )


def check_types(
    config: Mapping[str, Any], kinds: Mapping[str, str], prefix: str
) -> Iterator[Finding]:
    for key, kind in kinds.items():
        value = config.get(key)
        if value is not None and not _has_type(value, kind):
            yield finding(
                "json.type",
                _FILE,
                f"'{prefix}{key}' has the wrong type",
                where=f"{prefix}{key}",
                found=value,
                expected=kind,
                fix="A number is written without quotes, true and false are not numbers.",
            )


def _check_nulls(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key in _NEVER_NULL:
        if key in config and config[key] is None:
            yield finding(
                "json.type",
                _FILE,
                f"'{key}' is null, and vLLM stops at it while loading",
                where=key,
                found=None,
                expected=f"{EAGLE3_CONFIG_KEYS[key]}, or no key",
                fix="State the value of training, or remove the key.",
            )


def _check_architecture(config: Mapping[str, Any]) -> Iterator[Finding]:
    names = config.get("architectures")
    if names != [EAGLE3_ARCHITECTURES[0]] and names != [EAGLE3_ARCHITECTURES[1]]:
        yield finding(
            "cfg.arch",
            _FILE,
            "the architecture is not that of an EAGLE-3 draft" if names else "names no class",
            where="architectures",
            found=names,
            expected=f'["{EAGLE3_ARCHITECTURES[0]}"]',
            fix="Another class would be built, or none.",
        )
    if config.get("model_type") not in EAGLE3_MODEL_TYPES:
        yield finding(
            "cfg.model_type",
            _FILE,
            "the model_type can make vLLM run another method",
            where="model_type",
            found=config.get("model_type"),
            expected="llama",
            fix='Write "model_type": "llama".',
        )


def _check_norms(config: Mapping[str, Any]) -> Iterator[Finding]:
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
    elif _has_type(eps, "number") and not 1e-12 <= eps <= 1e-2:
        yield finding(
            "cfg.eps",
            _FILE,
            "rms_norm_eps is not a usual value",
            where="rms_norm_eps",
            found=eps,
            expected="1e-12 to 1e-2",
            fix="Copy the target's value.",
        )
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
    act = config.get("hidden_act")
    if act is not None and act != "silu":
        yield finding(
            "cfg.act",
            _FILE,
            "vLLM's Llama layer has one activation",
            where="hidden_act",
            found=act,
            expected="silu",
            fix="Train the draft with silu.",
        )
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
