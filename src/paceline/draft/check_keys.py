"""One config.json against the table of contracts: keys, types, ranges, defaults, no effect."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any

from paceline.draft.contracts import find_variant
from paceline.draft.key_names import find_misspelled, is_read_by_vllm
from paceline.draft.lengths import LENGTHS, check_lengths, is_length
from paceline.draft.rows import Key, Variant
from paceline.problems import Problem, keep_worst, show_value

__all__ = ["check_config_keys", "has_kind"]

_MAX_PROBLEMS = 60
_MAX_STRANGE = 500  # keys that are looked at one by one
_FILE = "config.json"
# Without architectures vLLM 0.31.0 builds these all the same; eagle3 and dflash it refuses.
_BY_MODEL_TYPE = ("draft_model", "medusa", "mtp")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def has_kind(value: Any, kind: str) -> bool:
    """True when a JSON value is of the kind that a key asks for; true and false are no numbers."""
    if kind == "int":
        return _is_int(value)
    if kind == "number":
        return _is_int(value) or isinstance(value, float)
    if kind == "float":  # transformers' config classes refuse a whole number here
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
    if kind == "labels":  # transformers makes whole numbers of the keys
        return isinstance(value, dict) and all(
            key.isascii() and key.isdigit() and isinstance(name, str) for key, name in value.items()
        )
    assert kind == "int or int list", kind
    return _is_int(value) or has_kind(value, "int list")


def check_config_keys(
    family: str, config: Mapping[str, Any], *, skip: Container[str] = ()
) -> list[Problem]:
    """Keys, types, ranges, architecture and model_type. skip: keys that other rules look at.

    A wrong value breaks the rule that its key names: cfg.value, or cfg.act, cfg.aux, cfg.missing.
    A problem of `cfg.unread` or `cfg.default` only tells; every other one refuses the folder.
    Needs no sizes, so it tells what is wrong even where no contract can be built.
    """
    variant = find_variant(family, config)
    if variant is None:
        return []
    problems = [
        *_check_architecture(family, variant, config),
        *_check_model_type(family, variant, config),
    ]
    problems += _check_object(variant.keys, config, "", (family, variant), skip)
    problems += _check_window(config)
    problems += check_lengths(config, variant.keys)
    for key, keys in variant.nested.items():
        inner = config.get(key)
        if isinstance(inner, Mapping):
            problems += _check_object(keys, inner, f"{key}.", (family, variant), skip)
    return keep_worst(problems, _MAX_PROBLEMS)


def _check_architecture(
    family: str, variant: Variant, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """`cfg.arch`."""
    names = config.get("architectures")
    ours = variant.architectures
    if "architectures" not in config and family in _BY_MODEL_TYPE:
        yield Problem(
            rule="cfg.default",
            file=_FILE,
            where="architectures",
            found="nothing",
            expected=f'["{ours[0]}"]',
            message="'architectures' names no class; vLLM takes the one of model_type",
            fix="State it.",
        )
    elif not (isinstance(names, list) and len(names) == 1 and names[0] in ours):
        yield Problem(
            rule="cfg.arch",
            file=_FILE,
            where="architectures",
            found=show_value(names),
            expected=f'["{ours[0]}"]',
            message=f"this is not the architecture of a draft of family {family}"
            if names
            else "names no class",
            fix="Another class would be built, or none.",
        )


def _check_model_type(
    family: str, variant: Variant, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """`cfg.model_type`."""
    # vLLM writes the model_type of old Medusa folders itself
    is_old_medusa = family == "medusa" and config.get("model_type") is None
    if config.get("model_type") not in variant.model_types and not is_old_medusa:
        yield Problem(
            rule="cfg.model_type",
            file=_FILE,
            where="model_type",
            found=show_value(config.get("model_type")),
            expected=" or ".join(variant.model_types),
            message="the model_type decides which config vLLM reads, and can change the method",
            fix=f'Write "model_type": "{variant.model_types[0]}".',
        )


def _check_window(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Qwen's config classes drop sliding_window unless use_sliding_window is true: a sliding layer
    then has full attention, or, in a DFlash draft, stops vLLM."""
    types, inner = config.get("layer_types"), config.get("dflash_config")
    own = isinstance(inner, Mapping) and inner.get("swa_window_size") is not None
    slides = isinstance(types, list) and "sliding_attention" in types
    if config.get("model_type") not in ("qwen2", "qwen3") or not slides or own:
        return
    if config.get("use_sliding_window") is not True:
        yield Problem(
            rule="cfg.unread",
            file=_FILE,
            where="sliding_window",
            found=show_value(config.get("sliding_window")),
            expected='"use_sliding_window": true',
            message="'sliding_window' has no effect: Qwen's config drops it unless"
            " use_sliding_window is true",
            fix='Write "use_sliding_window": true beside it.',
        )


def _check_object(
    keys: Mapping[str, Key],
    found: Mapping[str, Any],
    prefix: str,
    place: tuple[str, Variant],
    skip: Container[str],
) -> list[Problem]:
    problems: list[Problem] = []
    family, variant = place
    for key, rule in keys.items():
        where = f"{prefix}{key}"
        if where in skip:
            continue
        if key in found:
            problems += _check_value(where, found[key], rule)
        elif rule.required:
            problems.append(_absent(where, rule))
        elif rule.is_told and family != "mtp":  # an MTP head takes the target's value
            problems.append(_default(where, rule))
    absent = [key for key in keys if key not in found]
    strange = [key for key in found if key not in keys and key not in skip]
    if not prefix:
        strange = [key for key in strange if not (key in LENGTHS and is_length(found[key]))]
    if len(strange) > _MAX_STRANGE:
        problems.append(_too_many(prefix, len(strange)))
    for key in strange[:_MAX_STRANGE]:
        reason = variant.never.get(key, "") or _tell_effect(key, absent, family)
        problems.append(_unknown(f"{prefix}{key}", reason, family))
    return problems


