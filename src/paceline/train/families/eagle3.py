"""EAGLE-3 as vLLM 0.31.0 runs it: one layer on tapped target layers, run K times.

For a text x and the base position t (the last position whose target features are known), the draft
reads token x[t+1] and the features of t, at rope position t, and predicts x[t+2]. Step j > 0 reads
the token just predicted, its own previous *pre-norm* output (post-norm with `norm_output`), at rope
position t+j, and predicts x[t+2+j]. Keys and values of positions <= t are always those of step 0
(target features); a step also sees the keys of its own steps 1..j. `unroll` computes that for many
bases at once.

A parallel draft (P-EAGLE, `mask_token_id` in the config) does it in one pass: step j > 0 reads the
mask token and `combine(mask_hidden)`, whatever came before.

Shapes: B rows, T tokens, F = num_aux * target hidden, N bases a row, D hidden, H heads, G KV heads,
E head width. Numbers: weights are float32 masters cast to the features' dtype where they are used;
norms and softmax run in float32; the residual stream stays in the features' dtype, as when served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.draft import read_eagle3_sizes, read_mask_token_id
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
from paceline.train.families.module import TappedDraft

__all__ = ["Eagle3", "build_module"]


class Norm(nn.Module):
    """RMS norm, computed in at least float32, answered in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        shape = (x.shape[-1],)
        return F.rms_norm(x.to(wide), shape, self.weight.to(wide), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query projections and rope; the scores are the unroll's business."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(config_number(config, "hidden_size"))
        self.num_heads = int(config_number(config, "num_attention_heads"))
        self.num_kv_heads = int(config_number(config, "num_key_value_heads"))
        self.head_dim = int(config_number(config, "head_dim"))
        bias = bool(config.get("attention_bias", False))
        inner, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(2 * width, inner, bias=bias)
        self.k_proj = Linear(2 * width, kv, bias=bias)
        self.v_proj = Linear(2 * width, kv, bias=bias)
        self.o_proj = Linear(inner, width, bias=bias)
        self.rope = read_rope(config, self.head_dim)

    def queries(self, x_BND: Tensor, positions_BN: Tensor) -> Tensor:
        q = self.q_proj(x_BND).unflatten(-1, (self.num_heads, self.head_dim))
        return rotate(q, positions_BN, self.rope)

    def keys_values(self, x_BND: Tensor, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_proj(x_BND).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x_BND).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return rotate(k, positions_BN, self.rope), v


class MidLayer(nn.Module):
    """The one decoder layer; its names are the file's."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = int(config_number(config, "hidden_size")), float(config["rms_norm_eps"])
        if config_number(config, "hidden_act") != "silu":
            raise DraftError("only hidden_act 'silu' is served", where="config.json")
        self.input_layernorm = Norm(width, eps)
        self.hidden_norm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.self_attn = Attention(config)
        inner = int(config_number(config, "intermediate_size"))
        self.mlp = Mlp(width, inner, bool(config.get("mlp_bias", False)))
        self.norm_before_residual = bool(config_number(config, "norm_before_residual"))

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [.., 2D], residual [.., D])."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), residual

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The pre-norm output: what the next step reads and the final norm turns into logits."""
        residual = residual + self.self_attn.o_proj(attended)
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]


class Eagle3(TappedDraft):
    """The draft: an `fc` over the taps, the layer, a final norm, and an output matrix or none."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(config_number(config, "hidden_size"))
        sizes = read_eagle3_sizes(config)  # as vLLM counts taps and tokens where none are stated
        num_aux = sizes.num_aux_hidden_states
        source = int(config.get("target_hidden_size") or width)
        eps = float(config["rms_norm_eps"])
        self.input_norm = Norm(num_aux * source, eps) if sizes.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(Norm(source, eps) for _ in range(num_aux)) if sizes.fc_norm else None
        )
        self.fc = Linear(num_aux * source, width, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = Norm(width, eps)
        self.norm_output = config.get("norm_output") is True
        mask = read_mask_token_id(config)
        self.mask_token_id = None if mask is None else int(mask)
        if self.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, num_aux * source))
        draft_vocab = sizes.draft_vocab_size
        if draft_vocab != int(config_number(config, "vocab_size")):
            self.open_vocabulary(width, draft_vocab)

    def combine(self, taps: Tensor) -> Tensor:
        """Tapped layers side by side [.., F] as one state [.., D]; normed first where asked for."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            chunks = taps.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            taps = torch.cat(normed, dim=-1)
        return self.fc(taps)  # type: ignore[no-any-return]

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
        """K steps from every base at once: (post-norm outputs [B,N,D], target ids proposed [B,N]).

        tokens_BT: the text; features_BTF: target taps of each position, already concatenated.
        bases_BN: base positions t with t + 1 < T (rows may be padded with 0).
        Without head_VD the later steps read the text's own tokens x[t+1+j] (training; past the end
        they read token 0 and must carry no loss) and no ids come back; with it they read the ids
        this draft just proposed (replay), as the server does.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        embedding_VD = self.embeddings(embedding_VD)
        dtype, places_BT = features_BTF.dtype, text_places(tokens_BT, places_BT)
        # step 0: keys and values of every position
        hidden_BTD = self.combine(features_BTF)
        inputs_BT = F.pad(tokens_BT[:, 1:], (0, 1))
        embeds_BTD = F.embedding(inputs_BT, embedding_VD).to(dtype)
        joined_BTD, residual_BTD = layer.enter(embeds_BTD, hidden_BTD)
        keys_BTGE, values_BTGE = attention.keys_values(joined_BTD, places_BT)
        unseen_BNT, at_BN = unseen_places(bases_BN, places_BT), places_BT.gather(1, bases_BN)
        # step 0: queries only at the bases
        joined, residual = take(joined_BTD, bases_BN), take(residual_BTD, bases_BN)
        own: list[tuple[Tensor, Tensor]] = []
        outputs, proposed = [], []
        for step in range(num_steps):
            places_BN = at_BN + step
            queries = attention.queries(joined, places_BN)
            if step:
                own.append(attention.keys_values(joined, places_BN))
            attended = attend(queries, keys_BTGE, values_BTGE, unseen_BNT, own)
            prenorm = layer.leave(attended, residual)
            normed = self.norm(prenorm)
            outputs.append(normed)
            if head_VD is not None:
                logits = F.linear(normed, head_VD.to(dtype))
                proposed.append(self.to_target_ids(logits.argmax(dim=-1)))
            if step + 1 == num_steps:
                break
            if self.mask_token_id is not None:
                if not step:
                    joined, residual = self._masked(bases_BN, embedding_VD, dtype)
                continue
            ids = proposed[-1] if proposed else following(tokens_BT, bases_BN, step + 2, places_BT)
            embeds = F.embedding(ids, embedding_VD).to(dtype)
            joined, residual = layer.enter(embeds, normed if self.norm_output else prenorm)
        return outputs, proposed

    def _masked(
        self, bases_BN: Tensor, embedding_VD: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """What every later step of every base reads: (attention input [B,N,2D], residual)."""
        assert self.mask_token_id is not None
        embeds_1D = embedding_VD[self.mask_token_id].to(dtype)[None]
        masked_1D = self.combine(self.mask_hidden.to(dtype))
        joined_1D, residual_1D = self.midlayer.enter(embeds_1D, masked_1D)
        shape = (*bases_BN.shape, -1)
        return joined_1D.expand(shape), residual_1D.expand(shape)


def build_module(config: Mapping[str, Any]) -> Eagle3:
    """The module for an EAGLE-3 config.json. Raises DraftError for what cannot be trained."""
    return Eagle3(config)
