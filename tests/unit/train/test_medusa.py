"""Family medusa through the whole room: heads by hand, trained, written, read back, replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB, make_recipe
from whole_room import require_learnt, require_replay_agrees, train_and_watch

from paceline.draft import build_medusa_config, read_draft
from paceline.errors import DraftError, RecipeError
from paceline.target import TargetFacts
from paceline.train import Recipe, train_draft
from paceline.train.families.medusa import Medusa, build_module
from paceline.train.families.medusa_weights import start_medusa_random


def recipe(**change: Any) -> Recipe:
    return make_recipe(
        family="medusa",
        draft={"num_speculative_tokens": 3, **change.pop("draft", {})},
        **{"optim__num_steps": 60, "optim__lr": 3e-3, **change},
    )


def made(**change: Any) -> Medusa:
    config: dict[str, Any] = {
        "hidden_size": 8,
        "vocab_size": 16,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "original_lm_head": True,
        **change,
    }
    module = build_module(config).double()
    start_medusa_random(module, 0)
    for parameter in module.parameters():
        parameter.data *= 40.0
    return module


@pytest.mark.parametrize("one_head", [True, False])
def test_each_head_reads_the_state_of_its_base_alone(one_head: bool) -> None:
    """Every number again, one base, head and layer at a time, by vLLM's formula x + silu(W x)."""
    module = made(original_lm_head=one_head)
    state = torch.randn(2, 5, 8, dtype=torch.float64)
    bases = torch.tensor([[0, 3], [2, 0]])
    outputs, proposed = module.unroll(
        torch.zeros(2, 5, dtype=torch.int64),
        state,
        bases,
        torch.zeros(16, 8),
        num_steps=3,
        head_VD=torch.zeros(16, 8),
    )
    tensors = module.state_dict()
    for row in range(2):
        for place in range(2):
            for head in range(3):
                x = state[row, bases[row, place]]
                for layer in range(2):
                    y = tensors[f"blocks.{head}.layers.{layer}.weight"] @ x
                    x = x + y / (1.0 + torch.exp(-y))
                torch.testing.assert_close(outputs[head][row, place], x)
                name = "lm_head.weight" if one_head else f"lm_heads.{head}.weight"
                best = int((tensors[name] @ x).argmax())
                assert int(proposed[head][row, place]) == best
    assert len({tuple(p.flatten().tolist()) for p in proposed}) > 1


def test_more_tokens_than_heads_are_refused() -> None:
    with pytest.raises(DraftError, match="4 tokens cannot be drafted by 3 heads"):
        made().unroll(
            torch.zeros(1, 2, dtype=torch.int64),
            torch.zeros(1, 2, 8),
            torch.zeros(1, 1, dtype=torch.int64),
            torch.zeros(16, 8),
            num_steps=4,
        )


def test_a_cut_vocabulary_and_a_scale_are_refused() -> None:
    with pytest.raises(DraftError, match="cut vocabulary cannot be served"):
        made(truncated_vocab_size=8)
    with pytest.raises(DraftError, match="logit_scale"):
        made(logit_scale=0.5)


@pytest.mark.parametrize(
    "draft",
    [{}, {"one_head": False}, {"num_layers": 2, "trains_head": False}],
    ids=["one-head", "a-head-each", "head-kept"],
)
def test_trained_written_read_back_and_replayed(
    target: TargetFacts, data_dir: Path, tmp_path: Path, draft: dict[str, Any]
) -> None:
    found, losses = train_and_watch(recipe(draft=draft), target, data_dir, tmp_path / "d")
    # the rows are random: what follows the next token can only be learnt as a habit
    require_learnt(losses, share=0.92)
    again = read_draft(found.path)
    assert again.family == "medusa"
    assert again.config["num_heads"] == 3
    assert "trained_rotary_dim" not in again.metadata["trained"]
    tensors = load_file(str(found.path / "model.safetensors"))
    own = load_file(str(target.path / "model.safetensors"))["model.embed_tokens.weight"]
    names = [name for name in tensors if name.startswith("lm_head")]
    assert len(names) == (1 if draft.get("one_head", True) else 3)
    for name in names:
        is_kept = torch.equal(tensors[name], own.to(torch.bfloat16))
        assert is_kept == (not draft.get("trains_head", True))
    assert sorted(again.metadata["trained"]["started_from"]["tensors"]) == sorted(names)
    require_replay_agrees(again, target)


def test_the_start_says_the_targets_next_token(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """With residual layers at 0 every head is the target's own head on its own state."""
    from paceline.train.features import load_frozen_target
    from paceline.train.setup import build_setup

    setup = build_setup(recipe(), target=target, data_dir=data_dir)
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    module, _ = setup.build_module(frozen)
    tokens = torch.tensor([[3, 9, 27, 40, 12]])
    final = frozen.features(tokens, ()).taps_BTF
    bases = torch.tensor([[0, 1, 2, 3]])
    _, proposed = module.unroll(
        tokens, final, bases, frozen.embedding_VD, num_steps=3, head_VD=frozen.head_VD
    )
    greedy = (final[0, :4] @ frozen.head_VD.T).argmax(-1)
    assert all(torch.equal(one[0], greedy) for one in proposed)


@pytest.mark.parametrize(
    ("family", "draft", "key"),
    [
        ("medusa", {"head_dim": 16}, "head_dim"),
        ("medusa", {"draft_vocab_size": 32}, "draft_vocab_size"),
        ("medusa", {"aux_layer_ids": [1]}, "aux_layer_ids"),
        ("eagle3", {"one_head": False}, "one_head"),
        ("mtp", {"trains_head": False}, "trains_head"),
    ],
)
def test_a_setting_without_effect_is_refused(family: str, draft: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=f"draft.{key}' has no effect on family {family}"):
        make_recipe(family=family, draft={"num_speculative_tokens": 3, **draft})


def test_the_config_is_the_targets_width_and_vocabulary(target: TargetFacts) -> None:
    config = build_medusa_config(target, num_heads=4, num_layers=2)
    assert (config["hidden_size"], config["vocab_size"]) == (32, VOCAB)
    # vLLM folds every key with "num" and "heads" into num_heads
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    with pytest.raises(DraftError, match="0 residual layers"):
        build_medusa_config(target, num_heads=4, num_layers=0)


def test_names_of_old_checkpoints_and_tensors_that_vllm_drops_are_read(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """medusa_heads.H.L.linear, the output matrix as the last layer of the first head."""
    import json

    from safetensors.torch import save_file

    from paceline.train.replay import load_draft_module

    made = train_draft(
        recipe(optim__num_steps=2),
        target=target,
        data_dir=data_dir,
        out_dir=tmp_path / "d",
        device="cpu",
    )
    path = made.path / "model.safetensors"
    tensors = load_file(str(path))
    old = {
        name.replace("blocks.", "medusa_heads.").replace(".layers.0.", ".0.linear."): tensor
        for name, tensor in tensors.items()
        if name.startswith("blocks.")
    }
    old["medusa_heads.0.1.weight"] = tensors["lm_head.weight"]
    save_file(old, str(path), metadata={"format": "pt"})
    module = load_draft_module(read_draft(made.path))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, tensors[name].float())
    assert json.loads((made.path / "config.json").read_text())["original_lm_head"] is True
