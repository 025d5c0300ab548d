"""The contract against shapes worked out by hand, for the sizes of SmolLM2-135M and for a toy."""

from __future__ import annotations

import math

import pytest
from builders import build_config, build_target_facts, build_tensors

from paceline.draft import (
    build_contract,
    build_eagle3_config,
    canonical_name,
    default_aux_layer_ids,
    read_aux_layer_ids,
)
from paceline.errors import DraftError

SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "draft_vocab_size": 8000,
    "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
}


def test_smollm2_sizes() -> None:
    rules = build_contract("eagle3", SMOL).tensors
    shapes = {name: rule.shape for name, rule in rules.items() if rule.required}
    assert shapes == {
        "fc.weight": (576, 1728),
        "midlayer.input_layernorm.weight": (576,),
        "midlayer.hidden_norm.weight": (576,),
        "midlayer.post_attention_layernorm.weight": (576,),
        "midlayer.self_attn.q_proj.weight": (576, 1152),
        "midlayer.self_attn.k_proj.weight": (192, 1152),
        "midlayer.self_attn.v_proj.weight": (192, 1152),
        "midlayer.self_attn.o_proj.weight": (576, 576),
        "midlayer.mlp.gate_proj.weight": (1536, 576),
        "midlayer.mlp.up_proj.weight": (1536, 576),
        "midlayer.mlp.down_proj.weight": (576, 1536),
        "norm.weight": (576,),
        "lm_head.weight": (8000, 576),
        "d2t": (8000,),
    }
    own = sum(
        math.prod(shape) for name, shape in shapes.items() if name not in {"lm_head.weight", "d2t"}
    )
    assert own == 5_089_536  # the size that vLLM's own module has without its head
    assert rules["d2t"].dtypes == ("I64", "I32", "I16")  # vLLM copies each into int64


def test_full_vocabulary_needs_neither_head_nor_map() -> None:
    rules = build_contract("eagle3", {**SMOL, "draft_vocab_size": None}).tensors
    assert "d2t" not in rules
    assert not rules["lm_head.weight"].required
    assert rules["lm_head.weight"].shape == (49152, 576)


def test_options_change_the_tensors() -> None:
    config = {**SMOL, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}
    rules = build_contract("eagle3", config).tensors
    assert rules["midlayer.self_attn.k_proj.bias"].shape == (192,)
    assert rules["midlayer.mlp.down_proj.bias"].shape == (576,)
    assert rules["layers.1.self_attn.q_proj.weight"].shape == (576, 576)  # no embeddings there
    assert not rules["layers.1.hidden_norm.weight"].required
    norms = build_contract("eagle3", {**SMOL, "norm_before_fc": True, "fc_norm": True}).tensors
    assert norms["input_norm.weight"].shape == (1728,)
    assert [norms[f"fc_norm.{i}.weight"].shape for i in range(3)] == [(576,)] * 3


def test_a_draft_of_another_width_brings_its_own_ends() -> None:
    rules = build_contract("eagle3", {**SMOL, "target_hidden_size": 1024}).tensors
    assert rules["fc.weight"].shape == (576, 3072)
    assert rules["embed_tokens.weight"].required
    assert rules["lm_head.weight"].required


def test_builder_of_tests_and_contract_agree_on_names() -> None:
    config = build_config()
    rules = build_contract("eagle3", config).tensors
    built = build_tensors(config)
    assert {name: tensor[1] for name, tensor in built.items()} == {
        name: rule.shape for name, rule in rules.items() if rule.required or name in built
    }


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
@pytest.mark.parametrize("value", [None, 0, -1, True, "16", 2**40, 1.5])
def test_senseless_sizes_are_named(key: str, value: object) -> None:
    with pytest.raises(DraftError, match=f"config.json: {key}"):
        build_contract("eagle3", {**SMOL, key: value})


def test_families() -> None:
    assert build_contract("ngram", {}).tensors == {}
    for family in ("none", "hydra", ""):
        with pytest.raises(DraftError, match="no draft folder"):
            build_contract(family, {})


def test_layer_names_and_default_layers() -> None:
    assert canonical_name("layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert canonical_name("layers.01.x") == "layers.01.x"
    assert canonical_name("norm.weight") == "norm.weight"
    assert default_aux_layer_ids(30) == (2, 15, 27)
    assert default_aux_layer_ids(4) == (1, 2)
    ids = "eagle_aux_hidden_state_layer_ids"
    assert read_aux_layer_ids({ids: [], "eagle_config": {ids: [1, 2]}}) == (1, 2)
    assert read_aux_layer_ids({ids: [5], "eagle_config": {ids: [1, 2]}}) == (5,)
    assert read_aux_layer_ids({}) is None


# the config builder


def test_built_config_states_everything_and_fits_its_own_contract() -> None:
    target = build_target_facts(
        rope_parameters={"rope_type": "default", "rope_theta": 1e5, "mrope_section": [1, 1, 2]}
    )
    config = build_eagle3_config(target, aux_layer_ids=(1, 2, 4), draft_vocab_size=16)
    contract = build_contract("eagle3", config)
    assert set(config) <= set(contract.config_keys)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["head_dim"] == 4
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e5}
    assert config["num_aux_hidden_states"] == 3
    assert config["norm_before_residual"] is False
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == 32768
    assert target.rope_parameters["mrope_section"] == [1, 1, 2]
    assert build_eagle3_config(target, aux_layer_ids=[0])["draft_vocab_size"] == 64


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"aux_layer_ids": []}, "layer_ids"),
        ({"aux_layer_ids": [2, 1]}, "layer_ids"),
        ({"aux_layer_ids": [1, 1]}, "layer_ids"),
        ({"aux_layer_ids": [1, 5]}, "layer_ids"),
        ({"aux_layer_ids": [-1, 1]}, "layer_ids"),
        ({"aux_layer_ids": [1], "draft_vocab_size": 65}, "draft_vocab_size"),
        ({"aux_layer_ids": [1], "draft_vocab_size": 0}, "draft_vocab_size"),
        ({"aux_layer_ids": [1], "num_attention_heads": 3}, "num_attention_heads"),
        ({"aux_layer_ids": [1], "num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_impossible_configs_are_refused(options: dict[str, object], where: str) -> None:
    with pytest.raises(DraftError, match=where):
        build_eagle3_config(build_target_facts(), **options)  # type: ignore[arg-type]
