"""A Qwen3.5-style MTP head as vLLM 0.31.0 runs it: one gated full-attention layer, run K times.

For a text x and the base position t the head reads token x[t+1] and the target's state of t after
its final norm, at rope position t, and predicts x[t+2]. Step j > 0 reads the token just predicted
and its own previous output *after* `mtp.norm`, at rope position t+j. Keys and values of positions
<= t are those of step 0; a step also sees the keys of its own steps 1..j. So `unroll` is the one of
EAGLE-3 with another layer, and takes and answers the same things; the features are the final state.

Norms are `1 + w`. Embedding and output matrix are always the target's: vLLM shares both, whatever
a folder ships.

Shapes: B rows, T tokens, N bases a row, D hidden, H heads, G KV heads, E head width. Numbers: as in
`families/eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import DraftError
from paceline.train.families.layers import (
    Linear,
    Mlp,
    attend,
    config_number,
    following,
    read_rope,
    rotate,
    take,
    text_places,
    unseen_places,
)
from paceline.train.families.module import DraftModule

__all__ = ["Mtp", "build_module"]


class CentredNorm(nn.Module):
    """RMS norm times (1 + weight), computed in at least float32, answered in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scaled = F.rms_norm(x.to(wide), x.shape[-1:], eps=self.eps)
        return (scaled * (1.0 + self.weight.to(wide))).to(x.dtype)


class GatedAttention(nn.Module):
    """Projections with norms on queries and keys; each query head brings a gate of its width."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = int(config_number(config, "hidden_size")), float(config["rms_norm_eps"])
        self.num_heads = int(config_number(config, "num_attention_heads"))
        self.num_kv_heads = int(config_number(config, "num_key_value_heads"))
        self.head_dim = int(config_number(config, "head_dim"))
        bias = bool(config.get("attention_bias", False))
        inner, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(width, 2 * inner, bias=bias)
        self.k_proj = Linear(width, kv, bias=bias)
        self.v_proj = Linear(width, kv, bias=bias)
        self.o_proj = Linear(inner, width, bias=bias)
        self.q_norm = CentredNorm(self.head_dim, eps)
        self.k_norm = CentredNorm(self.head_dim, eps)
        self.rope = read_rope(config, self.head_dim)

    def queries(self, x_BND: Tensor, places_BN: Tensor) -> tuple[Tensor, Tensor]:
        """(queries [B,N,H,E], gates [B,N,H*E])."""
        both = self.q_proj(x_BND).unflatten(-1, (self.num_heads, 2 * self.head_dim))
        q, gate = both.chunk(2, dim=-1)
        return rotate(self.q_norm(q), places_BN, self.rope), gate.flatten(2)

    def keys_values(self, x_BND: Tensor, places_BN: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_proj(x_BND).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x_BND).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return rotate(self.k_norm(k), places_BN, self.rope), v

    def leave(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(mixed * torch.sigmoid(gate))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = int(config_number(config, "hidden_size")), float(config["rms_norm_eps"])
        if config_number(config, "hidden_act") != "silu":
            raise DraftError("only hidden_act 'silu' is served", where="config.json")
        if not config.get("attn_output_gate", True):
            raise DraftError(
                "attn_output_gate is false; Paceline trains and replays gated heads",
                where="config.json",
            )
        self.input_layernorm = CentredNorm(width, eps)
        self.post_attention_layernorm = CentredNorm(width, eps)
        self.self_attn = GatedAttention(config)
        self.mlp = Mlp(width, int(config_number(config, "intermediate_size")), bias=False)


class Predictor(nn.Module):
    """What lies under `mtp.` in the file."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if int(config_number(config, "mtp_num_hidden_layers")) != 1:
            raise DraftError(
                "the head has more than one layer",
                where="config.json: mtp_num_hidden_layers",
                expected="1, which vLLM runs K times",
            )
        width, eps = int(config_number(config, "hidden_size")), float(config["rms_norm_eps"])
        self.pre_fc_norm_embedding = CentredNorm(width, eps)
        self.pre_fc_norm_hidden = CentredNorm(width, eps)
        self.fc = Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = CentredNorm(width, eps)

    def enter(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The layer's residual stream."""
        normed = (self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden))
        return self.fc(torch.cat(normed, dim=-1))  # type: ignore[no-any-return]


class Mtp(DraftModule):
    """The draft; output matrix and vocabulary are the target's."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.mtp = Predictor(config)

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
        """K steps from every base at once: (outputs after mtp.norm [B,N,D], proposed ids [B,N]).

        features_BTF: the target's states after its final norm. Without head_VD the later steps
        read the text's own tokens (training) and no ids come back; with it, the ids just proposed.
        """
        head, layer = self.mtp, self.mtp.layers[0]
        assert isinstance(layer, Layer)
        attention = layer.self_attn
        dtype, places_BT = features_BTF.dtype, text_places(tokens_BT, places_BT)
        embeds_BTD = F.embedding(F.pad(tokens_BT[:, 1:], (0, 1)), embedding_VD).to(dtype)
        stream_BTD = head.enter(embeds_BTD, features_BTF)
        keys, values = attention.keys_values(layer.input_layernorm(stream_BTD), places_BT)
        unseen_BNT, at_BN = unseen_places(bases_BN, places_BT), places_BT.gather(1, bases_BN)
        stream = take(stream_BTD, bases_BN)
        own: list[tuple[Tensor, Tensor]] = []
        outputs, proposed = [], []
        for step in range(num_steps):
            places_BN = at_BN + step
            normed = layer.input_layernorm(stream)
            queries, gate = attention.queries(normed, places_BN)
            if step:
                own.append(attention.keys_values(normed, places_BN))
            mixed = attend(queries, keys, values, unseen_BNT, own)
            stream = stream + attention.leave(mixed, gate)
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
            outputs.append(head.norm(stream))
            if head_VD is not None:
                proposed.append(F.linear(outputs[-1], head_VD.to(dtype)).argmax(dim=-1))
            if step + 1 < num_steps:
                said = following(tokens_BT, bases_BN, step + 2, places_BT)
                ids = proposed[-1] if proposed else said
                stream = head.enter(F.embedding(ids, embedding_VD).to(dtype), outputs[-1])
        return outputs, proposed


def build_module(config: Mapping[str, Any]) -> Mtp:
    """The module for an MTP config.json. Raises DraftError for what cannot be trained."""
    return Mtp(config)
