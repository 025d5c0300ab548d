"""Family draft_model: its pass against transformers', cut and trained, written, replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB, make_recipe
from whole_room import require_learnt, require_replay_agrees, train_and_watch

from paceline.draft import build_draft_model_config, read_draft
from paceline.errors import DraftError, RecipeError
from paceline.target import TargetFacts
from paceline.train import Recipe, build_recipe, train_draft
from paceline.train.families.draft_model import build_module
from paceline.train.families.draft_model_weights import spread_layers

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def recipe(**change: Any) -> Recipe:
    draft = {"num_speculative_tokens": 3, "num_layers": 2, **change.pop("draft", {})}
    return make_recipe(
        family="draft_model",
        draft={key: value for key, value in draft.items() if value is not None},
        **{"optim__num_steps": 60, "optim__lr": 3e-3, **change},
    )


@pytest.mark.parametrize(
    ("kind", "tied", "bias"),
    [("llama", True, False), ("llama", False, True), ("qwen3", False, False)],
)
def test_every_step_is_transformers_own_greedy_step(kind: str, tied: bool, bias: bool) -> None:
    """In float64 (rope in float32 there), from several bases at once, each on its own proposals."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = {**CONFIG, "model_type": kind, "tie_word_embeddings": tied, "attention_bias": bias}
    torch.manual_seed(3)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**config))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.ndim == 2 else 0.6))
    model = model.double().eval()
    module = build_module(config).double()
    names = module.state_dict().keys()
    module.load_state_dict({n: t for n, t in model.state_dict().items() if n in names})
    tokens = torch.randint(0, VOCAB, (2, 12))
    bases = torch.tensor([[0, 4, 10], [2, 7, 9]])
    features = torch.zeros(2, 12, 1, dtype=torch.float64)
    ends = torch.zeros(VOCAB, 32, dtype=torch.float64)
    states, proposed = module.unroll(tokens, features, bases, ends, num_steps=3, head_VD=ends)
    (head,) = module.output_heads(ends)
    for row in range(2):
        for place in range(3):
            ids = tokens[row, : bases[row, place] + 2].tolist()
            for step in range(3):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(
                    head @ states[step][row, place], logits, rtol=1e-5, atol=1e-5
                )
                ids.append(int(logits.argmax()))
                assert int(proposed[step][row, place]) == ids[-1]
    # training: the text's own tokens, every step the next place of one pass
    taught, none = module.unroll(tokens, features, bases[:, :1], ends, num_steps=3)
    logits = model(input_ids=tokens, use_cache=False).logits
    assert none == []
    for row in range(2):
        for step in range(3):
            at = int(bases[row, 0]) + 1 + step
            torch.testing.assert_close(
                head @ taught[step][row, 0], logits[row, at], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize(
    "draft", [{}, {"own_head": True, "hidden_size": 16, "num_attention_heads": 2}], ids=["", "own"]
)
def test_trained_written_read_back_and_replayed(
    target: TargetFacts, data_dir: Path, tmp_path: Path, draft: dict[str, Any]
) -> None:
    found, losses = train_and_watch(recipe(draft=draft), target, data_dir, tmp_path / "d")
    require_learnt(losses, share=0.8)
    again = read_draft(found.path)
    assert again.config["architectures"] == ["LlamaForCausalLM"]
    assert ("lm_head.weight" in again.tensors) == bool(draft)
    taken = again.metadata["trained"]["started_from"]["tensors"]
    assert taken == ([] if draft else ["model.embed_tokens.weight", "model.norm.weight"])
    assert again.metadata["trained"]["recipe"]["loss"]["position_weights"] == [1.0]
    require_replay_agrees(again, target)


def test_an_untrained_cut_is_the_targets_layers(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """All four layers cut: the draft is the target, and says what the target says."""
    from paceline.train.replay import load_draft_module

    cut = recipe(
        draft={"num_layers": 4},
        init={"from": "target-layers"},
        optim__num_steps=1,
        optim__lr=1e-12,
    )
    draft = train_draft(cut, target=target, data_dir=data_dir, out_dir=tmp_path / "d", device="cpu")
    tensors = load_file(str(draft.path / "model.safetensors"))
    own = load_file(str(target.path / "model.safetensors"))
    assert sorted(tensors) == sorted(own)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.float(), own[name], rtol=1e-2, atol=1e-6)
    assert draft.metadata["trained"]["started_from"]["tensors"] == sorted(tensors)
    build_module(draft.config).load_state_dict({n: t.float() for n, t in tensors.items()})
    assert len(load_draft_module(draft).state_dict()) == len(tensors)


def test_which_layers_are_cut(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    cut = recipe(
        init={"from": "target-layers", "layers": [3, 1]}, optim__num_steps=1, optim__lr=1e-12
    )
    draft = train_draft(cut, target=target, data_dir=data_dir, out_dir=tmp_path / "d", device="cpu")
    tensors = load_file(str(draft.path / "model.safetensors"))
    own = load_file(str(target.path / "model.safetensors"))
    for mine, theirs in ((0, 3), (1, 1)):
        name = "self_attn.k_proj.weight"
        torch.testing.assert_close(
            tensors[f"model.layers.{mine}.{name}"].float(),
            own[f"model.layers.{theirs}.{name}"],
            rtol=1e-2,
            atol=1e-6,
        )
    assert spread_layers(1, 30) == (15,)
    assert spread_layers(2, 30) == (0, 29)
    assert spread_layers(4, 30) == (0, 10, 19, 29)


def test_a_cut_that_does_not_fit_is_refused(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    def run(wanted: Recipe) -> None:
        train_draft(wanted, target=target, data_dir=data_dir, out_dir=tmp_path / "d", device="cpu")

    with pytest.raises(RecipeError, match="target layer 0 does not fit the draft's: 'mlp"):
        run(recipe(draft={"intermediate_size": 64}, init={"from": "target-layers"}))
    with pytest.raises(RecipeError, match=r"'init.layers' is \[0, 9\]"):
        run(recipe(init={"from": "target-layers", "layers": [0, 9]}))
    with pytest.raises(RecipeError, match=r"'init.layers' is \[0\]"):
        run(recipe(init={"from": "target-layers", "layers": [0]}))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"init": {"from": "target", "layers": [0, 1]}}, r"'init.layers' is \[0, 1\]"),
        ({"draft": {"draft_vocab_size": 32}}, "'draft.draft_vocab_size' has no effect"),
        ({"draft": {"one_head": False}}, "'draft.one_head' has no effect"),
        ({"loss": {"position_weights": [1.0, 0.8, 0.6]}}, "'loss.position_weights' is"),
    ],
)
def test_a_setting_without_effect_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe(**change)
    with pytest.raises(RecipeError, match=r"'init.from' is 'target-layers'"):
        make_recipe(init={"from": "target-layers"})


