"""Family mtp through the whole room: the native head trained on, written, read back, replayed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from paceline.draft import read_draft, stitch_target
from paceline.errors import RecipeError, TargetError
from paceline.target import TargetFacts, read_target
from paceline.train import Recipe, build_recipe, read_recipe, replay_draft, train_draft
from paceline.train.entry import simulate_draft
from paceline.train.families.mtp_weights import read_native_head


@pytest.fixture(scope="module")
def target(hybrid: TargetFacts) -> TargetFacts:
    return hybrid


def recipe(**change: Any) -> Recipe:
    value: dict[str, Any] = {
        "family": "mtp",
        "seed": 3,
        "dtype": "float32",
        "draft": {"num_speculative_tokens": 3},
        "optim": {
            "lr": 3e-3,
            "num_steps": 60,
            "tokens_per_batch": 512,
            "max_length": 64,
        },
        "loss": {"soft": 1.0, "hard": 0.2, "position_weights": [1.0, 0.8, 0.64]},
    }
    for key, inner in change.items():
        value[key] = {**value[key], **inner} if isinstance(inner, dict) and key in value else inner
    return build_recipe(value)


@pytest.fixture(scope="module")
def trained(target: TargetFacts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("run")
    data = tiny.make_data(folder / "data", target)
    losses: list[float] = []
    draft = train_draft(
        recipe(),
        target=target,
        data_dir=data,
        out_dir=folder / "draft",
        device="cpu",
        on_progress=lambda p: losses.append(p.loss),
    )
    return {"draft": draft, "losses": losses, "data": data, "folder": folder}


def test_the_loss_falls_and_the_folder_is_the_contracts(trained: dict[str, Any]) -> None:
    losses, draft = trained["losses"], trained["draft"]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    again = read_draft(draft.path)
    assert again.family == "mtp"
    assert all(name.startswith("mtp.") for name in again.tensors)
    assert again.config["architectures"] == ["Qwen3_5ForCausalLM"]
    taken = again.metadata["trained"]["started_from"]["tensors"]
    assert sorted(taken) == sorted(again.tensors)
    assert again.metadata["trained"]["embeddings"] == "shared with the target"


def test_training_starts_at_the_native_head(
    target: TargetFacts, trained: dict[str, Any], tmp_path: Path
) -> None:
    short = recipe(optim={"num_steps": 1, "lr": 1e-9})
    draft = train_draft(
        short, target=target, data_dir=trained["data"], out_dir=tmp_path / "d", device="cpu"
    )
    native = read_native_head(target)
    for name, tensor in load_file(str(draft.path / "model.safetensors")).items():
        torch.testing.assert_close(
            tensor.float(), native[name].to(torch.bfloat16).float(), rtol=1e-2, atol=1e-6
        )


def test_replay_of_simulated_steps_agrees_with_itself(
    target: TargetFacts, trained: dict[str, Any]
) -> None:
    """Greedy text by transformers, steps by simulate_draft: the replay takes the same steps."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(target.path), dtype=torch.float32)
    prompts = [[5, 9, 17, 30], [8, 3, 44]]
    texts = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(20):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
        texts.append((prompt, ids[len(prompt) :]))
    walked = simulate_draft(trained["draft"], target, texts, dtype="float32")
    replay = replay_draft(
        trained["draft"],
        target,
        [(p, o, took) for (p, o), took in zip(texts, walked, strict=True)],
        dtype="float32",
    )
    assert replay.num_steps == sum(map(len, walked)) > 0
    assert replay.num_agree == replay.num_steps


def test_a_trained_head_can_be_stitched(
    target: TargetFacts, trained: dict[str, Any], tmp_path: Path
) -> None:
    tensors = load_file(str(trained["draft"].path / "model.safetensors"))
    out = stitch_target(target.path, tensors, tmp_path / "stitched")
    found = read_native_head(read_target(out))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "draft",
    [
        {"draft_vocab_size": 32},
        {"intermediate_size": 64},
        {"head_dim": 32},
        {"aux_layer_ids": [1, 2]},
    ],
)
def test_a_setting_without_effect_is_refused(
    target: TargetFacts, trained: dict[str, Any], tmp_path: Path, draft: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError, match=f"{next(iter(draft))}' has no effect"):
        train_draft(
            recipe(draft=draft),
            target=target,
            data_dir=trained["data"],
            out_dir=tmp_path / "d",
            device="cpu",
        )


def test_a_target_without_weights_of_a_head_is_named(target: TargetFacts, tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "bare"
    shutil.copytree(target.path, path)
    weights = load_file(str(path / "model.safetensors"))
    kept = {n: t for n, t in weights.items() if not n.startswith("mtp.")}
    save_file(kept, str(path / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"holds no tensor named mtp"):
        read_native_head(dataclasses.replace(target, path=path))


def test_an_eagle3_draft_starts_with_norms_as_the_target_means_them(
    target: TargetFacts, trained: dict[str, Any], tmp_path: Path
) -> None:
    """A hybrid's norms scale by 1 + w, a Llama draft's by w: a start at w would be almost zero."""
    value = recipe(optim={"num_steps": 1, "lr": 1e-9}).as_dict()
    value = {**value, "family": "eagle3", "draft": {"num_speculative_tokens": 3}}
    value["optim"] = {k: v for k, v in value["optim"].items() if v is not None}
    draft = train_draft(
        build_recipe(value),
        target=target,
        data_dir=trained["data"],
        out_dir=tmp_path / "d",
        device="cpu",
    )
    tensors = load_file(str(draft.path / "model.safetensors"))
    native = load_file(str(target.path / "model.safetensors"))["model.norm.weight"]
    torch.testing.assert_close(tensors["norm.weight"].float(), native + 1.0, rtol=1e-2, atol=0)
    assert float(tensors["midlayer.post_attention_layernorm.weight"].min()) > 0.5


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
def test_the_recipes_of_pocket_are_recipes(name: str) -> None:
    path = Path(__file__).parents[3] / "recipes" / "pocket" / f"{name}.toml"
    assert read_recipe(path).family == name


def test_a_draft_model_takes_a_hybrids_ends_and_none_of_its_layers(
    target: TargetFacts, trained: dict[str, Any], tmp_path: Path
) -> None:
    """Llama layers have no gate and no recurrent state; the final norm scales by w, not 1 + w."""
    value = recipe(optim={"num_steps": 1, "lr": 1e-9}).as_dict()
    value["optim"] = {k: v for k, v in value["optim"].items() if v is not None}
    value |= {"family": "draft_model", "draft": {"num_speculative_tokens": 3}, "loss": {}}
    draft = train_draft(
        build_recipe(value),
        target=target,
        data_dir=trained["data"],
        out_dir=tmp_path / "d",
        device="cpu",
    )
    tensors = load_file(str(draft.path / "model.safetensors"))
    native = load_file(str(target.path / "model.safetensors"))
    norm, embeddings = native["model.norm.weight"], native["model.embed_tokens.weight"]
    torch.testing.assert_close(tensors["model.norm.weight"].float(), norm + 1.0, rtol=1e-2, atol=0)
    torch.testing.assert_close(
        tensors["model.embed_tokens.weight"].float(), embeddings, rtol=1e-2, atol=1e-6
    )
    with pytest.raises(RecipeError, match="cannot be cut from a target of model_type 'qwen3_5"):
        train_draft(
            build_recipe({**value, "init": {"from": "target-layers"}}),
            target=target,
            data_dir=trained["data"],
            out_dir=tmp_path / "e",
            device="cpu",
        )
