"""The MTP unroll equals transformers' own layer, run anew over each base's whole history."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import DraftError
from paceline.train.families.mtp import Mtp, build_module

K, VOCAB = 4, 40
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}


@pytest.fixture(scope="module")
def module() -> Mtp:
    torch.manual_seed(0)
    built = build_module(CONFIG)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim == 2 else 0.2)
    return built.double()


class Source:
    """transformers' layer with the same weights."""

    def __init__(self, module: Mtp) -> None:
        from transformers import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import (
            Qwen3_5DecoderLayer,
            Qwen3_5RMSNorm,
            Qwen3_5TextRotaryEmbedding,
        )

        config = Qwen3_5TextConfig(**CONFIG)
        config._attn_implementation = "eager"
        self.layer = Qwen3_5DecoderLayer(config, 3).double().eval()
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        state = {n.removeprefix("mtp."): t for n, t in module.state_dict().items()}
        self.layer.load_state_dict(
            {n.removeprefix("layers.0."): t for n, t in state.items() if "layers.0." in n}
        )
        self.fc = state["fc.weight"]
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = Qwen3_5RMSNorm(32, eps=1e-6).double()
            self.norms[name].weight.data = state[f"{name}.weight"]

    def enter(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return (
            torch.cat(
                (
                    self.norms["pre_fc_norm_embedding"](embeds),
                    self.norms["pre_fc_norm_hidden"](hidden),
                ),
                dim=-1,
            )
            @ self.fc.T
        )

    def run(self, stream_TD: Tensor) -> Tensor:
        """Output of the last of T positions, counted from 0."""
        num = len(stream_TD)
        places = torch.arange(num)[None]
        cos_sin = self.rotary(stream_TD[None], places[None].expand(3, -1, -1))
        mask = torch.full((num, num), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        out = self.layer(stream_TD[None], position_embeddings=cos_sin, attention_mask=mask)
        return self.norms["norm"](out)[0, -1]


@pytest.mark.parametrize("replay", [False, True])
@torch.no_grad()
def test_every_step_of_every_base(module: Mtp, replay: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    length, bases = 11, [0, 3, 6, 8]
    tokens = torch.randint(0, VOCAB, (1, length), generator=generator)
    embedding = torch.randn(VOCAB, 32, generator=generator, dtype=torch.float64)
    final = torch.randn(1, length, 32, generator=generator, dtype=torch.float64)
    outputs, proposed = module.unroll(
        tokens,
        final,
        torch.tensor([bases]),
        embedding,
        num_steps=K,
        head_VD=embedding if replay else None,
    )
    source = Source(module)
    for number, base in enumerate(bases):
        stream = source.enter(embedding[tokens[0, 1 : base + 2]], final[0, : base + 1])
        for step in range(K):
            wanted = source.run(stream)
            found = outputs[step][0, number]
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
            if replay:
                token = proposed[step][0, number]
                assert token == (embedding @ wanted).argmax()
            else:
                at = base + 2 + step
                token = tokens[0, at] if at < length else torch.tensor(0)
            entered = source.enter(embedding[token], wanted)
            stream = torch.cat((stream, entered[None]))


@torch.no_grad()
def test_a_base_does_not_see_what_comes_after_it(module: Mtp) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (1, 9), generator=generator)
    embedding = torch.randn(VOCAB, 32, generator=generator, dtype=torch.float64)
    final = torch.randn(1, 9, 32, generator=generator, dtype=torch.float64)
    before, _ = module.unroll(tokens, final, torch.tensor([[3]]), embedding, num_steps=1)
    changed, states = tokens.clone(), final.clone()
    changed[0, 5:], states[0, 4:] = 0, 9.0
    after, _ = module.unroll(changed, states, torch.tensor([[3]]), embedding, num_steps=1)
    assert torch.equal(before[0], after[0])
    states[0, 2] = 9.0
    after, _ = module.unroll(changed, states, torch.tensor([[3]]), embedding, num_steps=1)
    assert not torch.equal(before[0], after[0])


def test_gradients_reach_every_weight(module: Mtp) -> None:
    tokens = torch.arange(8)[None]
    embedding = torch.randn(VOCAB, 32, dtype=torch.float64)
    final = torch.randn(1, 8, 32, dtype=torch.float64)
    outputs, _ = module.unroll(tokens, final, torch.tensor([[2, 3]]), embedding, num_steps=3)
    module.zero_grad()
    outputs[-1].square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in module.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "more than one layer"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn'"),
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        ({"hidden_act": "gelu"}, "only hidden_act 'silu'"),
    ],
)
def test_what_cannot_be_trained(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        build_module({**CONFIG, **change})
