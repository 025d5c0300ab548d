"""Contracts of all families against shapes worked out by hand; keys, types and what vLLM ignores.

The same contracts are held against vLLM's own loader in tests/flow/test_contracts_of_vllm.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from contract_cases import CASES, quantize

from paceline.draft import (
    FAMILIES,
    SPEC_KEYS,
    build_contract,
    check_config_keys,
    check_tensors,
    drafts_in_parallel,
    find_variant,
    read_dflash_layer_ids,
    read_mask_token_id,
    read_scheme,
)
from paceline.draft.spec import check_spec
from paceline.errors import DraftError
from paceline.methods import METHODS
from paceline.safetensors_header import TensorInfo

SMOL: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
}
SUFFIX = {"family": "suffix", "num_speculative_tokens": 4}
DFLASH = {
    **SMOL,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 14, 26]},
}


def shapes(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    rules = build_contract(family, config).tensors
    return {name: rule.shape for name, rule in rules.items() if rule.required}


def test_medusa() -> None:
    config = {"hidden_size": 576, "vocab_size": 49152, "num_heads": 3, "num_hidden_layers": 2}
    own = shapes("medusa", {**config, "medusa_fc_bias": True})
    assert own == {
        **{f"blocks.{h}.layers.{i}.weight": (576, 576) for h in range(3) for i in range(2)},
        **{f"blocks.{h}.layers.{i}.bias": (576,) for h in range(3) for i in range(2)},
        **{f"lm_heads.{h}.weight": (49152, 576) for h in range(3)},
    }
    shared = shapes("medusa", {**config, "original_lm_head": True, "num_hidden_layers": 1})
    assert shared == {
        **{f"blocks.{h}.layers.0.weight": (576, 576) for h in range(3)},
        "lm_head.weight": (49152, 576),
    }
    none = shapes("medusa", {**config, "original_lm_head": True, "num_hidden_layers": 0})
    assert none == {"lm_head.weight": (49152, 576)}


def test_medusa_reads_the_keys_that_vllm_folds() -> None:
    old = {"hidden_size": 8, "vocab_size": 64, "medusa_num_heads": 2, "medusa_num_layers": 1}
    assert "blocks.1.layers.0.weight" in shapes("medusa", old)
    with pytest.raises(DraftError, match="2 keys hold 'num' and 'heads'"):
        build_contract("medusa", {**old, "num_heads": 3})
    with pytest.raises(DraftError, match="refuses to load any token_map"):
        build_contract("medusa", {**old, "truncated_vocab_size": 32})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("medusa_heads.0.0.linear.weight", "blocks.0.layers.0.weight"),
        ("1.0.linear.bias", "blocks.1.layers.0.bias"),
        ("2.1.weight", "lm_heads.2.weight"),
        ("lm_heads.0.weight", "lm_head.weight"),
        ("blocks.0.layers.0.weight", "blocks.0.layers.0.weight"),
    ],
)
def test_medusas_old_names(theirs: str, ours: str) -> None:
    config = {"hidden_size": 8, "vocab_size": 64, "num_heads": 3, "original_lm_head": True}
    assert build_contract("medusa", config).canonical(theirs) == ours


def test_dflash() -> None:
    assert shapes("dflash", DFLASH) == {
        "fc.weight": (576, 3 * 576),
        "norm.weight": (576,),
        "hidden_norm.weight": (576,),
        "layers.0.input_layernorm.weight": (576,),
        "layers.0.post_attention_layernorm.weight": (576,),
        "layers.0.self_attn.q_norm.weight": (64,),
        "layers.0.self_attn.k_norm.weight": (64,),
        "layers.0.self_attn.q_proj.weight": (576, 576),
        "layers.0.self_attn.k_proj.weight": (192, 576),
        "layers.0.self_attn.v_proj.weight": (192, 576),
        "layers.0.self_attn.o_proj.weight": (576, 576),
        "layers.0.mlp.gate_proj.weight": (1536, 576),
        "layers.0.mlp.up_proj.weight": (1536, 576),
        "layers.0.mlp.down_proj.weight": (576, 1536),
    }
    biased = shapes("dflash", {**DFLASH, "attention_bias": True})
    assert biased["layers.0.self_attn.o_proj.bias"] == (576,)  # DFlash has it, Qwen3 has not
    cut = shapes("dflash", {**DFLASH, "draft_vocab_size": 8000})
    assert (cut["lm_head.weight"], cut["d2t"]) == ((8000, 576), (8000,))
    # without ids vLLM counts the draft's own layers
    untold = {**DFLASH, "dflash_config": {"mask_token_id": 9}, "num_hidden_layers": 2}
    assert shapes("dflash", untold)["fc.weight"] == (576, 2 * 576)


def test_dflash_counts_layers_one_below_eagle3() -> None:
    assert read_dflash_layer_ids(DFLASH) == (2, 15, 27)
    both = {**DFLASH, "eagle_aux_hidden_state_layer_ids": [3, 4]}
    assert read_dflash_layer_ids(both) == (3, 4)
    assert read_dflash_layer_ids({}) is None


def test_eagle3_on_qwen3s_layer() -> None:
    config = {
        **SMOL,
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": True,
        "mlp_bias": True,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
    }
    found = shapes("eagle3", config)
    assert found["midlayer.self_attn.q_norm.weight"] == (64,)
    assert found["midlayer.self_attn.q_proj.bias"] == (576,)
    assert "midlayer.self_attn.o_proj.bias" not in found
    assert "midlayer.mlp.up_proj.bias" not in found
    unstated = {key: value for key, value in config.items() if key != "head_dim"}
    assert shapes("eagle3", unstated)["midlayer.self_attn.q_proj.weight"] == (9 * 128, 1152)


def test_parallel_eagle3() -> None:
    config = {**SMOL, "eagle_aux_hidden_state_layer_ids": [2, 15, 27], "mask_token_id": 7}
    assert drafts_in_parallel(config)
    assert not drafts_in_parallel(SMOL)
    rule = build_contract("eagle3", config).tensors["mask_hidden"]
    assert (rule.shape, rule.also) == ((1, 1728), ((1728,), (1, 1, 1728)))
    assert read_mask_token_id({"pard_token": 3}) == 3
    assert read_mask_token_id({"mask_token_id": 4, "pard_token": 3}) == 4
    assert read_mask_token_id(DFLASH) == 9
    assert read_mask_token_id({}) is None


@pytest.mark.parametrize(
    ("architecture", "model_type", "differs"),
    [
        ("LlamaForCausalLM", "llama", {}),
        (
            "Qwen3ForCausalLM",
            "qwen3",
            {
                "model.layers.0.self_attn.q_norm.weight": (64,),
                "model.layers.0.self_attn.k_norm.weight": (64,),
            },
        ),
        (
            "Qwen2ForCausalLM",
            "qwen2",
            {
                "model.layers.0.self_attn.q_proj.bias": (576,),
                "model.layers.0.self_attn.k_proj.bias": (192,),
                "model.layers.0.self_attn.v_proj.bias": (192,),
            },
        ),
    ],
)
def test_whole_models(architecture: str, model_type: str, differs: dict[str, Any]) -> None:
    config = {**SMOL, "architectures": [architecture], "model_type": model_type}
    assert shapes("draft_model", config) == {
        "model.embed_tokens.weight": (49152, 576),
        "model.norm.weight": (576,),
        "lm_head.weight": (49152, 576),
        "model.layers.0.input_layernorm.weight": (576,),
        "model.layers.0.post_attention_layernorm.weight": (576,),
        "model.layers.0.self_attn.q_proj.weight": (576, 576),
        "model.layers.0.self_attn.k_proj.weight": (192, 576),
        "model.layers.0.self_attn.v_proj.weight": (192, 576),
        "model.layers.0.self_attn.o_proj.weight": (576, 576),
        "model.layers.0.mlp.gate_proj.weight": (1536, 576),
        "model.layers.0.mlp.up_proj.weight": (1536, 576),
        "model.layers.0.mlp.down_proj.weight": (576, 1536),
        **differs,
    }
    tied = build_contract("draft_model", {**config, "tie_word_embeddings": True}).tensors
    assert not tied["lm_head.weight"].required
    assert tied["lm_head.weight"].unread


def test_qwen2_never_reads_head_dim() -> None:
    config = {
        **SMOL,
        "head_dim": 32,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {},
    }
    assert shapes("draft_model", config)["model.layers.0.self_attn.q_proj.weight"] == (576, 576)
    told = check_config_keys("draft_model", config)
    assert [(p.rule, p.where) for p in told] == [("cfg.unread", "head_dim")]
    assert "hidden_size / num_attention_heads" in told[0].message


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, False),
        ({"sliding_window": 512}, False),  # no layer slides: nobody expects it to
        ({"layer_types": ["sliding_attention"], "sliding_window": 512}, True),
        (
            {
                "layer_types": ["sliding_attention"],
                "sliding_window": 512,
                "use_sliding_window": True,
            },
            False,
        ),
        (
            {
                "layer_types": ["sliding_attention"],
                "dflash_config": {"mask_token_id": 9, "swa_window_size": 512},
            },
            False,
        ),
    ],
)
def test_a_window_that_qwens_config_drops(change: dict[str, Any], is_told: bool) -> None:
    told = [p.where for p in check_config_keys("dflash", {**DFLASH, **change})]
    assert ("sliding_window" in told) == is_told


# quantised layers: words and scales by hand


def test_int4_in_groups() -> None:
    config = {**SMOL, "quantization_config": quantize("int", 4, 64)}
    names = {"fc.weight_packed", "midlayer.mlp.down_proj.weight_scale"}
    rules = build_contract("eagle3", config).rules_for(names)
    assert "fc.weight" not in rules
    assert rules["fc.weight_packed"].shape == (576, 1728 // 8)
    assert rules["fc.weight_packed"].dtypes == ("I32",)
    assert rules["fc.weight_scale"].shape == (576, 1728 // 64)
    assert rules["fc.weight_shape"].shape == (2,)
    assert rules["midlayer.mlp.down_proj.weight_packed"].shape == (576, 1536 // 8)
    # the config decides, not the file: nothing of it is there, and it is asked for
    assert rules["midlayer.mlp.up_proj.weight_packed"].shape == (1536, 576 // 8)
    assert rules["lm_head.weight"].shape == (49152, 576)


@pytest.mark.parametrize(
    ("family", "entry", "plain"),
    [  # as vLLM's loader answered, family by family
        ("eagle3", "re:.*mlp.*", ("gate_proj", "up_proj", "down_proj")),
        ("eagle3", "re:.*q_proj", ()),  # vLLM knows q, k, v as one
        ("eagle3", "re:.*qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("eagle3", "midlayer.mlp.down_proj", ()),  # by no name of vLLM's
        ("eagle3", "re:model.layers.*.mlp.down_proj", ("down_proj",)),
        ("draft_model", "model.layers.0.mlp.down_proj", ("down_proj",)),
        ("eagle3", "fc", ()),
        ("eagle3", "model.fc", ("fc",)),
        ("draft_model", "re:.*q_proj", ("q_proj",)),
        ("draft_model", "lm_head", ()),
    ],
)
def test_what_an_ignore_list_leaves_plain(family: str, entry: str, plain: tuple[str, ...]) -> None:
    settings = {**quantize("float", 8, None), "ignore": ["lm_head", entry]}
    base = SMOL if family == "eagle3" else {**SMOL, "architectures": ["LlamaForCausalLM"]}
    rules = build_contract(family, {**base, "quantization_config": settings}).rules_for(())
    found = {
        name.split(".")[-2]
        for name, rule in rules.items()
        if rule.is_linear and name.endswith(".weight") and f"{name}_scale" not in rules
    }
    assert found == set(plain)


@pytest.mark.parametrize("entry", ["model.layers.{}.mlp.down_proj", "re:.*layers\\.{}\\..*down.*"])
def test_an_ignored_layer_by_its_number(entry: str) -> None:
    """vLLM calls it model.layers.30 on a target of 30 layers, and never 0: with a target the number
    decides, without one how the layer is stored."""
    down, scale = "midlayer.mlp.down_proj.weight", "midlayer.mlp.down_proj.weight_scale"
    for number, num_layers, is_plain in ((30, 30, True), (0, 30, False), (30, 32, False)):
        settings = {**quantize("float", 8, None), "ignore": [entry.format(number)]}
        contract = build_contract("eagle3", {**SMOL, "quantization_config": settings})
        assert scale not in contract.rules_for({down})
        assert scale in contract.rules_for({down, scale})
        served = dataclasses.replace(contract, num_target_layers=num_layers)
        assert (scale not in served.rules_for({down})) == is_plain
        assert (scale not in served.rules_for({down, scale})) == is_plain


@pytest.mark.parametrize(
    "change",
    [
        {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"ignore": "lm_head"},
        {"ignore": [3]},
        {"weights": {"actorder": "group"}},
        {"weights": {"block_structure": [2, 2]}},
        {"format": "naive-quantized"},
    ],
)
def test_settings_of_a_scheme_that_vllm_stops_at_or_turns_by(change: dict[str, Any]) -> None:
    settings = quantize("int", 4, 32)
    group = settings["config_groups"]["group_0"]
    if "weights" in change:
        group["weights"] |= change["weights"]
    elif "format" in change:
        group |= change
    else:
        settings |= change
    with pytest.raises(DraftError):
        read_scheme("eagle3", {"quantization_config": settings})


def test_int8_by_rows_and_fp8() -> None:
    packed = build_contract("eagle3", {**SMOL, "quantization_config": quantize("int", 8, None)})
    rules = packed.rules_for({"fc.weight_scale"})
    assert rules["fc.weight_packed"].shape == (576, 1728 // 4)
    assert rules["fc.weight_scale"].shape == (576, 1)
    floats = build_contract("eagle3", {**SMOL, "quantization_config": quantize("float", 8, None)})
    rules = floats.rules_for({"fc.weight_scale"})
    assert (rules["fc.weight"].shape, rules["fc.weight"].dtypes) == ((576, 1728), ("F8_E4M3",))
    assert rules["fc.weight_scale"].shape == (576, 1)


def test_a_group_that_does_not_divide_and_schemes_that_are_not_known() -> None:
    config = {**SMOL, "quantization_config": quantize("int", 4, 128)}
    contract = build_contract("eagle3", config)
    tensor = TensorInfo(name="fc.weight_packed", dtype="I32", shape=(576, 216), start=0, end=0)
    problems = check_tensors(contract, {"f": {tensor.name: tensor}})
    assert [(p.rule, p.message) for p in problems] == [
        ("q.group", "group_size 128 does not divide the 1728 inputs of 'fc'")
    ]
    for change in (
        {"quant_method": "gptq"},
        {"format": "dense"},
        {"config_groups": {}},
        {"config_groups": {"a": {}, "b": {}}},
    ):
        with pytest.raises(DraftError, match="is"):
            read_scheme("eagle3", {"quantization_config": {**quantize("int", 4, 32), **change}})
    with pytest.raises(DraftError, match="one of eagle3, dflash, draft_model"):
        read_scheme("mtp", {"quantization_config": quantize("int", 4, 32)})
    assert read_scheme("eagle3", {}) is None


# the table as a whole


def test_every_family_of_the_table_is_a_method() -> None:
    assert set(FAMILIES) == set(SPEC_KEYS) == set(METHODS) - {"none"}
    for name, family in FAMILIES.items():
        assert bool(family.variants) == METHODS[name].has_weights
        assert SPEC_KEYS[name][:2] == ("family", "num_speculative_tokens")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sound_configs_are_told_nothing(case: Any) -> None:
    assert find_variant(case.family, case.config) is not None
    assert check_config_keys(case.family, case.config) == []


@pytest.mark.parametrize("case", [c for c in CASES if c.with_faults], ids=lambda case: case.name)
def test_wrong_types_of_every_key_are_named(case: Any) -> None:
    for key in case.config:
        for wrong in ([[]], {"a": [1]}, "x" if key not in ("dtype", "model_type") else 5):
            problems = check_config_keys(case.family, {**case.config, key: wrong})
            if key == "quantization_config" and isinstance(wrong, dict):
                continue  # an object; its content is the scheme's matter
            if key in ("rope_parameters", "dflash_config") and isinstance(wrong, dict):
                continue
            assert any(key in p.where for p in problems), (key, wrong)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("draft_vocab_size", None),  # null is how exporters say "not stated"
        ("head_dim", None),
        ("sliding_window", None),
        ("hidden_act", "json.type"),  # and where vLLM stops at null
        ("rms_norm_eps", "json.type"),
        ("hidden_size", "cfg.missing"),
    ],
)
def test_null(key: str, rule: str | None) -> None:
    eagle3 = next(case for case in CASES if case.family == "eagle3").config
    told = check_config_keys("eagle3", {**eagle3, key: None})
    assert [p.rule for p in told] == ([] if rule is None else [rule])


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        (SUFFIX, None),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 2}, "k.range"),
        ({"family": "medusa", "num_speculative_tokens": 4}, None),
        ({"family": "medusa"}, "k.range"),
        ({"family": "dflash", "num_speculative_tokens": True}, "k.range"),
        ({"family": "draft_model", "num_speculative_tokens": 3, "block_size": 4}, "spec.keys"),
        ({"family": "hydra", "num_speculative_tokens": 3}, "cfg.family"),
        ({"family": "none", "num_speculative_tokens": 3}, "cfg.family"),
    ],
)
def test_settings_of_each_family(spec: dict[str, Any], rule: str | None) -> None:
    assert [p.rule for p in check_spec(spec)] == ([] if rule is None else [rule])