def test_a_recipe_comes_back_from_its_record() -> None:
    made = recipe(init={"from": "target-layers", "layers": [3, 1]})
    value = made.as_dict()
    for table in ("draft", "optim", "init"):
        value[table] = {key: found for key, found in value[table].items() if found is not None}
    assert build_recipe(value, where="made.toml") == made


def test_sizes_that_vllm_refuses(target: TargetFacts) -> None:
    with pytest.raises(DraftError, match="hidden_size 32 is not a multiple of 3"):
        build_draft_model_config(target, num_layers=1, num_attention_heads=3)
    with pytest.raises(DraftError, match="4 attention heads cannot share 3"):
        build_draft_model_config(target, num_layers=1, num_key_value_heads=3)
    with pytest.raises(DraftError, match="model_type 'qwen2'"):
        build_module({**CONFIG, "model_type": "qwen2"})


def test_an_untrained_cut_is_caught_and_a_draft_of_its_own_is_not(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """The contest's rule: layers of the target are not a draft; `validate --deep` compares them."""
    from paceline.rules import read_rules
    from paceline.validate import validate_draft

    rules = read_rules("emc2-2027")
    told = {}
    for name, start, lr in (
        ("cut", "target-layers", 1e-12),
        ("on", "target-layers", 2e-2),
        ("own", "target", 3e-3),
    ):
        draft = train_draft(
            recipe(
                draft={"num_layers": 2},
                init={"from": start},
                optim__lr=lr,
                optim__num_steps=1 if name == "cut" else 60,
            ),
            target=target,
            data_dir=data_dir,
            out_dir=tmp_path / name,
            device="cpu",
        )
        report = validate_draft(draft.path, target=target, rules=rules, deep=True)
        told[name] = {f.rule: f for f in report.findings if f.rule in ("ten.copy", "ten.start")}
    copy = told["cut"]["ten.copy"]
    assert copy.severity == "error"
    assert "is a copy of the target's 'model.layers.0.mlp.down_proj.weight'" in copy.message
    assert "13 other matrices likewise" in copy.message
    # trained on from them: said, and no error where metadata.json says so too
    assert told["on"]["ten.start"].severity == "note"
    assert "ten.copy" not in told["on"]
    assert told["own"] == {}  # the ends may be the target's
