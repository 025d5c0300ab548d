"""A linear layer on a fixed grid whose codes are trained: rounded forward, straight through back.

Shapes: R rows (outputs), C columns (inputs), G groups a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.draft import Scheme
from paceline.quantize.grid import QuantizedWeight, expand_scales, round_codes

__all__ = ["GridLayer"]

_INPUT_END = 127.0  # of vLLM's int8 inputs, one scale a token


class GridLayer(nn.Module):
    """Stands in for a linear layer with weight = codes * scale.

    latent_RC: in steps of the grid, float32, at first where the original weights lie; its rounding
    is the codes, so what is trained never leaves the grid. The scales are those that are stored and
    do not change. Inputs are rounded where they are when it is served (W8A8).
    """

    def __init__(self, start: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.scheme = start.scheme
        self.scale_RG = start.scale_RG
        latent_RC = start.codes_RC.to(torch.float32).clone()
        if start.offset_RC is not None:
            latent_RC += start.offset_RC.to(latent_RC.device)
        self.latent_RC = nn.Parameter(latent_RC)
        self.bias = bias

    def forward(self, inputs: Tensor) -> Tensor:
        weight = _OnGrid.apply(self.latent_RC, self.scale_RG, self.scheme)  # type: ignore[no-untyped-call]
        if self.scheme.has_dynamic_inputs:
            inputs = inputs + (_round_inputs(inputs.detach()) - inputs.detach())
        return nn.functional.linear(inputs, weight.to(inputs.dtype), self.bias)

    def stay_inside(self) -> None:
        """Takes latents back to the grid's ends: beyond them no gradient would tell the way."""
        half = 2 ** (self.scheme.num_bits - 1)
        with torch.no_grad():
            self.latent_RC.clamp_(-half, half - 1)

    def read(self) -> QuantizedWeight:
        """What it is now, in the form in which it is written."""
        codes_RC = round_codes(self.latent_RC.detach(), self.scheme)
        return QuantizedWeight(scheme=self.scheme, codes_RC=codes_RC, scale_RG=self.scale_RG)


class _OnGrid(torch.autograd.Function):
    """codes * scale, rounded as kernels do; the gradient of a code is its latent's."""

    @staticmethod
    def forward(ctx: Any, latent_RC: Tensor, scale_RG: Tensor, scheme: Scheme) -> Tensor:
        wide_RC = expand_scales(scale_RG.to(latent_RC.dtype), latent_RC)
        ctx.save_for_backward(scale_RG)
        served_RC = (round_codes(latent_RC, scheme) * wide_RC).to(scale_RG.dtype)
        return served_RC.to(latent_RC.dtype)

    @staticmethod
    def backward(ctx: Any, d_weight_RC: Tensor) -> tuple[Tensor, None, None]:
        (scale_RG,) = ctx.saved_tensors
        return d_weight_RC * expand_scales(scale_RG.to(d_weight_RC.dtype), d_weight_RC), None, None


def _round_inputs(inputs: Tensor) -> Tensor:
    wide = inputs.to(torch.float32)
    scale = wide.abs().amax(dim=-1, keepdim=True) / _INPUT_END
    scale = scale.where(scale > 0, 1.0)
    rounded = (wide / scale).round().clamp(-_INPUT_END - 1, _INPUT_END) * scale
    return rounded.to(inputs.dtype)
