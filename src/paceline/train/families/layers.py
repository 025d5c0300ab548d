"""What the families' one-layer drafts share: projections, rope, and the attention of the unroll.

Shapes: B rows, T tokens, N bases a row, D hidden, H heads, G KV heads, E head width. Numbers:
weights are float32 masters cast to the input's dtype where they are used; softmax runs in float32
or wider.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import DraftError

__all__ = [
    "Linear",
    "Mlp",
    "Rope",
    "attend",
    "config_number",
    "following",
    "read_rope",
    "rotate",
    "take",
    "text_places",
    "unseen_places",
]


# of one attention call, in float32 half a GiB
_KEPT_SCORES = 2**27


def config_number(config: Mapping[str, Any], key: str) -> Any:
    """A key the forward needs; never a default for a missing fact. Raises DraftError."""
    if config.get(key) is None:
        raise DraftError(f"key '{key}' is missing", where="config.json", expected="a value")
    return config[key]


class Linear(nn.Linear):
    """y = x W^T (+ b) in x's dtype; the stored weight keeps its own."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Neox-style rope over the first rotary_dim dimensions of a head."""

    theta: float
    rotary_dim: int


def read_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Rope of a draft's config.json. Raises DraftError for a type that cannot be trained."""
    rope = config_number(config, "rope_parameters")
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise DraftError(
            f"rope type '{kind}' cannot be trained", where="config.json", expected="default"
        )
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return Rope(theta=float(rope["rope_theta"]), rotary_dim=int(head_dim * float(share)))


def rotate(x_BNHE: Tensor, positions_BN: Tensor, rope: Rope) -> Tensor:
    """Angles in float64, products in float32 or wider, rounded once."""
    half = rope.rotary_dim // 2
    wide = torch.promote_types(x_BNHE.dtype, torch.float32)
    steps = torch.arange(half, device=x_BNHE.device, dtype=torch.float64)
    frequency = rope.theta ** (-2.0 * steps / rope.rotary_dim)
    angle = (positions_BN[..., None].double() * frequency)[:, :, None, :]
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    first = x_BNHE[..., :half].to(wide)
    second = x_BNHE[..., half : 2 * half].to(wide)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x_BNHE.dtype), x_BNHE[..., 2 * half :]), dim=-1)


def take(x_BTD: Tensor, index_BN: Tensor) -> Tensor:
    return x_BTD.gather(1, index_BN[..., None].expand(-1, -1, x_BTD.shape[-1]))


def text_places(tokens_BT: Tensor, places_BT: Tensor | None) -> Tensor:
    """Where each token stands in its own text; None: a row is one text, and its padding."""
    if places_BT is not None:
        return places_BT
    return torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand(tokens_BT.shape)


def unseen_places(bases_BN: Tensor, places_BT: Tensor) -> Tensor:
    """What a base does not look at: what stands after it, and before its own text. [B, N, T]"""
    index_T = torch.arange(places_BT.shape[1], device=places_BT.device)
    first_BN = bases_BN - places_BT.gather(1, bases_BN)
    return (index_T > bases_BN[..., None]) | (index_T < first_BN[..., None])


def following(tokens_BT: Tensor, bases_BN: Tensor, ahead: int, places_BT: Tensor) -> Tensor:
    """The token so many places after each base in its own text; 0 past the text's end."""
    index_BN = bases_BN + ahead
    inside = index_BN < tokens_BT.shape[1]
    index_BN = index_BN.where(inside, 0)
    inside &= places_BT.gather(1, index_BN) == places_BT.gather(1, bases_BN) + ahead
    return torch.where(inside, tokens_BT.gather(1, index_BN), 0)


def attend(
    queries_BNHE: Tensor,
    keys_BTGE: Tensor,
    values_BTGE: Tensor,
    unseen_BNT: Tensor,
    own: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """One softmax over the step-0 keys at positions <= t and the base's own later keys.

    Scores are the only arrays that grow with the square of a row's length. Beyond `_KEPT_SCORES` of
    them they are computed again for the gradient in place of being kept (same bits): K steps of a
    row of 16,384 tokens would keep some 100 GiB.
    """
    # the caller's list grows by a step a step
    inputs = (queries_BNHE, keys_BTGE, values_BTGE, unseen_BNT, list(own))
    num_scores = unseen_BNT.numel() * queries_BNHE.shape[2]
    if num_scores > _KEPT_SCORES and torch.is_grad_enabled():
        again = checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False)
        return again  # type: ignore[no-any-return]
    return _attend(*inputs)


def _attend(
    queries_BNHE: Tensor,
    keys_BTGE: Tensor,
    values_BTGE: Tensor,
    unseen_BNT: Tensor,
    own: list[tuple[Tensor, Tensor]],
) -> Tensor:
    num_groups, width = keys_BTGE.shape[2:]
    wide = torch.promote_types(queries_BNHE.dtype, torch.float32)
    queries = queries_BNHE.reshape(*queries_BNHE.shape[:2], num_groups, -1, width)  # B N G R E
    scale = 1.0 / math.sqrt(width)
    past = torch.einsum("bngre,btge->bgrnt", queries, keys_BTGE).to(wide) * scale
    scores = [past.masked_fill(unseen_BNT[:, None, None], -math.inf)]
    for keys, _ in own:
        diagonal = torch.einsum("bngre,bnge->bgrn", queries, keys).to(wide) * scale
        scores.append(diagonal[..., None])
    shares = torch.softmax(torch.cat(scores, dim=-1), dim=-1).to(queries_BNHE.dtype)
    length = keys_BTGE.shape[1]
    mixed = torch.einsum("bgrnt,btge->bngre", shares[..., :length], values_BTGE)
    for number, (_, values) in enumerate(own):
        mixed = mixed + torch.einsum("bgrn,bnge->bngre", shares[..., length + number], values)
    return mixed.flatten(2)
