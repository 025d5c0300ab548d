"""AWQ: columns that carry large inputs are scaled up before rounding, and the scale is taken back
in what comes before (Lin et al., 2023, arXiv 2306.00978).

For one scale s a column, W x = (W s)(x / s): the grid then spends its points on the columns that
matter. s = rms(x)^alpha, and alpha is the one of 21 with the least output error; that error is read
from H = mean x x^T, so no inputs are kept. A norm's weight, or the rows of the projection before,
is divided by s; every matrix that reads the norm is multiplied, the unquantised ones too.

Shapes: R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.draft import Scheme
from paceline.quantize.grid import output_error, round_to_nearest

__all__ = ["choose_smoothing", "rescale_hessian"]

_NUM_ALPHAS = 21


def choose_smoothing(
    weights: Mapping[str, Tensor],
    schemes: Mapping[str, Scheme],
    hessian_CC: Tensor,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, float, float]:
    """(scale [C], error without, error with) for matrices that read the same inputs.

    weights: the ones that will be rounded. The scale is ones where nothing better is found; its
    geometric mean is 1. Errors are sums of relative output errors.
    """
    rms = hessian_CC.diagonal().clamp(min=0).sqrt()
    floor = float(rms[rms > 0].min()) if bool((rms > 0).any()) else 1.0
    rms = rms.clamp(min=floor)
    best = torch.ones_like(rms)
    plain = best_error = _error(weights, schemes, hessian_CC, best, dtype)
    for number in range(1, _NUM_ALPHAS):
        scale = rms ** (number / (_NUM_ALPHAS - 1))
        scale = scale / scale.log().mean().exp()
        error = _error(weights, schemes, hessian_CC, scale, dtype)
        if error < best_error:
            best, best_error = scale, error
    return best, plain, best_error


def rescale_hessian(hessian_CC: Tensor, scale_C: Tensor) -> Tensor:
    """Second moments of x / s."""
    return hessian_CC / (scale_C[:, None] * scale_C[None, :])


def _error(
    weights: Mapping[str, Tensor],
    schemes: Mapping[str, Scheme],
    hessian_CC: Tensor,
    scale_C: Tensor,
    dtype: torch.dtype,
) -> float:
    total = 0.0
    importance = (hessian_CC.diagonal() / scale_C**2).clamp(min=0)
    for name, weight_RC in weights.items():
        wide = weight_RC * scale_C.to(weight_RC.dtype)
        stored = dtype if schemes[name].is_packed else torch.float32
        found = round_to_nearest(wide, schemes[name], dtype=stored, importance_C=importance)
        total += output_error(weight_RC, found.plain_RC / scale_C.to(wide.dtype), hessian_CC)
    return total
