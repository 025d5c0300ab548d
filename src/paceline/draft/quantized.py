"""Quantised drafts: how a linear layer's tensors change under one compressed-tensors scheme.

Source of the facts: vllm/model_executor/layers/quantization/compressed_tensors/ of 0.31.0. eagle3,
dflash and draft_model read their own `quantization_config`; an MTP head takes the target's, and
Medusa's blocks are plain layers. int4 and FP8 are held against vLLM's loader by the contract flow
test; packed int8 has no kernel in vLLM's CPU build, so its rows are read from the source alone.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paceline.draft.patterns import MAX_PATTERNS, Step, matches_name, parse_pattern
from paceline.draft.rows import FLOATS, TensorRule
from paceline.errors import DraftError
from paceline.problems import show_value
from paceline.safetensors_header import TensorInfo

__all__ = [
    "HEAD_TARGET",
    "QUANTIZABLE",
    "Scheme",
    "count_parameters",
    "quantize_rules",
    "read_scheme",
]

QUANTIZABLE = ("eagle3", "dflash", "draft_model")
# what vLLM matches an output layer by: its class is not a Linear one
HEAD_TARGET = "re:.*lm_head"
_HEAD = "lm_head.weight"
_MAPS = ("d2t", "t2d", "token_map")
_WHERE = "config.json: quantization_config"
_SCALES = FLOATS
_MAX_REGEXES = 32
_FAR = 9000  # layers of a target that no entry of a list means by itself
# (type, bits, inputs are quantised) -> the format that vLLM loads, the dtype of the stored weight
_STORED = {
    ("int", 4, False): ("pack-quantized", "I32"),
    ("int", 8, False): ("pack-quantized", "I32"),
    ("int", 8, True): ("int-quantized", "I8"),
    ("float", 8, True): ("float-quantized", "F8_E4M3"),
}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One symmetric scheme for every linear layer that is not ignored.

    group_size: None for one scale a row ("channel"). has_dynamic_inputs: activations are quantised
    too, token by token (FP8 and W8A8). has_head: the draft's own output layer is meant too. ignore:
    names and patterns of modules that stay plain.
    """

    kind: str
    num_bits: int
    group_size: int | None
    has_dynamic_inputs: bool = False
    has_head: bool = False
    ignore: tuple[str, ...] = ()

    @cached_property
    def patterns(self) -> tuple[tuple[Step, ...], ...]:
        """The patterns of `ignore`; one outside the grammar matches nothing, and is refused."""
        parsed = (
            parse_pattern(text.removeprefix("re:"), is_regex=True)
            for text in self.ignore
            if text.startswith("re:")
        )
        return tuple(steps for steps in parsed if steps is not None)

    @property
    def names_layers(self) -> bool:
        """Whether an entry of `ignore` writes out a layer's number."""
        return any(re.search(r"layers\\?\.\d", text) for text in self.ignore)

    @property
    def is_packed(self) -> bool:
        return self.kind == "int" and not self.has_dynamic_inputs

    @property
    def stored_dtype(self) -> str:
        return _STORED[self.kind, self.num_bits, self.has_dynamic_inputs][1]

    @property
    def format(self) -> str:
        return _STORED[self.kind, self.num_bits, self.has_dynamic_inputs][0]


def _refuse(what: str, where: str, found: Any, expected: str) -> DraftError:
    return DraftError(
        f"{what} is {show_value(found)}",
        where=f"{_WHERE}{where}",
        expected=expected,
        fix="Quantise with one symmetric scheme for all linear layers: int4 or int8 weights in"
        " groups or rows, or FP8 or int8 by rows with dynamic inputs.",
    )


