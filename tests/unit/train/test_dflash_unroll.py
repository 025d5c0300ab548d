"""The block equals a draft with explicit keys, one slot and one head at a time, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.draft import build_dflash_config
from paceline.errors import DraftError
from paceline.target import TargetFacts
from paceline.train.families.dflash import Dflash, build_module

K, MASK = 3, 63


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


def naive_block(
    module: Dflash,
    config: dict[str, Any],
    embedding: Tensor,
    text: list[int],
    features: Tensor,
    base: int,
) -> list[Tensor]:
    """States of the K masked slots behind one base."""
    w, eps = dict(module.state_dict()), config["rms_norm_eps"]
    heads, groups, width = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    rotary = int(width * config["rope_parameters"].get("partial_rotary_factor", 1.0))
    theta = config["rope_parameters"]["rope_theta"]
    causal, window = config["dflash_config"]["causal"], config.get("sliding_window")

    def project(name: str, layer: int, x: Tensor, place: int) -> list[Tensor]:
        rows = w[f"layers.{layer}.self_attn.{name}_proj.weight"] @ x
        parts = list(rows.view(-1, width))
        if name == "v":
            return parts
        norm = w[f"layers.{layer}.self_attn.{name}_norm.weight"]
        return [turn(rms(part, norm, eps), place, rotary, theta) for part in parts]

    context = [
        rms(w["fc.weight"] @ features[place], w["hidden_norm.weight"], eps)
        for place in range(base + 1)
    ]
    places = [base + 1 + slot for slot in range(K + 1)]
    streams = [embedding[text[base + 1]], *(embedding[MASK] for _ in range(K))]
    for layer in range(config["num_hidden_layers"]):
        pre = f"layers.{layer}."
        normed = [rms(x, w[f"{pre}input_layernorm.weight"], eps) for x in streams]
        sources = [*enumerate(context), *zip(places, normed, strict=True)]
        keys = [(p, project("k", layer, x, p), project("v", layer, x, p)) for p, x in sources]
        after = []
        for x, y, place in zip(streams, normed, places, strict=True):
            mixed = []
            for head, query in enumerate(project("q", layer, y, place)):
                group = head // (heads // groups)
                seen = [
                    (k[group], v[group])
                    for other, k, v in keys
                    if not (causal and other > place)
                    and not (window is not None and abs(place - other) >= window)
                ]
                scores = torch.stack([query @ k / math.sqrt(width) for k, _ in seen])
                shares = torch.softmax(scores, 0)
                mixed.append(sum(s * v for s, (_, v) in zip(shares, seen, strict=True)))
            x = x + w[f"{pre}self_attn.o_proj.weight"] @ torch.cat(mixed)
            z = rms(x, w[f"{pre}post_attention_layernorm.weight"], eps)
            gate = w[f"{pre}mlp.gate_proj.weight"] @ z
            up = w[f"{pre}mlp.up_proj.weight"] @ z
            after.append(x + w[f"{pre}mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        streams = after
    return [rms(x, w["norm.weight"], eps) for x in streams[1:]]


def make_config(target: TargetFacts, **changes: Any) -> dict[str, Any]:
    return build_dflash_config(
        target,
        **{
            "aux_layer_ids": [1, 2, 3],
            "mask_token_id": MASK,
            "num_speculative_tokens": K,
            **changes,
        },
    )


def make_module(config: dict[str, Any]) -> Dflash:
    torch.manual_seed(0)
    module = build_module(config).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return module


@pytest.mark.parametrize(
    ("changes", "rotary"),
    [
        ({}, 1.0),
        ({"num_hidden_layers": 2}, 0.5),
        ({"causal": True, "num_hidden_layers": 2}, 1.0),
        ({"sliding_window": 4, "causal": True}, 1.0),
        ({"sliding_window": 5}, 1.0),
        ({"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 4}, 1.0),
    ],
)
def test_block_equals_naive_reference(
    target: TargetFacts, changes: dict[str, Any], rotary: float
) -> None:
    config = make_config(target, **changes)
    config["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": rotary}
    module = make_module(config)
    embedding = torch.randn(64, 32, dtype=torch.float64)
    tokens = torch.randint(0, 60, (2, 11))
    features = torch.randn(2, 11, 96, dtype=torch.float64)
    bases = torch.tensor([[0, 3, 4, 9], [1, 2, 7, 0]])
    outputs, proposed = module.unroll(tokens, features, bases, embedding, num_steps=K)
    assert proposed == []
    for row in range(2):
        for column, base in enumerate(bases[row].tolist()):
            wanted = naive_block(
                module, config, embedding, tokens[row].tolist(), features[row], base
            )
            for step in range(K):
                difference = (outputs[step][row, column] - wanted[step]).abs().max()
                assert difference < 1e-9, (base, step)


def test_proposals_are_the_heads_likeliest_in_the_targets_ids(target: TargetFacts) -> None:
    module = make_module(make_config(target, draft_vocab_size=40))
    assert module.lm_head is not None
    assert module.d2t is not None
    module.d2t += torch.arange(40) // 2
    tokens, features = torch.randint(0, 60, (1, 9)), torch.randn(1, 9, 96, dtype=torch.float64)
    embedding = torch.randn(64, 32, dtype=torch.float64)
    (head,) = module.output_heads(embedding)
    assert head is module.lm_head.weight
    outputs, proposed = module.unroll(
        tokens, features, torch.tensor([[2, 5]]), embedding, num_steps=K, head_VD=head
    )
    for output, ids in zip(outputs, proposed, strict=True):
        for state, token in zip(output[0], ids[0], strict=True):
            number = int((head @ state).argmax())
            assert int(token) == number + number // 2


def test_later_text_changes_nothing(target: TargetFacts) -> None:
    """A block sees features up to its base and one token: all that a server has."""
    module = make_module(make_config(target, num_hidden_layers=2))
    embedding = torch.randn(64, 32, dtype=torch.float64)
    tokens, features = torch.randint(0, 60, (1, 12)), torch.randn(1, 12, 96, dtype=torch.float64)
    bases = torch.tensor([[4]])
    before, _ = module.unroll(tokens, features, bases, embedding, num_steps=K)
    tokens[:, 6:] = 1
    features[:, 5:] = 0.0
    after, _ = module.unroll(tokens, features, bases, embedding, num_steps=K)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    tokens[:, 5] = (tokens[:, 5] + 1) % 60
    moved, _ = module.unroll(tokens, features, bases, embedding, num_steps=K)
    assert not torch.equal(moved[0], after[0])


@pytest.mark.parametrize("layers", [1, 2])
def test_state_dict_names_are_the_file_names(target: TargetFacts, layers: int) -> None:
    from paceline.draft import build_contract

    config = make_config(target, num_hidden_layers=layers, draft_vocab_size=40)
    required = {
        name: rule.shape
        for name, rule in build_contract("dflash", config).tensors.items()
        if rule.required
    }
    found = {name: tuple(t.shape) for name, t in build_module(config).state_dict().items()}
    assert found == required


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"is_neox_style": False}, "neox"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "mask token"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"target_hidden_size": 48}, "width"),
    ],
)
def test_what_the_forward_does_not_compute_is_refused(
    target: TargetFacts, change: dict[str, Any], word: str
) -> None:
    with pytest.raises(DraftError, match=word):
        build_module({**make_config(target), **change})
