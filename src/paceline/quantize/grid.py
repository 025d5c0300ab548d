"""The grid a weight is rounded to: scales, codes, and the tensors that store them.

Scales are rounded to the dtype they are stored in before any weight is: what is measured here is
what is served. Arithmetic runs in the weight's dtype (float32, or float64 in tests).

Shapes: R rows (outputs), C columns (inputs), G groups a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.draft import Scheme, pack_codes

__all__ = [
    "QuantizedWeight",
    "build_tensors",
    "choose_scales",
    "expand_scales",
    "find_offset",
    "output_error",
    "round_codes",
    "round_to_nearest",
]

_CELL = 0.49  # of a step: what is so near a code still rounds to it
_FP8_MAX = 448.0  # largest finite float8_e4m3fn
_SHRINKS = tuple(1.0 - 0.02 * step for step in range(21))  # 1.0 to 0.6 of the largest weight


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """codes_RC: whole numbers, or values of float8; scale_RG: as stored. weight = codes * scale.

    offset_RC: how far the original lies from its code, in steps of the grid and inside the code's
    cell, in float16; None where nobody asks.
    """

    scheme: Scheme
    codes_RC: Tensor
    scale_RG: Tensor
    offset_RC: Tensor | None = None

    @property
    def plain_RC(self) -> Tensor:
        return self.codes_RC * expand_scales(self.scale_RG.to(self.codes_RC.dtype), self.codes_RC)


def expand_scales(scale_RG: Tensor, like_RC: Tensor) -> Tensor:
    """[R, G] -> [R, C], each group's scale beside its columns."""
    return scale_RG.repeat_interleave(like_RC.shape[1] // scale_RG.shape[1], dim=1)


def round_codes(scaled: Tensor, scheme: Scheme) -> Tensor:
    """Weights already divided by their scale -> codes, in the same dtype; ties go to even."""
    if scheme.kind == "float":
        clipped = scaled.clamp(-_FP8_MAX, _FP8_MAX)
        return clipped.to(torch.float32).to(torch.float8_e4m3fn).to(scaled.dtype)
    half = 2 ** (scheme.num_bits - 1)
    return scaled.round().clamp(-half, half - 1)


def choose_scales(
    weight_RC: Tensor,
    scheme: Scheme,
    *,
    dtype: torch.dtype,
    importance_C: Tensor | None = None,
) -> Tensor:
    """Scales [R, G] in `dtype`. A group of zeros has scale 1.

    Without importance_C the largest weight of a group reaches the grid's end. With it (mean squared
    input of each column) the scale is the one of 21 down to 0.6 of that with the least weighted
    squared error: a few clipped weights against a finer grid for all others.
    """
    rows, columns = weight_RC.shape
    group = scheme.group_size or columns
    grouped = weight_RC.reshape(rows, columns // group, group)
    end = _FP8_MAX if scheme.kind == "float" else (2**scheme.num_bits - 1) / 2
    full = grouped.abs().amax(dim=-1) / end
    full = full.where(full > 0, 1.0)
    plain = _store(full, dtype)
    if importance_C is None or scheme.kind == "float":
        return plain
    weights_GC = importance_C.to(weight_RC.dtype).reshape(1, columns // group, group)
    best, best_error = plain, torch.full_like(full, torch.inf)
    for shrink in _SHRINKS:
        scale = _store(full * shrink, dtype)
        wide = scale.to(weight_RC.dtype)[..., None]
        error = ((round_codes(grouped / wide, scheme) * wide - grouped) ** 2 * weights_GC).sum(-1)
        better = error < best_error
        best, best_error = scale.where(better, best), error.where(better, best_error)
    return best


def _store(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to the stored dtype; a scale that would vanish there is its smallest number."""
    return scale.clamp(min=torch.finfo(dtype).tiny).to(dtype)


def round_to_nearest(
    weight_RC: Tensor, scheme: Scheme, *, dtype: torch.dtype, importance_C: Tensor | None = None
) -> QuantizedWeight:
    """Each weight to its nearest grid point, on its own."""
    scale_RG = choose_scales(weight_RC, scheme, dtype=dtype, importance_C=importance_C)
    wide = expand_scales(scale_RG.to(weight_RC.dtype), weight_RC)
    scaled_RC = weight_RC / wide
    codes_RC = round_codes(scaled_RC, scheme)
    offset_RC = find_offset(scaled_RC, codes_RC)
    return QuantizedWeight(scheme=scheme, codes_RC=codes_RC, scale_RG=scale_RG, offset_RC=offset_RC)


def find_offset(scaled_RC: Tensor, codes_RC: Tensor) -> Tensor:
    """Of weights already divided by their scale: QuantizedWeight.offset_RC."""
    return (scaled_RC - codes_RC).clamp(-_CELL, _CELL).to(torch.float16)


def output_error(weight_RC: Tensor, plain_RC: Tensor, hessian_CC: Tensor) -> float:
    """Squared error of the layer's outputs over their squared size, for inputs X: H = X^T X."""
    wide = weight_RC.to(torch.float64)
    off = wide - plain_RC.to(torch.float64)
    hessian = hessian_CC.to(torch.float64)
    size = float(((wide @ hessian) * wide).sum())
    return float(((off @ hessian) * off).sum()) / size if size > 0 else 0.0


def build_tensors(stem: str, quantized: QuantizedWeight) -> Mapping[str, Tensor]:
    """The tensors of one module, `stem` without a final dot, as the scheme stores them."""
    scheme, codes = quantized.scheme, quantized.codes_RC
    scale = quantized.scale_RG
    if scheme.is_packed:
        return {
            f"{stem}.weight_packed": pack_codes(codes, scheme.num_bits),
            f"{stem}.weight_scale": scale,
            f"{stem}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
    kind = torch.int8 if scheme.kind == "int" else torch.float8_e4m3fn
    stored = codes.to(torch.float32).to(kind)
    return {f"{stem}.weight": stored, f"{stem}.weight_scale": scale}
