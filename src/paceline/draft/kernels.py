"""Which kernel vLLM 0.31.0's CPU build runs a quantised matrix with, or why it has none.

Source of the facts: vllm/model_executor/kernels/linear of 0.31.0, run on x86 with AVX-512. On a GPU
vLLM chooses by the generation of the chip; `paceline quantize --measure` names what it took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.draft.quantized import Scheme

__all__ = ["explain_no_cpu_kernel", "find_cpu_kernel"]

_MULTIPLE = 32
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_TAKES = "vLLM 0.31.0's CPU kernel for w4a16 takes multiples of 32"
_EIGHT_BITS = (
    "vLLM 0.31.0's CPU build has no kernel for 8-bit weights with 16-bit inputs (w8a16): it needs a"
    " GPU"
)


def find_cpu_kernel(scheme: Scheme) -> str | None:
    """The class of vLLM's that runs the scheme on a CPU; None where there is none."""
    if scheme.kind == "float":
        return "ChannelWiseTorchFP8ScaledMMLinearKernel"
    if scheme.has_dynamic_inputs:
        return "CPUInt8ScaledMMLinearKernel"
    return "CPUWNA16LinearKernel" if scheme.num_bits == 4 else None


def explain_no_cpu_kernel(
    settings: Mapping[str, Any], packed: Mapping[str, Sequence[int]]
) -> str | None:
    """Why a folder with this quantization_config does not start on a CPU; None where it does.

    packed: shapes of the tensors named *.weight_packed, by name: int32 words of 4-bit weights.
    Formats of other tools are not judged.
    """
    groups = settings.get("config_groups")
    has_four = False
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("type") != "int":
            continue
        if group.get("input_activations") is None and weights.get("num_bits") == 8:
            return _EIGHT_BITS
        has_four = has_four or weights.get("num_bits") == 4
    return _explain_sizes(packed) if has_four else None


def _explain_sizes(packed: Mapping[str, Sequence[int]]) -> str | None:
    rows: dict[str, int] = {}
    for name, shape in packed.items():
        module = name.removesuffix(".weight_packed")
        parent, _, leaf = module.rpartition(".")
        whole = next((parts[0] for parts in _FUSED if leaf in parts), leaf)
        rows[f"{parent}.{whole}"] = rows.get(f"{parent}.{whole}", 0) + shape[0]
        columns = shape[1] * 8
        if columns % _MULTIPLE:
            return f"'{module}' has {columns} inputs; {_TAKES}"
    for module, count in rows.items():
        if not module.endswith("lm_head") and count % _MULTIPLE:
            return f"'{module.lstrip('.')}', fused, has {count} outputs; {_TAKES}"
    return None
