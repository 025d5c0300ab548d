"""Scores of long rows are computed again for the gradient: fewer bytes kept, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.train.families import eagle3, layers, mtp
from paceline.train.families.module import DraftModule

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "vocab_size": 50,
    "norm_before_residual": False,
    "num_aux_hidden_states": 1,
    "draft_vocab_size": 50,
    "mtp_num_hidden_layers": 1,
}


def run(module: DraftModule, length: int) -> tuple[int, list[Tensor]]:
    """(bytes kept for the gradient, gradients) of a four-step unroll."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (2, length), generator=generator)
    features = torch.randn(2, length, 16, generator=generator)
    bases = torch.arange(0, length - 2).expand(2, -1)
    embedding = torch.randn(50, 16, generator=generator)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs, _ = module.unroll(tokens, features, bases, embedding, num_steps=4)
        loss = torch.stack([out.square().sum() for out in outputs]).sum()
    total = sum(kept.values())
    grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return total, [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("family", [eagle3, mtp])
def test_fewer_bytes_and_the_same_bits(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = family.build_module(SIZES)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
    kept, grads = run(module, 96)
    monkeypatch.setattr(layers, "_KEPT_SCORES", 0)
    fewer, again = run(module, 96)
    assert fewer < 0.5 * kept
    assert len(grads) == len(again) > 8
    assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))
