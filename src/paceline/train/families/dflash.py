"""DFlash as vLLM 0.31.0 runs it: K masked slots filled in one pass over the target's features.

For a text x and the base position t (the last one whose target features are known) the draft reads
a block of K+1 slots at rope positions t+1 .. t+1+K: the anchor x[t+1], then K times the mask token.
Slot j >= 1 predicts the token of its own place, x[t+1+j]; the anchor's own output is not used.

Keys and values of the positions <= t come from the target's tapped layers alone, through `fc`,
`hidden_norm` and each layer's own projections; nothing of the text's tokens is embedded there. The
block's slots see them and one another, all of them or, when causal, those up to themselves. With a
window W a slot at place p sees places above p - W.

Shapes: B rows, T tokens, F = num_taps * target hidden, N bases a row, S = K+1 slots, D hidden,
H heads, G KV heads, E head width. Numbers: as in `families/eagle3.py`. Steps never read what was
proposed, so training and replay are one computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.draft import build_contract, read_dflash_attention, read_mask_token_id
from paceline.errors import DraftError
from paceline.train.families.eagle3 import Norm
from paceline.train.families.layers import (
    Linear,
    Mlp,
    config_number,
    read_rope,
    rotate,
    text_places,
    unseen_places,
)
from paceline.train.families.module import TappedDraft

__all__ = ["Dflash", "build_module"]


class Attention(nn.Module):
    """Grouped-query projections with norms on queries and keys; window None sees everything."""

    def __init__(self, config: Mapping[str, Any], *, causal: bool, window: int | None) -> None:
        super().__init__()
        width, eps = int(config_number(config, "hidden_size")), float(config["rms_norm_eps"])
        self.num_heads = int(config_number(config, "num_attention_heads"))
        self.num_kv_heads = int(config_number(config, "num_key_value_heads"))
        self.head_dim = int(config_number(config, "head_dim"))
        self.causal, self.window = causal, window
        bias = bool(config.get("attention_bias", False))
        inner, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(width, inner, bias=bias)
        self.k_proj = Linear(width, kv, bias=bias)
        self.v_proj = Linear(width, kv, bias=bias)
        self.o_proj = Linear(inner, width, bias=bias)
        self.q_norm = Norm(self.head_dim, eps)
        self.k_norm = Norm(self.head_dim, eps)
        self.rope = read_rope(config, self.head_dim)

    def queries(self, x_BQD: Tensor, places_BQ: Tensor) -> Tensor:
        q = self.q_proj(x_BQD).unflatten(-1, (self.num_heads, self.head_dim))
        return rotate(self.q_norm(q), places_BQ, self.rope)

    def keys_values(self, x_BTD: Tensor, places_BT: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_proj(x_BTD).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x_BTD).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return rotate(self.k_norm(k), places_BT, self.rope), v

    def forward(
        self,
        x_BNSD: Tensor,
        context_BTD: Tensor,
        places_BNS: Tensor,
        places_BT: Tensor,
        unseen_BNT: Tensor,
    ) -> Tensor:
        """One softmax over the context up to each base and the base's own block."""
        num_rows, num_bases, num_slots = places_BNS.shape
        length, groups, width = context_BTD.shape[1], self.num_kv_heads, self.head_dim
        wide = torch.promote_types(x_BNSD.dtype, torch.float32)
        keys_BTGE, values_BTGE = self.keys_values(context_BTD, places_BT)
        flat_BQD, places_BQ = x_BNSD.flatten(1, 2), places_BNS.flatten(1, 2)
        own_keys, own_values = self.keys_values(flat_BQD, places_BQ)
        block = (num_rows, num_bases, num_slots, groups)
        queries = self.queries(flat_BQD, places_BQ).reshape(*block, -1, width)
        own_keys = own_keys.reshape(*block, width)
        own_values = own_values.reshape(*block, width)
        scale = 1.0 / math.sqrt(width)
        past = torch.einsum("bnsgre,btge->bgrnst", queries, keys_BTGE).to(wide) * scale
        here = torch.einsum("bnsgre,bnuge->bgrnsu", queries, own_keys).to(wide) * scale
        unseen = unseen_BNT[:, :, None]  # B N 1 T
        away = places_BNS[..., None] - places_BNS[..., None, :]  # B N S U
        hidden = away < 0 if self.causal else torch.zeros_like(away, dtype=torch.bool)
        if self.window is not None:
            unseen = unseen | (places_BNS[..., None] - places_BT[:, None, None] >= self.window)
            hidden = hidden | (away.abs() >= self.window)
        past = past.masked_fill(unseen[:, None, None], -math.inf)
        here = here.masked_fill(hidden[:, None, None], -math.inf)
        shares = torch.softmax(torch.cat((past, here), dim=-1), dim=-1).to(x_BNSD.dtype)
        mixed = torch.einsum("bgrnst,btge->bnsgre", shares[..., :length], values_BTGE)
        mixed = mixed + torch.einsum("bgrnsu,bnuge->bnsgre", shares[..., length:], own_values)
        return self.o_proj(mixed.flatten(3))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any], *, causal: bool, window: int | None) -> None:
        super().__init__()
        width, eps = int(config_number(config, "hidden_size")), float(config["rms_norm_eps"])
        if config_number(config, "hidden_act") != "silu":
            raise DraftError("only hidden_act 'silu' is served", where="config.json")
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.self_attn = Attention(config, causal=causal, window=window)
        self.mlp = Mlp(width, int(config_number(config, "intermediate_size")), bias=False)

    def forward(self, stream: Tensor, context: Tensor, *where: Tensor) -> Tensor:
        normed = self.input_layernorm(stream)
        stream = stream + self.self_attn(normed, context, *where)
        return stream + self.mlp(self.post_attention_layernorm(stream))  # type: ignore[no-any-return]