def read_scheme(family: str, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme, None without a quantization_config. Raises DraftError for what is not known.

    Known: quant_method compressed-tensors, one group with targets ["Linear"] (and HEAD_TARGET where
    the output layer is meant too), weights symmetric and static; int4 and int8 packed (group or
    channel), float8 and int8 (channel) with dynamic inputs per token.
    """
    value = config.get("quantization_config")
    if value is None:
        return None
    if family not in QUANTIZABLE:
        raise _refuse("family", "", family, f"one of {', '.join(QUANTIZABLE)}")
    if not isinstance(value, Mapping) or value.get("quant_method") != "compressed-tensors":
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        raise _refuse("quant_method", ".quant_method", method, "compressed-tensors")
    groups = value.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refuse("config_groups", ".config_groups", groups, "one group")
    group = next(iter(groups.values()))
    group = group if isinstance(group, Mapping) else {}
    targets = group.get("targets")
    if targets not in (["Linear"], ["Linear", HEAD_TARGET]):
        raise _refuse("targets", ".config_groups", targets, f'["Linear"], or with "{HEAD_TARGET}"')
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    kind, bits = str(weights.get("type")), weights.get("num_bits")
    bits = bits if isinstance(bits, int) else 0
    inputs = group.get("input_activations")
    if not any((kind, bits, flag) in _STORED for flag in (False, True)):
        raise _refuse("weights", ".config_groups", weights, "int of 4 or 8 bits, or float of 8")
    has_inputs = _read_inputs(inputs, kind, bits)
    stored = _STORED[kind, bits, has_inputs]
    if weights.get("symmetric") is not True or weights.get("dynamic") not in (False, None):
        raise _refuse("weights", ".config_groups", weights, "symmetric and static")
    if value.get("format", group.get("format")) != stored[0]:
        raise _refuse("format", ".format", value.get("format"), stored[0])
    if stored[1] == "I32" and group.get("format") not in (None, stored[0]):
        raise _refuse("format", ".config_groups", group.get("format"), stored[0])
    for key in ("transform_config", "sparsity_config"):  # vLLM turns by the one, stops at the other
        if value.get(key):
            raise _refuse(key, f".{key}", value[key], "no such key")
    for key, sound in (
        ("actorder", (None, False, "weight", "static")),
        ("block_structure", (None,)),
    ):
        if weights.get(key) not in sound:
            raise _refuse(key, ".config_groups", weights[key], "no such key")
    return Scheme(
        kind=kind,
        num_bits=bits,
        group_size=_read_group(weights, kind, has_inputs),
        has_dynamic_inputs=has_inputs,
        has_head=targets == ["Linear", HEAD_TARGET],
        ignore=_read_ignored(value.get("ignore")),
    )


def _read_ignored(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refuse("ignore", ".ignore", value, "a list of module names")
    patterns = [item for item in value if item.startswith("re:")]
    if len(value) > MAX_PATTERNS or len(patterns) > _MAX_REGEXES:
        expected = f"at most {MAX_PATTERNS} names, {_MAX_REGEXES} of them patterns"
        raise _refuse("the number of ignored modules", ".ignore", len(value), expected)
    return tuple(value)


def _leaves_plain(
    scheme: Scheme, family: str, name: str, names: Container[str], first_layer: int | None
) -> bool:
    """Whether vLLM 0.31.0 builds this linear layer plain, by the names that it knows it by.

    It matches whole names, or patterns from the beginning, against its own modules: `model.` before
    all but the head, q, k, v and gate, up in one. A whole model is also told by its parts, and
    stops where they differ. An EAGLE-3 or DFlash draft counts its layers on from the target's last,
    so an entry that goes by a layer's number fits one length of target alone: first_layer, or where
    that is not known, the one that the folder's tensors (names) were stored for.
    """
    module = re.sub(r"^midlayer\.", "layers.0.", name.removesuffix(".weight"))
    if family == "draft_model":
        return _is_ignored(scheme, module)
    fused = re.sub(r"\.[qkv]_proj$", ".qkv_proj", module)
    fused = f"model.{re.sub(r'[.](gate|up)_proj$', '.gate_up_proj', fused)}"
    if first_layer is not None:
        return _is_ignored(scheme, _renumber(fused, first_layer))
    is_plain = _is_ignored(scheme, fused)
    if scheme.names_layers or is_plain != _is_ignored(scheme, _renumber(fused, _FAR)):
        return f"{name}_scale" not in names
    return is_plain


def _renumber(module: str, first: int) -> str:
    return re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) + first), module)


def _is_ignored(scheme: Scheme, module: str) -> bool:
    by_pattern = any(matches_name(steps, module) for steps in scheme.patterns)
    return module in scheme.ignore or by_pattern


def _read_group(weights: Mapping[str, Any], kind: str, has_inputs: bool) -> int | None:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel" and size in (None, -1):
        return None
    is_packed = kind == "int" and not has_inputs
    if is_packed and strategy == "group" and isinstance(size, int) and size > 0:
        return size
    raise _refuse(
        "strategy",
        ".config_groups",
        f"{strategy}, group_size {size}",
        '"channel", or for packed integers "group" with a group_size',
    )


def _read_inputs(inputs: Any, kind: str, bits: int) -> bool:
    if inputs is None and kind == "int":
        return False
    is_dynamic = (
        isinstance(inputs, Mapping)
        and inputs.get("type") == kind
        and inputs.get("num_bits") == bits == 8
        and inputs.get("symmetric", True) is True
        and inputs.get("dynamic") is True
        and inputs.get("strategy") == "token"
    )
    if not is_dynamic:
        raise _refuse(
            "input_activations",
            ".config_groups",
            inputs,
            "null for packed integers; 8 bits of the weights' type, symmetric, dynamic, per token,"
            " for FP8 and W8A8",
        )
    return True


def quantize_rules(
    family: str,
    rules: Mapping[str, TensorRule],
    scheme: Scheme,
    names: Container[str],
    first_layer: int | None = None,
) -> dict[str, TensorRule]:
    """The rules of a quantised draft. names: the tensors that are there, by canonical name.
    first_layer: the number that vLLM gives the draft's first layer, that of the target's layers.

    The config decides, as in vLLM 0.31.0, which reads plain weights into FP8 layers without a word
    and without a scale: every linear layer that `ignore` does not name is held to its packed form.
    An output layer of the draft's own may be left out.
    """
    result = dict(rules)
    for name, rule in rules.items():
        stem = name.removesuffix("weight")
        if name == _HEAD:
            parts = ("weight_packed", "weight_scale", "weight_shape")
            is_meant = scheme.has_head and any(f"{stem}{part}" in names for part in parts)
        else:
            is_meant = rule.is_linear and not _leaves_plain(
                scheme, family, name, names, first_layer
            )
        if not is_meant:
            continue
        rows, columns = rule.shape
        group = scheme.group_size or columns
        if columns % group or (scheme.is_packed and columns * scheme.num_bits % 32):
            raise DraftError(
                f"group_size {group} does not divide the {columns} inputs of '{stem.rstrip('.')}'",
                where=f"{_WHERE}.group_size",
                expected=f"a divisor of {columns}",
            )
        scale = replace(
            rule,
            shape=(rows, columns // group),
            dtypes=_SCALES,
            columns=f"inputs {columns} / group_size {group}",
            is_linear=False,
        )
        del result[name]
        result[f"{stem}weight_scale"] = scale
        if scheme.is_packed:
            words = columns * scheme.num_bits // 32
            result[f"{stem}weight_packed"] = replace(
                rule,
                shape=(rows, words),
                dtypes=("I32",),
                columns=f"inputs {columns} x {scheme.num_bits} bits / 32",
                is_linear=False,
            )
            result[f"{stem}weight_shape"] = TensorRule(shape=(2,), dtypes=("I64",))
        else:
            result[name] = replace(rule, dtypes=(scheme.stored_dtype,), is_linear=False)
    return result


def count_parameters(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> int:
    """Numbers that a draft's tensors stand for, whatever they are stored as.

    Packed words count as the weights that are in them (4 bits each where the config does not say),
    scales, shapes and vocabulary maps not at all.
    """
    settings = config.get("quantization_config")
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    bits = 8
    for group in groups.values() if isinstance(groups, Mapping) else ({},):
        weights = group.get("weights") if isinstance(group, Mapping) else None
        stated = weights.get("num_bits") if isinstance(weights, Mapping) else None
        bits = min(bits, stated if stated in (4, 8) else 4)
    return sum(
        tensor.num_elements * (32 // bits if name.endswith(".weight_packed") else 1)
        for name, tensor in tensors.items()
        if name not in _MAPS and not name.endswith((".weight_scale", ".weight_shape"))
    )
