"""The unroll equals a step-by-step draft with an explicit KV cache, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.draft import build_eagle3_config
from paceline.errors import DraftError
from paceline.target import TargetFacts
from paceline.train.families.eagle3 import Eagle3, build_module

K, MASK = 4, 63


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x: Tensor, place: int, rotary: int, theta: float) -> Tensor:
    """Rope of one head vector, pair (i, i + rotary/2) by angle place * theta^(-2i/rotary)."""
    out = x.clone()
    for i in range(rotary // 2):
        angle = place * theta ** (-2 * i / rotary)
        a, b = x[i], x[i + rotary // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + rotary // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Naive:
    """One position at a time, one head at a time."""

    def __init__(self, module: Eagle3, config: dict[str, Any], embedding: Tensor) -> None:
        self.w = dict(module.state_dict())
        self.c, self.embedding = config, embedding
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []

    def step(self, token: int, hidden: Tensor, place: int) -> tuple[Tensor, Tensor]:
        w, c, eps = self.w, self.c, self.c["rms_norm_eps"]
        heads, groups, width = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        rotary = int(width * c["rope_parameters"].get("partial_rotary_factor", 1.0))
        theta = c["rope_parameters"]["rope_theta"]
        normed = rms(hidden, w["midlayer.hidden_norm.weight"], eps)
        residual = normed if c["norm_before_residual"] else hidden
        embed = rms(self.embedding[token], w["midlayer.input_layernorm.weight"], eps)
        x = torch.cat([embed, normed])
        q = (w["midlayer.self_attn.q_proj.weight"] @ x).view(heads, width)
        k = (w["midlayer.self_attn.k_proj.weight"] @ x).view(groups, width)
        v = (w["midlayer.self_attn.v_proj.weight"] @ x).view(groups, width)
        self.keys.append([turn(row, place, rotary, theta) for row in k])
        self.values.append(list(v))
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            query = turn(q[head], place, rotary, theta)
            scores = torch.stack([query @ past[group] / math.sqrt(width) for past in self.keys])
            shares = torch.softmax(scores, 0)
            mixed.append(sum(s * past[group] for s, past in zip(shares, self.values, strict=True)))
        residual = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = rms(residual, w["midlayer.post_attention_layernorm.weight"], eps)
        gate = w["midlayer.mlp.gate_proj.weight"] @ y
        up = w["midlayer.mlp.up_proj.weight"] @ y
        prenorm = residual + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        return rms(prenorm, w["norm.weight"], eps), prenorm

    def combine(self, taps: Tensor) -> Tensor:
        w, eps = self.w, self.c["rms_norm_eps"]
        if self.c.get("norm_before_fc"):
            taps = rms(taps, w["input_norm.weight"], eps)
        if self.c.get("fc_norm"):
            parts = [
                rms(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(taps.chunk(3))
            ]
            taps = torch.cat(parts)
        return w["fc.weight"] @ taps


def naive_masked(naive: Naive, text: list[int], features: Tensor, base: int) -> list[Tensor]:
    """P-EAGLE: the later slots read the mask token and the one learned state."""
    naive.keys, naive.values = [], []
    outputs = []
    for place in range(base + K):
        inside = place <= base
        token = text[place + 1] if inside else MASK
        state = features[place] if inside else naive.w["mask_hidden"][0]
        normed, _ = naive.step(token, naive.combine(state), place)
        if place >= base:
            outputs.append(normed)
    return outputs


def naive_draft(
    naive: Naive, text: list[int], features: Tensor, base: int, head: Tensor | None
) -> tuple[list[Tensor], list[int]]:
    naive.keys, naive.values = [], []
    for place in range(base + 1):
        normed, prenorm = naive.step(text[place + 1], naive.combine(features[place]), place)
    outputs, ids = [normed], []
    for later in range(1, K + 1):
        if head is not None:
            number = int((head @ normed).argmax())
            ids.append(number + int(naive.w["d2t"][number]) if "d2t" in naive.w else number)
        if later == K:
            break
        place = base + 1 + later
        token = ids[-1] if head is not None else (text[place] if place < len(text) else 0)
        passed = normed if naive.c.get("norm_output") else prenorm
        normed, prenorm = naive.step(token, passed, base + later)
        outputs.append(normed)
    return outputs, ids


@pytest.mark.parametrize("own_tokens", [False, True])
@pytest.mark.parametrize(
    ("before", "vocab", "rotary", "norms"),
    [
        (False, 64, 1.0, ()),
        (True, 64, 0.5, ()),
        (False, 40, 1.0, ()),
        (True, 40, 1.0, ("norm_before_fc", "norm_output")),  # as speculators writes them
        (False, 64, 1.0, ("fc_norm",)),
        (False, 64, 0.5, ("norm_before_fc", "fc_norm", "norm_output")),
    ],
)
def test_unroll_equals_naive_reference(
    target: TargetFacts,
    before: bool,
    vocab: int,
    rotary: float,
    norms: tuple[str, ...],
    own_tokens: bool,
) -> None:
    config = build_eagle3_config(
        target, aux_layer_ids=[1, 2, 3], draft_vocab_size=vocab, norm_before_residual=before
    )
    config |= dict.fromkeys(norms, True)
    config["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": rotary}
    torch.manual_seed(0)
    module = build_module(config).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
        if module.d2t is not None:
            module.d2t += torch.arange(vocab) // 2
    embedding = torch.randn(64, 32, dtype=torch.float64)
    head = torch.randn(64, 32, dtype=torch.float64)
    if module.lm_head is not None:
        head = module.lm_head.weight.detach()
    tokens = torch.randint(0, 64, (2, 11))
    features = torch.randn(2, 11, 96, dtype=torch.float64)
    bases = torch.tensor([[0, 3, 4, 9], [1, 2, 7, 0]])
    outputs, proposed = module.unroll(
        tokens, features, bases, embedding, num_steps=K, head_VD=head if own_tokens else None
    )
    naive = Naive(module, config, embedding)
    for row in range(2):
        for column, base in enumerate(bases[row].tolist()):
            wanted, ids = naive_draft(
                naive, tokens[row].tolist(), features[row], base, head if own_tokens else None
            )
            for step in range(K):
                difference = (outputs[step][row, column] - wanted[step]).abs().max()
                assert difference < 1e-9, (base, step)
            if own_tokens:
                assert [int(p[row, column]) for p in proposed] == ids


@pytest.mark.parametrize(("before", "normed"), [(False, False), (True, False), (False, True)])
def test_parallel_unroll_equals_naive_reference(
    target: TargetFacts, before: bool, normed: bool
) -> None:
    config = build_eagle3_config(
        target, aux_layer_ids=[1, 2, 3], norm_before_residual=before, mask_token_id=MASK
    )
    config |= {"norm_before_fc": normed, "fc_norm": normed}
    torch.manual_seed(0)
    module = build_module(config).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    embedding = torch.randn(64, 32, dtype=torch.float64)
    tokens, features = torch.randint(0, 60, (1, 11)), torch.randn(1, 11, 96, dtype=torch.float64)
    bases = torch.tensor([[0, 3, 4, 9]])
    outputs, _ = module.unroll(tokens, features, bases, embedding, num_steps=K)
    _, proposed = module.unroll(tokens, features, bases, embedding, num_steps=K, head_VD=embedding)
    naive = Naive(module, config, embedding)
    for column, base in enumerate(bases[0].tolist()):
        wanted = naive_masked(naive, tokens[0].tolist(), features[0], base)
        for step in range(K):
            assert (outputs[step][0, column] - wanted[step]).abs().max() < 1e-9, (base, step)
            assert int(proposed[step][0, column]) == int((embedding @ wanted[step]).argmax())


def test_state_dict_names_are_the_file_names(target: TargetFacts) -> None:
    config = build_eagle3_config(target, aux_layer_ids=[1, 2, 3])
    assert sorted(build_module(config).state_dict()) == [
        "fc.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.mlp.down_proj.weight",
        "midlayer.mlp.gate_proj.weight",
        "midlayer.mlp.up_proj.weight",
        "midlayer.post_attention_layernorm.weight",
        "midlayer.self_attn.k_proj.weight",
        "midlayer.self_attn.o_proj.weight",
        "midlayer.self_attn.q_proj.weight",
        "midlayer.self_attn.v_proj.weight",
        "norm.weight",
    ]


def test_other_rope_types_are_refused(target: TargetFacts) -> None:
    config = build_eagle3_config(target, aux_layer_ids=[1, 2, 3])
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    with pytest.raises(DraftError, match="yarn"):
        build_module(config)
