"""A 16-bit MTP head inside a quantized target: vLLM 0.31.0 builds the head by the target's config.

Source of the facts: vllm/model_executor/models/qwen3_5_mtp.py and layers/quantization of 0.31.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.draft.patterns import MAX_PATTERNS, matches_name, parse_pattern
from paceline.problems import show_value
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding
from paceline.validate.target_storage import check_target_storage

__all__ = ["check_target_quantization"]

_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
_EXACT = ("compressed-tensors", "auto_gptq", "gptq", "gptq_marlin")
_PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def check_target_quantization(case: Case) -> Iterator[Finding]:
    """`q.target`: plain matrices of the head that the target's quantization would pack, and what
    the target itself stores otherwise than it says."""
    settings = _find_settings(case)
    if case.target is None or settings is None:
        return
    yield from check_target_storage(case, settings)
    if case.family != "mtp":
        return
    plain = [
        name.removesuffix(".weight")
        for tensors in case.scan.tensors_by_file.values()
        for name, tensor in tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    ]
    method = settings.get("quant_method")
    entries = _list_entries(settings)
    unread = [text for text, is_regex in entries if parse_pattern(text, is_regex=is_regex) is None]
    taken = [name for name in plain if not _is_left_alone(name, method, entries)]
    if method == "modelopt_fp4":  # whose fc vLLM leaves alone by itself
        taken = [name for name in taken if name != "mtp.fc"]
    where = f"target '{case.target.name}': quantization_config"
    if taken:
        yield finding(
            "q.target",
            "config.json",
            f"the target is quantized ({show_value(method)}) and does not leave alone"
            f" {len(taken)} matrices that the head stores in 16 bits: {', '.join(taken[:12])}",
            where=where,
            found=", ".join(taken[:12]),
            expected="every plain matrix of the head on the target's list of ignored modules",
            fix="Add 're:^mtp.*' to the target's ignore list, or quantize the head with the target:"
            " vLLM would build packed layers and fill them with nothing.",
            severity="warning" if unread else None,
        )
    parts = [text for text, is_regex in entries if not is_regex and text.endswith(_PARTS)]
    if not taken and any(text.startswith("mtp.") for text in parts):
        yield finding(
            "q.target",
            "config.json",
            "the target ignores the head's matrices by their parts (q_proj, k_proj, v_proj, ...);"
            " vLLM fuses them and leaves the whole alone only if all parts are named",
            where=where,
            found=", ".join(text for text in parts if text.startswith("mtp.")),
            expected="all parts, or one pattern such as re:^mtp.*",
            fix="Right as it stands; one pattern is safer.",
            severity="warning",
        )


def _find_settings(case: Case) -> Mapping[str, Any] | None:
    """The target's quantization_config, at the top or below text_config."""
    outer = case.target.config if case.target is not None else {}
    nested = outer.get("text_config")
    for level in (outer, nested if isinstance(nested, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(level.get(key), dict):
                found: dict[str, Any] = level[key]
                return found
    return None


def _list_entries(settings: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(text, is_regex) of everything that the config leaves alone."""
    entries: list[tuple[str, bool]] = []
    for key in _LISTS:
        value = settings.get(key)
        for item in value if isinstance(value, list) else ():
            if isinstance(item, str):
                entries.append((item.removeprefix("re:"), item.startswith("re:")))
    dynamic = settings.get("dynamic")
    for item in dynamic if isinstance(dynamic, dict) else ():
        if item.startswith("-:"):
            entries.append((item.removeprefix("-:"), True))
    return entries[:MAX_PATTERNS]


def _is_left_alone(name: str, method: Any, entries: list[tuple[str, bool]]) -> bool:
    for text, is_regex in entries:
        if is_regex:
            steps = parse_pattern(text, is_regex=True)
            if steps is not None and matches_name(steps, name):
                return True
        elif text == name or (method not in _EXACT and text in name):
            return True
    # vLLM builds the layers, but not fc, plain where any skipped pattern of GPTQ speaks of mtp
    skips = method in ("gptq", "auto_gptq", "gptq_marlin")
    return (
        skips and name != "mtp.fc" and any(is_regex and "mtp" in text for text, is_regex in entries)
    )
