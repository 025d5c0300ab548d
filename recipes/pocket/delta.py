"""The gated delta rule and its convolution for training on a GPU, in plain torch.

transformers' forms are right and slow there: one triangular solve for each of thousands of 64 x 64
systems, and a depthwise convolution that no library runs well in bfloat16. Here the systems are
inverted by halves (six levels of batched products, as stable as forward substitution) and the
convolution is four shifted products. tests/unit/train/test_mtp_recipe.py holds both, values and
gradients, against transformers'. Source of the algorithm: Yang et al. 2024, arXiv:2412.06464.

Shapes: B rows, T tokens, H heads, N chunks of C tokens, E head width (keys), F (values).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["causal_convolution", "delta_rule", "invert_unit_lower"]


def invert_unit_lower(lower: Tensor) -> Tensor:
    """Inverse of I + strictly lower part of [..., C, C]; C a power of two.

    [[P, 0], [Q, R]] has the inverse [[P', 0], [-R' Q P', R']]: diagonal blocks double each level.
    """
    size = lower.shape[-1]
    inverse = torch.ones(*lower.shape[:-2], size, 1, 1, dtype=lower.dtype, device=lower.device)
    width = 1
    while width < size:
        pairs = size // (2 * width)
        blocks = lower.unflatten(-2, (pairs, 2 * width)).unflatten(-1, (pairs, 2 * width))
        # [..., pairs, 2w, 2w]: the blocks on the diagonal
        blocks = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        left = blocks[..., width:, :width]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ left @ first)
        above = torch.cat((first, torch.zeros_like(first)), dim=-1)
        inverse = torch.cat((above, torch.cat((corner, second), dim=-1)), dim=-2)
        width *= 2
    return inverse[..., 0, :, :]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' signature: query, key [B,T,H,E], value [B,T,H,F], g and beta [B,T,H]."""
    assert initial_state is None, "for training only"
    assert not output_final_state, "for training only"
    dtype, length = query.dtype, query.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
        g, beta = (x.transpose(1, 2).float() for x in (g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (
                x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key)
            )
        query = query * query.shape[-1] ** -0.5
        pad = -length % chunk_size
        q, k, v = (
            F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk_size)) for x in (query, key, value)
        )
        g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk_size)) for x in (g, beta))
        decay = g.cumsum(-1)  # [B,H,N,C], the log of what is left of the state
        between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        k_beta = k * beta[..., None]
        inverse = invert_unit_lower((k_beta @ k.mT * between).tril(-1))
        new_values = inverse @ (v * beta[..., None])
        reads = inverse @ (k_beta * decay.exp()[..., None])
        inside = (q @ k.mT) * between
        q = q * decay.exp()[..., None]
        k = k * (decay[..., -1:] - decay).exp()[..., None]
        left = decay[..., -1].exp()[..., None, None]
        state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
        out = []
        for n in range(q.shape[2]):
            written = new_values[:, :, n] - reads[:, :, n] @ state
            out.append(q[:, :, n] @ state + inside[:, :, n] @ written)
            state = state * left[:, :, n] + k[:, :, n].mT @ written
        joined = torch.cat(out, dim=2)[:, :, :length]
        return joined.transpose(1, 2).to(dtype), None


def causal_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Depthwise over [B, channels, T] with weight [channels, taps], then SiLU."""
    assert bias is None, "no bias"
    assert activation in (None, "silu"), activation
    taps, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (taps - 1, 0))
    weight = weight.to(hidden_states.dtype)
    out = sum(padded[..., i : i + length] * weight[:, i, None] for i in range(taps))
    return F.silu(out) if activation else out
