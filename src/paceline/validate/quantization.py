"""Rules about quantization_config: what vLLM 0.31.0 would match, fuse and build from it.

Patterns are read by the small grammar of `patterns`; nothing of a stranger's is ever compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.draft import QUANTIZABLE, canonical_name
from paceline.draft.patterns import (
    MAX_LENGTH,
    MAX_PATTERNS,
    Step,
    matches_name,
    parse_pattern,
)
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_quantization", "check_uncovered_quantization"]

_FILE = "config.json"
_KEYS = ("quantization_config", "compression_config")
# Methods whose drafts were built, served and compared with the contract, by family.
_TESTED: dict[str, tuple[str, ...]] = dict.fromkeys(QUANTIZABLE, ("compressed-tensors",))
_ONLINE = (
    "online",
    "bitsandbytes",
    "experts_int8",
    "fbgemm_fp8",
    "fp_quant",
    "torchao",
    "hqq",
    "quanto",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
    "mxfp8",
)
_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant", "kv_cache_dtype")
_PATTERN_LISTS = (
    "ignore",
    "targets",
    "exclude",
    "exclude_modules",
    "ignored_layers",
    "modules_to_not_convert",
    "modules_in_block_to_quantize",
)
_PATTERN_KEYS = ("dynamic", "layer_quant_config", "extra_config", "quantized_layers")
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_PACKED = ("weight_packed", "qweight", "weight_scale", "weight_scale_inv", "scales")


def check_quantization(case: Case) -> Iterator[Finding]:
    """All of `q.*`; nothing without a quantization_config."""
    for key in _KEYS:
        value = case.config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            yield finding(
                "json.type",
                _FILE,
                f"'{key}' has the wrong type",
                where=key,
                found=value,
                expected="an object, or no key",
                fix="Copy it whole from the tool that quantized the weights.",
            )
            continue
        yield from _check_online(key, value)
        yield from _check_method(case, key, value)
        yield from _check_patterns(key, value)
        yield from _check_cache(key, value)
        yield from _check_groups(case, key, value)
        yield from _check_fused(case)


def check_uncovered_quantization(config: Mapping[str, Any]) -> Iterator[Finding]:
    """What holds for any quantization_config, known or not: patterns, cache, nothing on load."""
    for key in _KEYS:
        value = config.get(key)
        if isinstance(value, dict):
            yield from _check_online(key, value)
            yield from _check_patterns(key, value)
            yield from _check_cache(key, value)


def _check_online(key: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    """`q.online`."""
    method = value.get("quant_method")
    where = f"{key}.quant_method"
    load_time = [name for name in value if name.startswith("load_in_") and value[name]]
    if method in _ONLINE or load_time:
        yield finding(
            "q.online",
            _FILE,
            f"'{show_value(load_time[0] if load_time else method)}' quantizes while loading",
            where=where,
            found=method,
            expected="weights that are stored quantized",
            fix="Ship the quantized weights themselves, or plain bfloat16.",
        )


def _check_method(case: Case, key: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    """`q.method`. An MTP head takes the target's, which its own rules say."""
    method = value.get("quant_method")
    where = f"{key}.quant_method"
    tested = _TESTED.get(case.family or "", ())
    if case.family != "mtp" and method not in tested:
        yield finding(
            "q.method",
            _FILE,
            f"quantized drafts of family {case.family} are not accepted yet"
            if not tested
            else f"quantization method {show_value(method)} is not tested for family {case.family}",
            where=where,
            found=method,
            expected=" or ".join(tested) or "no quantization",
            fix="Ship bfloat16 weights.",
        )


def _list_patterns(value: Any, path: str) -> Iterator[tuple[str, str, bool]]:
    """(where, text, is_regex) of everything that vLLM matches against module names."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _list_patterns(item, f"{path}[{index}]")
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        here = f"{path}.{show_value(key, limit=40)}"
        if key in _PATTERN_LISTS and isinstance(inner, list):
            for index, item in enumerate(inner):
                if isinstance(item, str):
                    yield f"{here}[{index}]", item.removeprefix("re:"), item.startswith("re:")
        elif key in _PATTERN_KEYS and isinstance(inner, dict):
            for name in inner:
                bare = name.removeprefix("re:").removeprefix("-:").removeprefix("+:")
                yield here, bare, key == "dynamic" or bare != name
            yield from _list_patterns(list(inner.values()), here)
        else:
            yield from _list_patterns(inner, here)


def _check_patterns(key: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    """`q.regex`: number, length and grammar. One finding for each, and at most five."""
    told = 0
    for number, (where, text, is_regex) in enumerate(_list_patterns(value, key), start=1):
        if number > MAX_PATTERNS:
            yield finding(
                "q.regex",
                _FILE,
                f"there are more than {MAX_PATTERNS} module patterns",
                where=where,
                found=f"{number} or more",
                expected=f"at most {MAX_PATTERNS}",
                fix="One pattern such as re:.*self_attn.* stands for many modules.",
            )
            return
        if parse_pattern(text, is_regex=is_regex) is None and told < 5:
            told += 1
            yield finding(
                "q.regex",
                _FILE,
                f"pattern '{show_value(text, limit=60)}' could hang the loader"
                if is_regex
                else f"'{show_value(text, limit=60)}' is not a module name",
                where=where,
                found=text,
                expected=f"a module name, or re: and a small pattern, at most {MAX_LENGTH}"
                " characters",
                fix="Name the modules, or use re: with letters, digits, '_', '-', '\\.', '.*',"
                " '\\d', '[0-9]', '^' and '$' only; no groups, no '|'.",
            )


def _check_cache(key: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    """`q.nokv`."""
    for name in _CACHE_KEYS:
        if value.get(name) is not None:
            yield finding(
                "q.nokv",
                _FILE,
                f"'{name}' sets the dtype of the key-value cache",
                where=f"{key}.{name}",
                found=value[name],
                expected="null, or no key",
                fix="Remove it; the operator chooses with kv_cache_dtype.",
            )


def _list_groups(value: Mapping[str, Any]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(group size, targets) of every scheme that states one."""
    groups = value.get("config_groups")
    schemes = (
        [item for item in groups.values() if isinstance(item, dict)]
        if isinstance(groups, dict)
        else []
    )
    for scheme in (*schemes[:16], value):
        weights = scheme.get("weights") if scheme is not value else value
        size = weights.get("group_size") if isinstance(weights, dict) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            targets = scheme.get("targets")
            names = targets if isinstance(targets, list) else ["Linear"]
            yield size, tuple(name for name in names[:MAX_PATTERNS] if isinstance(name, str))


def _check_groups(case: Case, key: str, value: Mapping[str, Any]) -> Iterator[Finding]:
    """`q.group`: input widths of the contract's matrices that are stored packed."""
    if case.contract is None:
        return
    packed = {name for name, is_packed in _list_storage(case).items() if is_packed}
    for size, targets in _list_groups(value):
        patterns = _parse_targets(targets)
        for module in sorted(packed):
            rule = case.contract.tensors.get(f"{canonical_name(module)}.weight")
            if rule is None or len(rule.shape) != 2 or rule.shape[1] % size == 0:
                continue
            if "Linear" in targets or any(matches_name(steps, module) for steps in patterns):
                yield finding(
                    "q.group",
                    _FILE,
                    f"group_size {size} does not divide the {rule.shape[1]} inputs of '{module}'",
                    where=key,
                    found=size,
                    expected=f"a divisor of {rule.shape[1]}",
                    fix="Use a group size that divides the width, such as 32 or 64, or -1 for"
                    " whole rows.",
                )
                break


def _parse_targets(targets: tuple[str, ...]) -> list[tuple[Step, ...]]:
    parsed = (
        parse_pattern(target.removeprefix("re:"), is_regex=target.startswith("re:"))
        for target in targets
    )
    return [steps for steps in parsed if steps is not None]


def _list_storage(case: Case) -> dict[str, bool]:
    """Module -> whether its weight is stored packed, from the headers: they are the truth."""
    storage: dict[str, bool] = {}
    for tensors in case.scan.tensors_by_file.values():
        for name in tensors:
            module, _, part = name.rpartition(".")
            if part == "weight":
                storage.setdefault(module, False)
            elif part in _PACKED:
                storage[module] = True
    return storage


def _check_fused(case: Case) -> Iterator[Finding]:
    """`q.fused`: members of one fused matrix are all packed or all plain."""
    storage = _list_storage(case)
    told = set()
    for module in storage:
        parent, _, leaf = module.rpartition(".")
        for members in _FUSED:
            if leaf not in members or (parent, members) in told:
                continue
            told.add((parent, members))
            present = {name: storage.get(f"{parent}.{name}") for name in members}
            kinds = {kind for kind in present.values() if kind is not None}
            if len(kinds) > 1:
                parts = ", ".join(
                    f"{name} {'packed' if kind else 'plain'}"
                    for name, kind in present.items()
                    if kind is not None
                )
                yield finding(
                    "q.fused",
                    _FILE,
                    f"'{show_value(parent)}' mixes quantized and plain parts: {parts}",
                    where=parent,
                    found=parts,
                    expected="one scheme for all of them: vLLM fuses them into one matrix",
                    fix="Quantize all members of the group, or none.",
                )
