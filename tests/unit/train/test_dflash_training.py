"""Block drafts through the whole room: dflash and parallel EAGLE-3 trained, written, replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_data, make_recipe
from toy_hybrid import make_toy_hybrid
from whole_room import require_learnt, require_replay_agrees, train_and_watch

from paceline.draft import (
    build_dflash_config,
    drafts_in_parallel,
    read_dflash_attention,
    read_draft,
)
from paceline.errors import PacelineError, RecipeError
from paceline.target import TargetFacts, read_target
from paceline.train import Recipe, read_recipe, train_draft
from paceline.train.families.dflash import build_module
from paceline.train.families.dflash_weights import start_dflash_from_target
from paceline.train.features import load_frozen_target

RECIPES = Path(__file__).parents[3] / "recipes"

MASK = 63  # stands in no row

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"family": "dflash", "draft__mask_token_id": MASK},
    "dflash-window": {
        "family": "dflash",
        "draft__mask_token_id": MASK,
        "draft__num_layers": 2,
        "draft__causal": True,
        "draft__sliding_window": 8,
        "draft__draft_vocab_size": 40,
    },
    "parallel": {"draft__parallel": True, "draft__mask_token_id": MASK},
    "parallel-vocab": {
        "draft__parallel": True,
        "draft__mask_token_id": MASK,
        "draft__draft_vocab_size": 40,
    },
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory, target: TargetFacts) -> Path:
    return make_data(tmp_path_factory.mktemp("rows") / "data", target, top=MASK)


def build(kind: str, **changes: Any) -> Recipe:
    return make_recipe(**{**KINDS[kind], **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_the_folder_is_the_contracts(
    kind: str, target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    draft, losses = train_and_watch(
        build(kind, optim__num_steps=60, optim__lr=3e-3), target, data_dir, tmp_path / "draft"
    )
    require_learnt(losses, share=0.85)
    again = read_draft(draft.path)
    assert again.tensors.keys() == draft.tensors.keys()
    trained = again.metadata["trained"]
    assert "norm.weight" in trained["started_from"]["tensors"]
    if again.family == "dflash":
        assert again.config["block_size"] == 4
        assert again.config["dflash_config"]["target_layer_ids"] == [0, 1, 2]
        window, causal = read_dflash_attention(again.config)[0]
        assert (window, causal) == ((8, True) if kind == "dflash-window" else (None, False))
        assert not drafts_in_parallel(again.config)
    else:
        assert drafts_in_parallel(again.config)
        assert again.tensors["mask_hidden"].shape == (1, 96)
        mask = load_file(str(again.path / "model.safetensors"))["mask_hidden"]
        assert float(mask.float().std()) > 0.01  # trained, not left at zero


@pytest.mark.parametrize("kind", ["dflash", "parallel-vocab"])
def test_replay_of_simulated_steps_agrees_with_itself(
    kind: str, target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    draft, _ = train_and_watch(
        build(kind, optim__num_steps=40), target, data_dir, tmp_path / "draft"
    )
    model = AutoModelForCausalLM.from_pretrained(str(target.path), dtype=torch.float32)
    texts = []
    for prompt in ([5, 9, 17, 30], [8, 3, 44]):
        full = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0].tolist()
        texts.append((prompt, full[len(prompt) :]))
    require_replay_agrees(draft, target, texts, min_steps=11)


@pytest.mark.parametrize("kind", ["dflash", "parallel"])
def test_resume_with_anchors_is_bit_identical(
    kind: str, target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    recipe = build(kind, optim__anchors_per_row=4)
    straight, whole = train_and_watch(recipe, target, data_dir, tmp_path / "a")
    steps = 0

    def die(progress: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 13:
            raise RuntimeError("killed")

    settings: dict[str, Any] = {"target": target, "data_dir": data_dir, "device": "cpu"}
    with pytest.raises(RuntimeError, match="killed"):
        train_draft(recipe, out_dir=tmp_path / "b", on_progress=die, **settings)
    resumed, after = train_and_watch(recipe, target, data_dir, tmp_path / "b", resume=True)
    assert after == whole[10:]
    one, other = (load_file(str(d.path / "model.safetensors")) for d in (straight, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    dense, _ = train_and_watch(build(kind), target, data_dir, tmp_path / "c")
    every = load_file(str(dense.path / "model.safetensors"))
    assert not torch.equal(one["fc.weight"], every["fc.weight"])


def test_a_draft_goes_on_from_another_of_its_shape(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    first, _ = train_and_watch(build("dflash"), target, data_dir, tmp_path / "first")
    again = build("dflash", init__from=str(first.path), optim__num_steps=1, optim__lr=1e-9)
    second, _ = train_and_watch(again, target, data_dir, tmp_path / "second")
    one, other = (load_file(str(d.path / "model.safetensors")) for d in (first, second))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor.float(), other[name].float(), rtol=1e-2, atol=1e-6)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return read_target(make_toy_hybrid(tmp_path_factory.mktemp("hybrid") / "toy", num_steps=0))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_first_weights_of_a_hybrid_are_what_fits_with_norms_as_a_draft_reads_them(
    hybrid: TargetFacts, num_layers: int
) -> None:
    """The target's norms scale by 1 + weight, the draft's by weight; gated queries do not fit."""
    frozen = load_frozen_target(hybrid, device="cpu", dtype=torch.float32)
    last = frozen.backbone.layers[-1]
    with torch.no_grad():
        for norm in (last.self_attn.k_norm, last.input_layernorm):
            norm.weight += 0.25
    config = build_dflash_config(
        hybrid,
        aux_layer_ids=[1, 2, 3],
        mask_token_id=127,
        num_speculative_tokens=3,
        num_hidden_layers=num_layers,
    )
    module = build_module(config)
    taken = start_dflash_from_target(module, frozen, draft_tokens=None)
    top = f"layers.{num_layers - 1}."
    state = module.state_dict()
    assert torch.equal(state[f"{top}self_attn.k_norm.weight"], last.self_attn.k_norm.weight + 1)
    assert torch.equal(state[f"{top}self_attn.k_proj.weight"], last.self_attn.k_proj.weight)
    assert f"{top}self_attn.q_proj.weight" not in taken
    assert {f"{top}mlp.up_proj.weight", f"{top}self_attn.o_proj.weight", "norm.weight"} < set(taken)
    if num_layers == 1:  # of two, the first stands for a recurrent layer
        assert torch.equal(state["hidden_norm.weight"], last.input_layernorm.weight + 1)


@pytest.mark.parametrize(
    "name", [f"{t}/{n}" for t in ("pocket", "smollm2") for n in ("dflash", "eagle3-parallel")]
)
def test_recipes_name_a_token_that_is_not_an_end(name: str) -> None:
    recipe = read_recipe(RECIPES / f"{name}.toml")
    assert recipe.draft.parallel == name.endswith("parallel")
    assert recipe.draft.mask_token_id == (127 if name.startswith("pocket") else 16)
    assert recipe.draft.num_layers in (None, 1)  # what a CPU serves right


def test_pockets_mask_is_a_byte_that_no_text_holds() -> None:
    from tokenizers import Tokenizer

    target = read_target("pocket")
    tokenizer = Tokenizer.from_file(str(target.path / "tokenizer.json"))
    token = read_recipe(RECIPES / "pocket" / "dflash.toml").draft.mask_token_id
    assert tokenizer.id_to_token(token) == chr(0xC0)  # the byte C0 in a byte-level vocabulary
    assert token not in tokenizer.encode("À la carte, ÀÁÂ, 名前, 🙂").ids


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("dflash", {"draft__mask_token_id": None}, "mask_token_id' is missing"),
        ("parallel", {"draft__mask_token_id": None}, "mask_token_id' is missing"),
        ("parallel", {"draft__parallel": None}, "no effect without draft.parallel"),
        ("dflash", {"draft__parallel": True}, "no effect on family dflash"),
        ("parallel", {"draft__causal": True}, "no effect on family eagle3"),
        ("dflash", {"draft__norm_before_residual": True}, "no effect on family dflash"),
        ("dflash", {"draft__sliding_window": 0}, "at least 1"),
        ("dflash", {"optim__anchors_per_row": 0}, "at least 1"),
        ("dflash", {"family": "mtp"}, "no effect"),
        ("dflash", {"draft__mask_token_id": -1}, "is -1"),
    ],
)
def test_settings_that_contradict_are_refused(
    kind: str, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(RecipeError, match=word):
        build(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("dflash", {"draft__mask_token_id": 2}, "mask_token_id 2"),  # the end token
        ("parallel", {"draft__mask_token_id": 64}, "mask_token_id 64"),
        ("dflash", {"draft__mask_token_id": 7}, "stands in"),
        ("dflash", {"draft__aux_layer_ids": [0, 1, 2]}, "tapped layers"),
        ("dflash", {"draft__aux_layer_ids": [1, 2, 4]}, "names layer 4"),
        ("dflash", {"draft__sliding_window": 3}, "sliding_window 3"),
        ("dflash", {"draft__num_key_value_heads": 3}, "cannot share 3 key-value heads"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_step(
    kind: str,
    changes: dict[str, Any],
    word: str,
    target: TargetFacts,
    data_dir: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(PacelineError, match=word):
        train_and_watch(build(kind, **changes), target, data_dir, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []
