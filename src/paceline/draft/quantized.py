"""Quantised drafts: how a linear layer's tensors change under one compressed-tensors scheme.

Source of the facts: vllm/model_executor/layers/quantization/compressed_tensors/ of 0.31.0. eagle3,
dflash and draft_model read their own `quantization_config`; an MTP head takes the target's, and
Medusa's blocks are plain layers. int4 and FP8 are held against vLLM's loader by the contract flow
test; int8 has no kernel in vLLM's CPU build, so its rows are read from the source alone.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.draft.rows import FLOATS, TensorRule
from paceline.errors import DraftError
from paceline.problems import show_value

__all__ = ["QUANTIZABLE", "Scheme", "quantize_rules", "read_scheme"]

QUANTIZABLE = ("eagle3", "dflash", "draft_model")
_WHERE = "config.json: quantization_config"
_SCALES = FLOATS
# (type, bits) -> the format that vLLM loads it from, and the dtype of the stored weight
_STORED = {
    ("int", 4): ("pack-quantized", "I32"),
    ("int", 8): ("pack-quantized", "I32"),
    ("float", 8): ("float-quantized", "F8_E4M3"),
}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One symmetric scheme for every linear layer that is not ignored.

    group_size: None for one scale a row ("channel"). has_dynamic_inputs: activations are quantised
    too, token by token (FP8 only).
    """

    kind: str
    num_bits: int
    group_size: int | None
    has_dynamic_inputs: bool = False

    @property
    def is_packed(self) -> bool:
        return self.kind == "int"


def _refuse(what: str, where: str, found: Any, expected: str) -> DraftError:
    return DraftError(
        f"{what} is {show_value(found)}",
        where=f"{_WHERE}{where}",
        expected=expected,
        fix="Quantise with one symmetric scheme for all linear layers: int4 or int8 weights in"
        " groups or rows, or FP8 with dynamic inputs.",
    )


def read_scheme(family: str, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme, None without a quantization_config. Raises DraftError for what is not known.

    Known: quant_method compressed-tensors, one group with targets ["Linear"], weights symmetric and
    static; int4 and int8 packed (group or channel), float8 (channel) with dynamic inputs per token.
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
    if group.get("targets") != ["Linear"]:
        raise _refuse("targets", ".config_groups", group.get("targets"), '["Linear"]')
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    kind, bits = weights.get("type"), weights.get("num_bits")
    stored = _STORED.get((str(kind), bits if isinstance(bits, int) else 0))
    if stored is None:
        raise _refuse("weights", ".config_groups", weights, "int of 4 or 8 bits, or float of 8")
    if weights.get("symmetric") is not True or weights.get("dynamic") not in (False, None):
        raise _refuse("weights", ".config_groups", weights, "symmetric and static")
    if value.get("format", group.get("format")) != stored[0]:
        raise _refuse("format", ".format", value.get("format"), stored[0])
    return Scheme(
        kind=str(kind),
        num_bits=int(bits or 0),
        group_size=_read_group(weights, str(kind)),
        has_dynamic_inputs=_read_inputs(group.get("input_activations"), str(kind)),
    )


def _read_group(weights: Mapping[str, Any], kind: str) -> int | None:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel" and size in (None, -1):
        return None
    if kind == "int" and strategy == "group" and isinstance(size, int) and size > 0:
        return size
    raise _refuse(
        "strategy",
        ".config_groups",
        f"{strategy}, group_size {size}",
        '"channel", or for integers "group" with a group_size',
    )


def _read_inputs(inputs: Any, kind: str) -> bool:
    if inputs is None and kind == "int":
        return False
    is_dynamic = (
        isinstance(inputs, Mapping)
        and inputs.get("type") == kind == "float"
        and inputs.get("num_bits") == 8
        and inputs.get("dynamic") is True
        and inputs.get("strategy") == "token"
    )
    if not is_dynamic:
        raise _refuse(
            "input_activations",
            ".config_groups",
            inputs,
            "null for integers; 8-bit floats, dynamic, per token, for FP8",
        )
    return True


def quantize_rules(
    rules: Mapping[str, TensorRule], scheme: Scheme, names: Container[str]
) -> dict[str, TensorRule]:
    """The rules of a quantised draft. names: the tensors that are there, by canonical name.

    A linear layer of which any packed part or scale is there must be there in its packed form; any
    other is held to its plain form: `ignore` in the config says the same, and where the two differ
    vLLM stops by itself.
    """
    result = dict(rules)
    for name, rule in rules.items():
        stem = name.removesuffix("weight")
        if not rule.is_linear or not any(
            f"{stem}{part}" in names for part in ("weight_packed", "weight_scale", "weight_shape")
        ):
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
            result[name] = replace(rule, dtypes=("F8_E4M3",), is_linear=False)
    return result
