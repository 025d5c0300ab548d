"""Weights in the formats of AutoGPTQ and AutoAWQ: four bits in groups, rounded to the nearest.

tensors, config = to_gptq(tensors, group_size=32)   # quantization_config beside them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from builders import Tensor, encode_bf16
from numpy.typing import NDArray

__all__ = ["to_awq", "to_gptq"]

_PACKED = 8  # codes in one number of 32 bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _decode(tensor: Tensor) -> NDArray[np.float32]:
    bits = np.frombuffer(tensor[2], dtype="<u2").astype("<u4") << 16
    return bits.view("<f4").reshape(tensor[1])


def _round(weight: NDArray[np.float32], group_size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """(codes 0 to 15 around 8 as [in, out], scales as [in / group, out])."""
    columns = weight.T.reshape(-1, group_size, weight.shape[0])
    scales = np.maximum(np.abs(columns).max(axis=1), 1e-8) / 7
    codes = np.clip(np.rint(columns / scales[:, None]) + 8, 0, 15).astype("<u4")
    return codes.reshape(weight.shape[1], -1), scales.astype(np.float32)


def _pack(codes: NDArray[Any], axis: int, order: tuple[int, ...]) -> Tensor:
    """Eight codes a number along an axis; order: which of the eight comes lowest first."""
    moved = np.moveaxis(codes, axis, -1)
    eights = moved.reshape(*moved.shape[:-1], -1, _PACKED)[..., list(order)]
    packed = (eights << (4 * np.arange(_PACKED, dtype="<u4"))).sum(axis=-1, dtype="<u4")
    packed = np.ascontiguousarray(np.moveaxis(packed, -1, axis).astype("<u4"))
    return "I32", packed.shape, packed.tobytes()


def _is_packed(name: str, tensor: Tensor) -> bool:
    return name.endswith("_proj.weight") and len(tensor[1]) == 2


def _pack_each(
    tensors: Mapping[str, Tensor],
    group_size: int,
    pack: Callable[[NDArray[Any]], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Every projection as scales and what `pack` makes of its codes; the other tensors as are."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not _is_packed(name, tensor):
            made[name] = tensor
            continue
        codes, scales = _round(_decode(tensor), group_size)
        parts = {"scales": ("BF16", scales.shape, encode_bf16(scales)), **pack(codes)}
        made |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    return made


def to_gptq(
    tensors: Mapping[str, Tensor], *, group_size: int = 32
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every projection packed along its inputs; the other tensors as they are."""

    def pack(codes: NDArray[Any]) -> dict[str, Tensor]:
        inputs, outputs = codes.shape
        zeros = np.full((inputs // group_size, outputs), 7, dtype="<u4")  # stored less one
        index = (np.arange(inputs) // group_size).astype("<i4")
        return {
            "qweight": _pack(codes, 0, tuple(range(_PACKED))),
            "qzeros": _pack(zeros, 1, tuple(range(_PACKED))),
            "g_idx": ("I32", index.shape, index.tobytes()),
        }

    settings = {"bits": 4, "group_size": group_size, "desc_act": False, "sym": True}
    config = {"quant_method": "gptq", "checkpoint_format": "gptq", **settings}
    return _pack_each(tensors, group_size, pack), config


def to_awq(
    tensors: Mapping[str, Tensor], *, group_size: int = 32
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every projection packed along its outputs, in AWQ's order; zero points of eight."""

    def pack(codes: NDArray[Any]) -> dict[str, Tensor]:
        zeros = np.full((codes.shape[0] // group_size, codes.shape[1]), 8, dtype="<u4")
        return {"qweight": _pack(codes, 1, _AWQ_ORDER), "qzeros": _pack(zeros, 1, _AWQ_ORDER)}

    settings = {"bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return _pack_each(tensors, group_size, pack), {"quant_method": "awq", **settings}