class Dflash(TappedDraft):
    """The draft: `fc` and `hidden_norm` over the taps, the layers, a final norm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        sizes = build_contract("dflash", config).sizes
        assert sizes is not None  # a family with weights
        numbers, eps = sizes.numbers, float(config_number(config, "rms_norm_eps"))
        width, mask = numbers["hidden_size"], read_mask_token_id(config)
        if mask is None:
            raise DraftError("no mask token is named", where="config.json: dflash_config")
        if config.get("is_neox_style") is False:
            raise DraftError(
                "is_neox_style is false; Paceline trains and replays neox rotation",
                where="config.json",
            )
        self.mask_token_id = int(mask)
        self.fc = Linear(numbers["num_taps"] * numbers["target_hidden_size"], width, bias=False)
        self.hidden_norm = Norm(width, eps)
        self.layers = nn.ModuleList(
            Layer(config, causal=causal, window=window)
            for window, causal in read_dflash_attention(config)
        )
        self.norm = Norm(width, eps)
        if "draft_vocabulary" in sizes.flags:
            self.open_vocabulary(width, numbers["draft_vocab_size"])
        if "own_width" in sizes.flags:
            raise DraftError(
                "the draft has a width of its own; Paceline trains and replays the target's width",
                where="config.json: hidden_size",
            )

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
        dtype, device = features_BTF.dtype, features_BTF.device
        context_BTD = self.hidden_norm(self.fc(features_BTF))
        slots = torch.arange(num_steps + 1, device=device)
        places_BT = text_places(tokens_BT, places_BT)
        unseen_BNT = unseen_places(bases_BN, places_BT)
        places_BNS = places_BT.gather(1, bases_BN)[..., None] + 1 + slots
        ids_BNS = torch.full_like(places_BNS, self.mask_token_id)
        ids_BNS[..., 0] = tokens_BT.gather(1, bases_BN + 1)
        stream = F.embedding(ids_BNS, self.embeddings(embedding_VD)).to(dtype)
        for layer in self.layers:
            stream = layer(stream, context_BTD, places_BNS, places_BT, unseen_BNT)
        outputs = list(self.norm(stream[:, :, 1:]).unbind(2))
        if head_VD is None:
            return outputs, []
        head = head_VD.to(dtype)
        return outputs, [self.to_target_ids(F.linear(out, head).argmax(-1)) for out in outputs]


def build_module(config: Mapping[str, Any]) -> Dflash:
    """The module for a DFlash config.json. Raises DraftError for what cannot be trained."""
    return Dflash(config)