def _absent(where: str, rule: Key) -> Problem:
    return Problem(
        rule="cfg.missing",
        file=_FILE,
        where=where,
        found="nothing",
        expected=_describe(rule),
        message=f"'{where}' is missing",
        fix="State it as trained: vLLM would take a default of another model.",
    )


def _default(where: str, rule: Key) -> Problem:
    return Problem(
        rule="cfg.default",
        file=_FILE,
        where=where,
        found="nothing",
        expected="the value of training",
        message=f"'{where}' is not stated; vLLM takes {rule.default}",
        fix="State it.",
    )


def _describe(rule: Key) -> str:
    if rule.choices:
        return " or ".join(show_value(choice) for choice in rule.choices)
    if rule.low is not None and rule.high is not None:
        return f"{rule.kind} from {rule.low:g} to {rule.high:,g}"
    return rule.kind


def _check_value(where: str, value: Any, rule: Key) -> Iterator[Problem]:
    """The value of a key that is there, by the first of its rules that it breaks."""
    if value is None:
        if rule.required:
            yield _tell_null(where, rule)
        elif not rule.nullable:
            yield _tell_type(
                where,
                value,
                rule,
                f"'{where}' is null, and vLLM stops at it while loading",
                "State the value of training, or remove the key.",
            )
    elif not has_kind(value, rule.kind):
        yield _tell_type(
            where,
            value,
            rule,
            f"'{where}' has the wrong type",
            "A number is written without quotes, true and false are not numbers.",
        )
    elif rule.choices and value not in rule.choices:
        yield _check_choice(where, value, rule)
    elif not _in_range(value, rule):
        yield _tell_value(where, value, rule)
    elif rule.unread and value not in rule.harmless:
        yield _tell_unread(where, value, rule)


def _tell_null(where: str, rule: Key) -> Problem:
    return Problem(
        rule="cfg.missing",
        file=_FILE,
        where=where,
        found=show_value(None),
        expected=_describe(rule),
        message=f"'{where}' is null",
        fix="State it as trained.",
    )


def _tell_type(where: str, value: Any, rule: Key, message: str, fix: str) -> Problem:
    """`json.type`."""
    return Problem(
        rule="json.type",
        file=_FILE,
        where=where,
        found=show_value(value),
        expected=_describe(rule),
        message=message,
        fix=fix,
    )


def _check_choice(where: str, value: Any, rule: Key) -> Problem:
    """`cfg.act` of an activation; of other keys with choices the rule that the key names."""
    return Problem(
        rule=rule.rule,
        file=_FILE,
        where=where,
        found=show_value(value),
        expected=_describe(rule),
        message=f"vLLM 0.31.0 does not build this value of '{where}'",
        fix="Train the draft with a value that it builds.",
    )


def _tell_value(where: str, value: Any, rule: Key) -> Problem:
    """`cfg.value`, or the rule that the key names."""
    return Problem(
        rule=rule.rule,
        file=_FILE,
        where=where,
        found=show_value(value),
        expected=_describe(rule),
        message=f"'{where}' is {show_value(value)}",
        fix="State the value of training.",
    )


def _tell_unread(where: str, value: Any, rule: Key) -> Problem:
    """`cfg.unread`."""
    return Problem(
        rule="cfg.unread",
        file=_FILE,
        where=where,
        found=show_value(value),
        expected="no such key",
        message=f"'{where}' has no effect: {rule.unread}",
        fix="Remove the key.",
    )


def _in_range(value: Any, rule: Key) -> bool:
    if rule.low is None or rule.high is None or isinstance(value, (bool, str, list, dict)):
        return True
    return math.isfinite(value) and rule.low <= value <= rule.high


def _too_many(prefix: str, count: int) -> Problem:
    return Problem(
        rule="cfg.unknown",
        file=_FILE,
        where=prefix.removesuffix("."),
        found=f"{count:,} keys",
        expected=f"at most {_MAX_STRANGE} keys that are not of the family",
        message=f"{count:,} keys are not of the family",
        fix="Write config.json again; a draft states a few dozen keys.",
    )


def _tell_effect(key: str, absent: list[str], family: str) -> str:
    """What a key that is not of the family may change; "" for one that vLLM reads nowhere."""
    is_folded = family == "medusa" and "num" in key and ("heads" in key or "layers" in key)
    if is_folded or is_read_by_vllm(key):
        return (
            f"'{show_value(key)}' is not a config key of family {family}, and vLLM 0.31.0 reads a"
            " key of that name: what it does to this draft was not checked"
        )
    meant = find_misspelled(key, absent)
    if meant is not None:
        return (
            f"'{show_value(key)}' is not a config key of family {family}; it is spelled like"
            f" '{meant}', which is not stated"
        )
    return ""


def _unknown(where: str, reason: str, family: str) -> Problem:
    """An error where a reason is given; without one the key only has no effect."""
    shown = show_value(where)
    if reason:
        rule = "q.method" if where == "quantization_config" else "cfg.unknown"
    else:
        rule = "cfg.unread"
        reason = f"'{shown}' has no effect: vLLM 0.31.0 reads no key of that name"
    return Problem(
        rule=rule,
        file=_FILE,
        where=shown,
        found=shown,
        expected=f"a key that vLLM reads for family {family}",
        message=reason,
        fix="Remove it.",
    )
