"""A quantised target whose weights are not stored as its config says: no draft helps beside it.

Source of the facts: vllm/model_executor/layers/quantization/compressed_tensors and qwen3_5.py of
0.31.0: a layer on the ignore list is built plain, every other linear layer packed, and each then
looks for its own kind of tensors. What is stored is the truth, the list a claim about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.draft.patterns import MAX_PATTERNS, Step, matches_name, parse_pattern
from paceline.errors import TargetError
from paceline.safetensors_header import Header
from paceline.target import read_weight_headers
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_target_layers", "check_target_storage"]

_LINEAR = re.compile(
    r"\.layers\.\d+\.(self_attn|linear_attn|mlp)\."
    r"(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|in_proj_\w+|out_proj)$"
)
_NUMBER = re.compile(r"(?:^|\.)layers\.(\d{1,5})\.")
_SMALL = ("in_proj_a", "in_proj_b", "in_proj_ba")
_LARGE = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz")
_STORED = ("weight_packed", "weight_scale")
_MAX_NAMES = 6


def check_target_storage(case: Case, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """`q.target` for a compressed-tensors target with its weights at hand: list against storage."""
    if case.target is None or settings.get("quant_method") != "compressed-tensors":
        return
    storage = _list_storage(case)
    ignore = settings.get("ignore")
    entries = [item for item in ignore if isinstance(item, str)] if isinstance(ignore, list) else []
    patterns = _parse(entries)
    if patterns is None:
        return
    plain = [n for n, packed in storage.items() if not packed and not _is_listed(n, patterns)]
    if not _means_every_layer(settings):
        plain = []
    packed = [n for n, packed in storage.items() if packed and _is_listed(n, patterns)]
    for names, stored, built in ((plain, "16 bits", "packed"), (packed, "packed", "in 16 bits")):
        if names:
            yield _tell(
                case,
                f"the target stores {len(names)} layers {stored} that its ignore list has vLLM"
                f" build {built}: {_show(names)}",
                _show(names),
                "an ignore list that names exactly the layers that are stored plain",
                "Quantise the target again, or correct its ignore list: vLLM would stop, or fill"
                " these layers with nothing.",
                None,
            )
    small = [n for n, is_packed in storage.items() if is_packed and n.endswith(_SMALL)]
    if small:
        yield _tell(
            case,
            f"the target packs {len(small)} of its recurrence's small projections: {_show(small)}",
            _show(small),
            "in_proj_a and in_proj_b in 16 bits: they steer the state, and save next to nothing",
            "Quantise the target without them.",
            "warning",
        )
    elif any(is_packed and n.endswith(_LARGE) for n, is_packed in storage.items()):
        yield _tell(
            case,
            "the target packs a part of each recurrent block (in_proj_qkv, in_proj_z) and leaves"
            " in_proj_a and in_proj_b plain: vLLM 0.31.0 builds the two pairs apart and supports"
            " it",
            "mixed inside one block",
            "",
            "Nothing is wrong with it.",
            "note",
        )


def check_target_layers(case: Case) -> Iterator[Finding]:
    """`ten.missing`: a target with its weights at hand has tensors of every layer it counts.

    A tool that drops what it does not know saves whole layers less, under an index that agrees.
    """
    if case.target is None:
        return
    found = {int(number[1]) for name in _list_names(case) if (number := _NUMBER.search(name))}
    missing = sorted(set(range(case.target.num_hidden_layers)) - found)
    if found and missing:
        shown = ", ".join(map(str, missing[:_MAX_NAMES]))
        yield finding(
            "ten.missing",
            "",
            f"the target counts {case.target.num_hidden_layers} layers and has no tensor of"
            f" {len(missing)} of them: {shown}",
            where=f"target '{case.target.name}'",
            found=f"{len(found)} layers",
            expected=f"layers 0 to {case.target.num_hidden_layers - 1}",
            fix="Copy the target again, or save it with a tool that keeps all layers.",
        )


def _list_names(case: Case) -> Iterator[str]:
    """Names of the target's own tensors, without its MTP head; none for one without weights."""
    for header in _read_headers(case).values():
        for name in header.tensors:
            if not name.startswith("mtp."):
                yield name


def _read_headers(case: Case) -> Mapping[str, Header]:
    assert case.target is not None
    try:
        return read_weight_headers(case.target.path, require_weights=False)
    except TargetError:
        return {}


def _means_every_layer(settings: Mapping[str, Any]) -> bool:
    """Whether a scheme is for all linear layers, so that every plain one must be on the list."""
    groups = settings.get("config_groups")
    return isinstance(groups, dict) and any(
        isinstance(group, dict) and "Linear" in (group.get("targets") or ())
        for group in groups.values()
    )


def _list_storage(case: Case) -> dict[str, bool]:
    """Linear layer -> whether it is stored packed; empty for a target without weights."""
    storage: dict[str, bool] = {}
    for header in _read_headers(case).values():
        for name, tensor in header.tensors.items():
            module, _, part = name.rpartition(".")
            if module.startswith("mtp.") or not _LINEAR.search(module):  # the head has its own rule
                continue
            if part in _STORED:
                storage[module] = True
            elif part == "weight" and len(tensor.shape) == 2:
                storage.setdefault(module, False)
    return storage


def _parse(entries: list[str]) -> list[tuple[Step, ...] | str] | None:
    """Names and patterns; None where one is beyond the grammar, so nothing can be said."""
    parsed: list[tuple[Step, ...] | str] = []
    for text in entries[:MAX_PATTERNS]:
        if not text.startswith("re:"):
            parsed.append(text)
            continue
        steps = parse_pattern(text.removeprefix("re:"), is_regex=True)
        if steps is None:
            return None
        parsed.append(steps)
    return parsed if len(entries) <= MAX_PATTERNS else None


def _is_listed(module: str, patterns: list[tuple[Step, ...] | str]) -> bool:
    return any(
        module == item if isinstance(item, str) else matches_name(item, module) for item in patterns
    )


def _show(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _tell(
    case: Case, message: str, found: str, expected: str, fix: str, severity: str | None
) -> Finding:
    assert case.target is not None
    return finding(
        "q.target",
        "config.json",
        message,
        where=f"target '{case.target.name}': quantization_config",
        found=found,
        expected=expected,
        fix=fix,
        severity=severity,
    )
