"""The schemes: what each stores, how its config says so, and what a weight costs under it.

Names say weight and activation bits. A `Scheme` is the draft room's: one way to store a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.draft import HEAD_TARGET, Scheme
from paceline.errors import PlanError

__all__ = [
    "SCHEMES",
    "build_group",
    "build_settings",
    "choose_scheme",
    "describe_scheme",
    "require_group",
]

SCHEMES: dict[str, Scheme] = {
    "w4a16": Scheme(kind="int", num_bits=4, group_size=32),
    "w8a16": Scheme(kind="int", num_bits=8, group_size=None),
    "w8a8": Scheme(kind="int", num_bits=8, group_size=None, has_dynamic_inputs=True),
    "fp8": Scheme(kind="float", num_bits=8, group_size=None, has_dynamic_inputs=True),
}


def choose_scheme(name: str, group_size: int | None = None) -> Scheme:
    """A scheme by name; group_size None is its own default, 0 one scale a row.

    Raises PlanError for an unknown name, or a group size that the scheme has no place for.
    """
    if name not in SCHEMES:
        raise PlanError(
            f"scheme '{name}' is unknown", where="--scheme", expected=f"one of {', '.join(SCHEMES)}"
        )
    scheme = SCHEMES[name]
    if group_size is None:
        return scheme
    if scheme.has_dynamic_inputs and group_size:
        raise PlanError(
            f"a group size of {group_size} has no effect with {name}",
            where="--group-size",
            expected="no group size: these weights have one scale a row",
        )
    if group_size and (group_size < 16 or group_size % 8):
        raise PlanError(
            f"a group size of {group_size}",
            where="--group-size",
            expected="a multiple of 8 from 16 on, such as 32, 64 or 128; 0 for one scale a row",
        )
    return replace(scheme, group_size=group_size or None)


def require_group(scheme: Scheme, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises PlanError naming a module whose inputs the group size, or a word, does not divide."""
    for module, (_, columns) in shapes.items():
        group = scheme.group_size or columns
        if columns % group:
            sizes = [size for size in (128, 64, 32, 16) if columns % size == 0]
            raise PlanError(
                f"group size {group} does not divide the {columns} inputs of '{module}'",
                where="--group-size",
                expected=f"a divisor of {columns}, such as {sizes[0]}" if sizes else "0",
            )
        if scheme.is_packed and columns * scheme.num_bits % 32:
            raise PlanError(
                f"the {columns} inputs of '{module}' do not fill whole 32-bit words",
                where="--scheme",
                expected=f"a multiple of {32 // scheme.num_bits} inputs, or scheme w8a8 or fp8",
            )


def describe_scheme(scheme: Scheme) -> str:
    """ "w4a16, groups of 32"."""
    name = next(
        name
        for name, known in SCHEMES.items()
        if (known.kind, known.num_bits, known.has_dynamic_inputs)
        == (scheme.kind, scheme.num_bits, scheme.has_dynamic_inputs)
    )
    return f"{name}, groups of {scheme.group_size}" if scheme.group_size else f"{name}, by rows"


def build_group(scheme: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    """One entry of config_groups, in the words of the compressed-tensors format."""
    weights: dict[str, Any] = {
        "num_bits": scheme.num_bits,
        "type": scheme.kind,
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if scheme.group_size else "channel",
    }
    if scheme.group_size:
        weights["group_size"] = scheme.group_size
    inputs = None
    if scheme.has_dynamic_inputs:
        inputs = {
            "num_bits": scheme.num_bits,
            "type": scheme.kind,
            "symmetric": True,
            "dynamic": True,
            "strategy": "token",
        }
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": inputs,
        "format": scheme.format,
    }


def build_settings(groups: Sequence[Mapping[str, Any]], ignore: Sequence[str]) -> dict[str, Any]:
    """A quantization_config of these groups. vLLM takes the first group that names a module."""
    formats = {str(group["format"]) for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": dict(group) for number, group in enumerate(groups)},
        "ignore": list(ignore),
    }


def draft_targets(scheme: Scheme) -> list[str]:
    """What the one group of a draft names: every linear layer, and the output layer if meant."""
    return ["Linear", HEAD_TARGET] if scheme.has_head else ["Linear"]
