"""Medusa as vLLM 0.31.0 runs it: K heads of residual layers on the target's last state.

At the base position t (the last position whose state is known) head j reads the target's state of
t after its final norm and predicts x[t+2+j]; no token and no other head's guess goes in. A layer is
x + silu(W x), and a head ends in an output matrix that the draft stores: one for all heads, or one
each.

Shapes: B rows, T tokens, N bases a row, D hidden, V vocabulary, K heads. Numbers: weights are
float32 masters cast to the state's dtype where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.draft import build_contract
from paceline.errors import DraftError
from paceline.train.families.layers import Linear, take
from paceline.train.families.module import DraftModule

__all__ = ["Medusa", "build_module"]


class Block(nn.Module):
    """The residual layers of one head."""

    def __init__(self, width: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(width, width, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(DraftModule):
    """The draft. lm_head: the output matrix of all heads; or lm_heads: one each."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        contract = build_contract("medusa", config)
        assert contract.sizes is not None
        if float(config.get("logit_scale", 1.0)) != 1.0:
            raise DraftError(
                "'logit_scale' is set; Paceline trains and replays drafts without it",
                where="config.json",
            )
        sizes, flags = contract.sizes.numbers, contract.sizes.flags
        width, rows = sizes["hidden_size"], sizes["vocab_size"]
        bias = "medusa_fc_bias" in flags
        self.blocks = nn.ModuleList(
            Block(width, sizes["num_hidden_layers"], bias) for _ in range(sizes["num_heads"])
        )
        if "original_lm_head" in flags:
            self.lm_head = Linear(width, rows, bias=False)
            self._outputs = [self.lm_head]
        else:
            self._outputs = [Linear(width, rows, bias=False) for _ in self.blocks]
            self.lm_heads = nn.ModuleList(self._outputs)

    def output_heads(self, target_head_VD: Tensor) -> list[Tensor]:
        return [matrix.weight for matrix in self._outputs]

    def freeze_output(self) -> None:
        """The output matrices stay as they are: stored, and no longer parameters."""
        for matrix in self._outputs:
            weight = matrix.weight.detach()
            del matrix.weight
            matrix.register_buffer("weight", weight)

    def unroll(
        self,
        tokens_BT: Tensor,
        features_BTF: Tensor,
        bases_BN: Tensor,
        embedding_VD: Tensor,
        *,
        num_steps: int,
        head_VD: Tensor | None = None,
        places_BT: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """features_BTF: states after the final norm. Raises DraftError for K above the heads."""
        if num_steps > len(self.blocks):
            raise DraftError(
                f"{num_steps} tokens cannot be drafted by {len(self.blocks)} heads",
                where="config.json: num_heads",
                expected="a head for each drafted token",
            )
        state_BND = take(features_BTF, bases_BN)
        outputs = [block(state_BND) for block in self.blocks[:num_steps]]
        if head_VD is None:
            return outputs, []
        matrices = self.output_heads(head_VD)
        if len(matrices) == 1:
            matrices = matrices * num_steps
        return outputs, [
            F.linear(output, matrix.to(output.dtype)).argmax(dim=-1)
            for output, matrix in zip(outputs, matrices, strict=False)
        ]


def build_module(config: Mapping[str, Any]) -> Medusa:
    """The module for a Medusa config.json. Raises DraftError for what cannot be trained."""
    return Medusa(config)
