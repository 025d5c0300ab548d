"""A draft model as vLLM 0.31.0 runs it: a whole small Llama or Qwen3 with a cache of its own.

It reads the text up to x[t+1], which the target has just said, and predicts x[t+2]; step j > 0
reads the token it said itself, at place t+1+j. What it kept for accepted tokens stands, since they
are the text's. So on the text's own tokens all K steps are one and the same pass over the text, and
training needs one step; `unroll` walks several for the replay.

Shapes: B rows, T tokens, N bases a row, D draft hidden, H heads, G KV heads, E head width, V
vocabulary. Numbers: weights are float32 masters cast to the embeddings' dtype; norms and softmax
run in float32 or wider; the residual stream stays in the embeddings' dtype, as when served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import DraftError
from paceline.train.families.eagle3 import Norm
from paceline.train.families.layers import (
    Linear,
    Mlp,
    attend,
    config_number,
    read_rope,
    rotate,
    take,
    text_places,
    unseen_places,
)
from paceline.train.families.module import DraftModule

__all__ = ["DraftModel", "build_module"]


class Attention(nn.Module):
    """Grouped-query projections and rope; Qwen3 norms the heads of queries and keys."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(config_number(config, "hidden_size"))
        self.num_heads = int(config_number(config, "num_attention_heads"))
        self.num_kv_heads = int(config_number(config, "num_key_value_heads"))
        self.head_dim = int(config_number(config, "head_dim"))
        has_norms = config.get("model_type") == "qwen3"
        bias = bool(config.get("attention_bias", False))
        inner, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(width, inner, bias=bias)
        self.k_proj = Linear(width, kv, bias=bias)
        self.v_proj = Linear(width, kv, bias=bias)
        self.o_proj = Linear(inner, width, bias=bias and not has_norms)
        eps = float(config["rms_norm_eps"])
        self.q_norm = Norm(self.head_dim, eps) if has_norms else nn.Identity()
        self.k_norm = Norm(self.head_dim, eps) if has_norms else nn.Identity()
        self.rope = read_rope(config, self.head_dim)

    def queries(self, x_BND: Tensor, places_BN: Tensor) -> Tensor:
        q = self.q_proj(x_BND).unflatten(-1, (self.num_heads, self.head_dim))
        return rotate(self.q_norm(q), places_BN, self.rope)

    def keys_values(self, x_BND: Tensor, places_BN: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_proj(x_BND).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x_BND).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return rotate(self.k_norm(k), places_BN, self.rope), v


class Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = int(config_number(config, "hidden_size")), float(config["rms_norm_eps"])
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.self_attn = Attention(config)
        inner = int(config_number(config, "intermediate_size"))
        self.mlp = Mlp(width, inner, bool(config.get("mlp_bias", False)))

    def leave(self, stream: Tensor, mixed: Tensor) -> Tensor:
        stream = stream + self.self_attn.o_proj(mixed)
        return stream + self.mlp(self.post_attention_layernorm(stream))  # type: ignore[no-any-return]


class Body(nn.Module):
    """What lies under `model.` in the file."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = int(config_number(config, "hidden_size"))
        self.embed_tokens = nn.Embedding(int(config_number(config, "vocab_size")), width)
        self.layers = nn.ModuleList(
            Layer(config) for _ in range(int(config_number(config, "num_hidden_layers")))
        )
        self.norm = Norm(width, float(config["rms_norm_eps"]))

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(tokens, self.embed_tokens.weight).to(dtype)

    def decoder_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class DraftModel(DraftModule):
    """The draft; it shares nothing with the target."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        kind = config.get("model_type")
        if kind not in ("llama", "qwen3"):
            raise DraftError(
                f"model_type '{kind}' cannot be trained or replayed",
                where="config.json",
                expected="llama or qwen3",
            )
        if config_number(config, "hidden_act") != "silu":
            raise DraftError("only hidden_act 'silu' is served", where="config.json")
        if float(config.get("logit_scale") or 1.0) != 1.0 or config.get("use_sliding_window"):
            raise DraftError(
                "logit_scale or a sliding window is set; Paceline trains and replays drafts"
                " without them",
                where="config.json",
            )
        self.model = Body(config)
        self.lm_head: Linear | None = None
        if not config.get("tie_word_embeddings", False):
            width = int(config_number(config, "hidden_size"))
            self.lm_head = Linear(width, int(config_number(config, "vocab_size")), bias=False)

    def output_heads(self, target_head_VD: Tensor) -> list[Tensor]:
        tied = self.model.embed_tokens.weight
        return [tied if self.lm_head is None else self.lm_head.weight]

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
        """Nothing of the target goes in but the dtype of its features."""
        body, dtype = self.model, features_BTF.dtype
        hidden_BTT = None  # a text a row: causal attention alone
        if places_BT is not None:
            every_BT = torch.arange(places_BT.shape[1], device=places_BT.device)
            hidden_BTT = unseen_places(every_BT.expand(places_BT.shape), places_BT)
        places_BT = text_places(tokens_BT, places_BT)
        stream_BTD = body.embed(tokens_BT, dtype)
        kept = []
        for layer in body.decoder_layers():
            normed = layer.input_layernorm(stream_BTD)
            queries = layer.self_attn.queries(normed, places_BT)
            keys, values = layer.self_attn.keys_values(normed, places_BT)
            kept.append((keys, values))
            stream_BTD = layer.leave(stream_BTD, _look_back(queries, keys, values, hidden_BTT))
        if head_VD is None:  # on the text's own tokens a later step is the next place
            last = tokens_BT.shape[1] - 1
            places = [(bases_BN + 1 + step).clamp(max=last) for step in range(num_steps)]
            return [body.norm(take(stream_BTD, at)) for at in places], []
        (matrix,) = self.output_heads(head_VD)
        outputs = [body.norm(take(stream_BTD, bases_BN + 1))]
        proposed = [F.linear(outputs[0], matrix.to(dtype)).argmax(dim=-1)]
        unseen_BNT = unseen_places(bases_BN + 1, places_BT)
        at_BN = places_BT.gather(1, bases_BN)
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in kept]
        for step in range(1, num_steps):
            places_BN = at_BN + 1 + step
            stream = body.embed(proposed[-1], dtype)
            for layer, past, mine in zip(body.decoder_layers(), kept, own, strict=True):
                normed = layer.input_layernorm(stream)
                mine.append(layer.self_attn.keys_values(normed, places_BN))
                queries = layer.self_attn.queries(normed, places_BN)
                stream = layer.leave(stream, attend(queries, *past, unseen_BNT, mine))
            outputs.append(body.norm(stream))
            proposed.append(F.linear(outputs[-1], matrix.to(dtype)).argmax(dim=-1))
        return outputs, proposed


def _look_back(
    queries_BTHE: Tensor, keys_BTGE: Tensor, values_BTGE: Tensor, hidden_BTT: Tensor | None
) -> Tensor:
    """Causal attention of every position, within its own text; [B, T, H*E]."""
    mixed = F.scaled_dot_product_attention(
        queries_BTHE.transpose(1, 2),
        keys_BTGE.transpose(1, 2),
        values_BTGE.transpose(1, 2),
        attn_mask=None if hidden_BTT is None else ~hidden_BTT[:, None],
        is_causal=hidden_BTT is None,
        enable_gqa=True,
    )
    return mixed.transpose(1, 2).flatten(2)


def build_module(config: Mapping[str, Any]) -> DraftModel:
    """The module for a draft model's config.json. Raises DraftError for what cannot be trained."""
    return DraftModel(config)
