"""GPTQ: weights are rounded one column after the other, and what each rounding did to the layer's
outputs is made good in the columns that are still free (Frantar et al., 2023, arXiv 2210.17323).

With H = X^T X of the layer's own inputs, the best correction of the free columns for an error e in
column q is -e * inv(H_free)[q, :] / inv(H_free)[q, q]. All those inverses are rows of one upper
Cholesky factor of inv(H), so nothing is inverted twice. Held against the plain inverses in float64
by a test.

Shapes: R rows (outputs), C columns (inputs), G groups a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.draft import Scheme
from paceline.errors import DataError
from paceline.quantize.grid import (
    QuantizedWeight,
    choose_scales,
    expand_scales,
    find_offset,
    round_codes,
)

__all__ = ["gptq", "inverse_factor"]

_BLOCK = 128
_DAMPING = 0.01  # of the mean squared input, on the diagonal
_MAX_TRIES = 6


def inverse_factor(hessian_CC: Tensor, *, damping: float = _DAMPING) -> Tensor:
    """Upper U with U^T U = inv(H + damping * mean(diag H) * I), in H's dtype.

    A column without any input (zero diagonal) is left by itself: nothing is corrected through it.
    Damping grows tenfold while H is not positive definite; DataError when that does not help.
    """
    hessian = hessian_CC.clone()
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    hessian[dead, dead] = mean
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    for _ in range(_MAX_TRIES):
        upper: Tensor
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * mean * identity)
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed) and bool(upper.isfinite().all()):
                return upper
        damping *= 10
    raise DataError(
        "the inputs of a layer have no usable second moment",
        expected="finite inputs of more than one row",
        fix="Calibrate on more rows of the data folder.",
    )


def gptq(
    weight_RC: Tensor,
    hessian_CC: Tensor,
    scheme: Scheme,
    *,
    dtype: torch.dtype,
    damping: float = _DAMPING,
    is_ordered: bool = True,
    has_search: bool = True,
) -> QuantizedWeight:
    """Rounds a layer with error feedback. dtype: of the stored scales.

    is_ordered: columns with the largest inputs go first, while most others can still make good for
    them. Groups stay where they are (vLLM takes no other order), so their scales come from the
    weights as given. has_search: scales by least error under the inputs' sizes (choose_scales).
    """
    work = weight_RC.clone()
    rows, columns = work.shape
    diagonal = hessian_CC.diagonal().to(work.dtype)
    importance = diagonal.clamp(min=0) if has_search and bool((diagonal > 0).any()) else None
    scale_RG = choose_scales(work, scheme, dtype=dtype, importance_C=importance)
    order = (
        torch.argsort(diagonal, descending=True, stable=True)
        if is_ordered
        else torch.arange(columns, device=work.device)
    )
    # the factor in float64 whatever the weights are: tens of thousands of inputs may nearly agree
    upper = inverse_factor(hessian_CC[order][:, order].to(torch.float64), damping=damping)
    upper = upper.to(work.dtype)
    work = work[:, order]
    wide = expand_scales(scale_RG.to(work.dtype), work)[:, order]
    codes = torch.empty_like(work)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = torch.empty(rows, stop - start, dtype=work.dtype, device=work.device)
        for column in range(start, stop):
            scale = wide[:, column]
            codes[:, column] = round_codes(work[:, column] / scale, scheme)
            error = (work[:, column] - codes[:, column] * scale) / upper[column, column]
            work[:, column:stop] -= error[:, None] * upper[column, column:stop]
            errors[:, column - start] = error
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    restored = torch.empty_like(codes)
    restored[:, order] = codes
    offset_RC = find_offset(weight_RC / expand_scales(scale_RG.to(codes.dtype), codes), restored)
    return QuantizedWeight(scheme=scheme, codes_RC=restored, scale_RG=scale_RG, offset_RC=offset_RC)
