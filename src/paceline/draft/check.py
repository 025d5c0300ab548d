"""One config and one set of tensor headers against their contract: the only check there is.

vLLM 0.31.0 loads an eagle3 draft without its fc or down_proj silently, and skips every name that
it does not know in a medusa or mtp folder; `docs/results/contracts.md` counts such cases.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any

from paceline.draft.contracts import Contract, find_variant
from paceline.draft.rows import Key, TensorRule, Variant
from paceline.errors import DraftError
from paceline.problems import Problem, show_value
from paceline.safetensors_header import TensorInfo

__all__ = ["check_config_keys", "check_tensors", "explain_shape", "has_kind"]

_MAX_PROBLEMS = 60
_FILE = "config.json"


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
    problems = list(_check_names(family, variant, config))
    problems += _check_object(variant.keys, config, "", (family, variant), skip)
    problems += _check_window(config)
    for key, keys in variant.nested.items():
        inner = config.get(key)
        if isinstance(inner, Mapping):
            problems += _check_object(keys, inner, f"{key}.", (family, variant), skip)
    return problems[:_MAX_PROBLEMS]


def _check_names(family: str, variant: Variant, config: Mapping[str, Any]) -> Iterator[Problem]:
    names = config.get("architectures")
    ours = variant.architectures
    if not (isinstance(names, list) and len(names) == 1 and names[0] in ours):
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
    for key in found:
        if key not in keys and key not in skip:
            problems.append(_unknown(f"{prefix}{key}", variant.never.get(key, ""), family))
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
    def problem(rule_id: str, message: str, fix: str) -> Problem:
        return Problem(
            rule=rule_id,
            file=_FILE,
            where=where,
            found=show_value(value),
            expected=_describe(rule),
            message=message,
            fix=fix,
        )

    if value is None:
        if rule.required:
            yield problem("cfg.missing", f"'{where}' is null", "State it as trained.")
        elif not rule.nullable:
            yield problem(
                "json.type",
                f"'{where}' is null, and vLLM stops at it while loading",
                "State the value of training, or remove the key.",
            )
    elif not has_kind(value, rule.kind):
        yield problem(
            "json.type",
            f"'{where}' has the wrong type",
            "A number is written without quotes, true and false are not numbers.",
        )
    elif rule.choices and value not in rule.choices:
        yield problem(
            rule.rule,
            f"vLLM 0.31.0 does not build this value of '{where}'",
            "Train the draft with a value that it builds.",
        )
    elif not _in_range(value, rule):
        yield problem(
            rule.rule, f"'{where}' is {show_value(value)}", "State the value of training."
        )
    elif rule.unread and value not in rule.harmless:
        yield problem("cfg.unread", f"'{where}' has no effect: {rule.unread}", "Remove the key.")


def _in_range(value: Any, rule: Key) -> bool:
    if rule.low is None or rule.high is None or isinstance(value, (bool, str, list, dict)):
        return True
    return math.isfinite(value) and rule.low <= value <= rule.high


def _unknown(where: str, reason: str, family: str) -> Problem:
    shown = show_value(where)
    return Problem(
        rule="q.method" if where == "quantization_config" else "cfg.unknown",
        file=_FILE,
        where=shown,
        found=shown,
        expected="a key that vLLM reads for this family",
        message=reason or f"'{shown}' is not a config key of family {family}",
        fix="Remove it.",
    )


def check_tensors(
    contract: Contract, files: Mapping[str, Mapping[str, TensorInfo]]
) -> list[Problem]:
    """Names, shapes and dtypes of all tensors against the contract. `files`: file -> its tensors.

    A problem of rule `ten.unread` only tells; every other one refuses the folder.
    """
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    present = {contract.canonical(name) for tensors in files.values() for name in tensors}
    try:
        rules = contract.rules_for(present)
    except DraftError as problem:
        return [_unknown_scheme(problem)]
    main_file = min(files, default="model.safetensors")
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            canonical = contract.canonical(name)
            if canonical in seen:
                problems.append(_twice(file, name, seen[canonical]))
                continue
            seen[canonical] = f"{file}: {name}"
            rule = rules.get(canonical)
            if rule is None:
                problems.append(_extra(file, name, contract))
            else:
                problems.extend(_check_one(file, tensor, canonical, rule))
    for name, rule in rules.items():
        if rule.required and name not in seen:
            problems.append(_missing(main_file, name, rule))
    return problems[:_MAX_PROBLEMS]


def _unknown_scheme(problem: DraftError) -> Problem:
    where = problem.where.removeprefix(f"{_FILE}: ")
    return Problem(
        rule="q.group" if where.endswith("group_size") else "q.method",
        file=_FILE,
        where=where,
        found=problem.what,
        expected=problem.expected,
        message=problem.what,
        fix=problem.fix or "Choose a group size that divides the width.",
    )


def _check_one(file: str, tensor: TensorInfo, canonical: str, rule: TensorRule) -> list[Problem]:
    problems = []
    if rule.unread:
        problems.append(
            Problem(
                rule="ten.unread",
                file=file,
                where=tensor.name,
                found=f"{tensor.num_bytes:,} bytes",
                expected="no such tensor",
                message=f"tensor '{tensor.name}' has no effect: {rule.unread}",
                fix="Leave it out.",
            )
        )
    if tensor.shape != rule.shape and tensor.shape not in rule.also:
        problems.append(
            Problem(
                rule="ten.shape",
                file=file,
                where=tensor.name,
                found=str(list(tensor.shape)),
                expected=str(list(rule.shape)),
                message=explain_shape(canonical, tensor.shape, rule),
                fix="Make config.json state the sizes that the weights were trained with.",
            )
        )
    if tensor.dtype not in rule.dtypes:
        problems.append(
            Problem(
                rule="ten.dtype",
                file=file,
                where=tensor.name,
                found=tensor.dtype,
                expected=" or ".join(rule.dtypes),
                message=f"tensor '{tensor.name}' has dtype {tensor.dtype}",
                fix=f"Save it as {rule.dtypes[0]}.",
            )
        )
    return problems


def explain_shape(name: str, shape: tuple[int, ...], rule: TensorRule) -> str:
    """One clause that says which size disagrees with which config key."""
    if len(shape) != len(rule.shape):
        return f"tensor '{name}' has {len(shape)} dimensions, the config implies {len(rule.shape)}"
    clauses = []
    for part, found, wanted, why in zip(
        ("rows", "columns"), shape, rule.shape, (rule.rows, rule.columns), strict=False
    ):
        if found != wanted:
            clauses.append(
                f"{part} {found}, config implies {wanted}" + (f" ({why})" if why else "")
            )
    if name == "fc.weight" and shape[1] != rule.shape[1] and " tapped layers x " in rule.columns:
        num_ids, width = rule.columns.split(" tapped layers x ")
        if shape[1] % int(width) == 0:
            return (
                f"fc expects {shape[1] // int(width)} x {width} inputs, got {num_ids} ids"
                " of tapped target layers"
            )
    return f"tensor '{name}' has {'; '.join(clauses)}"


def _twice(file: str, name: str, earlier: str) -> Problem:
    return Problem(
        rule="idx.complete",
        file=file,
        where=name,
        found=f"also in {earlier}",
        expected="each tensor once",
        message=f"tensor '{name}' is there twice",
        fix="Keep one copy; 'layers.0.' and 'midlayer.' are the same layer.",
    )


def _extra(file: str, name: str, contract: Contract) -> Problem:
    bare = contract.canonical(name.removeprefix("model."))
    if bare != name and bare in contract.tensors:
        fix = f"Name it '{bare}': vLLM adds 'model.' itself."
    elif contract.family == "mtp" and name.endswith(
        ("embed_tokens.weight", "lm_head.weight", "d2t")
    ):
        fix = "Remove it: vLLM gives an MTP head the target's embeddings, output and vocabulary."
    elif name == "d2t":
        fix = "Remove it: with the full vocabulary vLLM has no place for it and refuses the file."
    elif name == "mask_hidden":
        fix = "Remove it, or state mask_token_id: without one vLLM skips it and drafts in sequence."
    else:
        fix = "Remove it, or set the config key that makes vLLM use it."
    return Problem(
        rule="ten.extra",
        file=file,
        where=name,
        found=name,
        expected="only tensors that vLLM uses for this config",
        message=f"tensor '{name}' has no place in this {contract.family} draft",
        fix=fix,
    )


def _missing(file: str, name: str, rule: TensorRule) -> Problem:
    return Problem(
        rule="ten.missing",
        file=file,
        where=name,
        found="nothing",
        expected=f"{rule.dtypes[0]} {list(rule.shape)}",
        message=rule.if_missing or f"tensor '{name}' is missing; vLLM would serve random numbers",
        fix=rule.fix_missing or "Export the draft again with all of its tensors.",
    )
