"""One setting changed at a time: which rule answers, and how loudly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    REMOVE,
    build_config,
    build_draft,
    build_target_facts,
    build_tensors,
    encode_d2t,
)
from contract_cases import CASES, build_tensors_of, write_folder

from paceline.draft import read_draft
from paceline.errors import DraftError
from paceline.rules import read_rules
from paceline.validate import validate_draft

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {
    **ROPE,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {**ROPE, "rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.5, 2.0]}


def answers(folder: Path, **options: Any) -> dict[str, str]:
    """rule -> loudest severity, notes about what was not looked at left out."""
    report = validate_draft(folder, target=build_target_facts(folder.parent), **options)
    quiet = {"mem.est", "not.checked"}
    found: dict[str, str] = {}
    for item in report.findings:  # loudest first
        if item.rule not in quiet and not (item.rule == "cfg.heads" and item.severity == "note"):
            found.setdefault(item.rule, item.severity)
    return found


@pytest.mark.parametrize(
    ("change", "rule", "severity"),
    [
        ({"architectures": REMOVE}, "cfg.arch", "error"),
        ({"architectures": ["LlamaForCausalLMEagle3"] * 2}, "cfg.arch", "error"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "cfg.arch", "error"),
        ({"hidden_size": "16"}, "json.type", "error"),
        ({"norm_before_residual": 1}, "json.type", "error"),
        ({"num_aux_hidden_states": True}, "json.type", "error"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, "3"]}, "json.type", "error"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "cfg.aux", "error"),
        ({"eagle_config": {"surprise": 1}}, "cfg.unread", "warning"),
        ({"eagle_config": {"norm_before_fcc": True}}, "cfg.unknown", "error"),
        ({"norm_before_fcc": True}, "cfg.unknown", "error"),
        ({"model_max_length": 64}, "cfg.unknown", "error"),
        ({"text_config": {}}, "cfg.unknown", "error"),
        ({"made_by": "me", "ttt_length": 7, "target_model_type": "llama"}, "cfg.unread", "warning"),
        ({"rms_norm_eps": REMOVE}, "cfg.eps", "warning"),
        ({"rms_norm_eps": 0.0}, "cfg.eps", "error"),
        ({"rms_norm_eps": 1}, "json.type", "error"),
        ({"max_position_embeddings": REMOVE}, "cfg.pos", "warning"),
        ({"max_position_embeddings": 0}, "cfg.pos", "error"),
        ({"dtype": "float32"}, "cfg.dtype", "warning"),
        ({"dtype": "float16"}, "cfg.dtype", "warning"),
        ({"head_dim": 3}, "cfg.heads", "error"),
        ({"layer_types": ["full_attention"] * 4}, "cfg.layers", "error"),
        ({"layer_types": ["sliding_attention"]}, "cfg.layers", "error"),
        ({"sliding_window": 128}, "cfg.layers", "warning"),
        ({"rope_parameters": {**ROPE, "rope_theta": 0}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_theta": "big"}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_type": "spiral"}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_theta": 5e5}}, "cfg.rope", "note"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "cfg.rope", "error"),
        ({"draft_vocab_size": 65}, "cfg.vocab", "error"),
        ({"_name_or_path": "/etc"}, "cfg.auto_map", "warning"),
        ({"_name_or_path": "https://x/y"}, "cfg.auto_map", "warning"),
        ({"_name_or_path": "../x"}, "cfg.auto_map", "warning"),
        ({"_name_or_path": ["x"]}, "cfg.auto_map", "error"),
        ({"quantizer": "x.Y"}, "cfg.auto_map", "error"),
        ({"is_encoder_decoder": True}, "cfg.value", "error"),
        ({"temperature": 0.7}, "cfg.unread", "warning"),
        # what the config class or the rotary layer of vLLM 0.31.0 stops at while loading
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "cfg.heads", "error"),
        ({"dtype": "torch.bfloat16"}, "cfg.dtype", "error"),
        ({"dtype": REMOVE, "torch_dtype": "torch.bfloat16"}, "cfg.dtype", "error"),
        ({"initializer_range": 0}, "json.type", "error"),
        ({"rms_norm_eps": None}, "json.type", "error"),
        ({"hidden_act": None}, "json.type", "error"),
        ({"attention_bias": None}, "json.type", "error"),
        ({"mlp_bias": None}, "json.type", "error"),
        ({"max_position_embeddings": None}, "json.type", "error"),
        ({"tie_word_embeddings": None}, "json.type", "error"),
        ({"initializer_range": None}, "json.type", "error"),
        ({"use_cache": None}, "json.type", "error"),
        ({"target_hidden_size": None}, "json.type", "error"),
        ({"logit_scale": None}, "json.type", "error"),
        ({"rope_parameters": {**ROPE, "rope_theta": None}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_theta": 1}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_type": None}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_type": "linear"}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_type": "dynamic"}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_type": "llama3", "factor": 8.0}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "rope_type": "longrope"}}, "cfg.rope", "error"),
        ({"rope_parameters": {**YARN, "beta_fast": 0}}, "cfg.rope", "error"),
        ({"rope_parameters": {**YARN, "beta_fast": "x"}}, "cfg.rope", "error"),
        ({"rope_parameters": {**YARN, "attention_factor": "x"}}, "cfg.rope", "error"),
        (
            {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}},
            "cfg.rope",
            "error",
        ),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "cfg.rope", "error"),
        ({"rope_parameters": {**LONG, "long_factor": [1.0]}}, "cfg.rope", "error"),
        ({"rope_parameters": {"full_attention": ROPE}}, "cfg.rope", "error"),
        # what it reads differently from what stands there
        ({"rope_parameters": {**ROPE, "rope_dim": 2}}, "cfg.rope", "error"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.3}}, "cfg.rope", "error"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "cfg.rope", "error"),
    ],
)
def test_config(change: dict[str, Any], rule: str, severity: str, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", config=change, weights_follow_config=False)
    assert answers(folder).get(rule) == severity


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Eagle3LlamaForCausalLM"]},
        {"draft_vocab_size": 16, "torch_dtype": "bfloat16", "dtype": REMOVE},
        {"layer_types": ["sliding_attention"], "sliding_window": 128},
        {"rope_parameters": REMOVE, "rope_theta": 10000.0, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": 10000.0},
        {"rope_parameters": {"type": "linear", "factor": 2, "rope_theta": 10000.0}},
        {"rope_parameters": YARN},
        {"rope_parameters": {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": LONG},
        {
            "draft_vocab_size": 16,
            "num_key_value_heads": 4,
            "attention_dropout": 0,
            "initializer_range": 0.02,
            "pretraining_tp": None,
            "layer_types": None,
        },
        {"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": None, "use_cache": True},
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 2},
        {"eagle_aux_hidden_state_layer_ids": [0, 2], "num_aux_hidden_states": 2},
        # what exporters leave in config.json
        {"_name_or_path": "owner/model", "return_dict": True, "output_attentions": False},
        {
            "_name_or_path": "",
            "id2label": {"0": "A"},
            "label2id": {"A": 0},
            "tokenizer_class": None,
        },
        {"max_length": 20, "temperature": 1.0, "top_k": 50, "is_encoder_decoder": False},
    ],
)
def test_right_configs_are_not_bothered(change: dict[str, Any], tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", config=change)
    assert answers(folder, deep=True) == {}
    read_draft(folder)


@pytest.mark.parametrize(("k", "severity"), [(16, None), (17, "warning"), (65, "error")])
def test_k(k: int, severity: str | None, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", spec={"num_speculative_tokens": k})
    assert answers(folder).get("k.range") == severity


@pytest.mark.parametrize("k", [0, -1, True, 2.5, "3", None, REMOVE])
def test_k_that_is_no_count(k: Any, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", spec={"num_speculative_tokens": k})
    assert answers(folder)["k.range"] == "error"
    with pytest.raises(DraftError, match="num_speculative_tokens"):
        read_draft(folder)


def test_float32_weights_warn_once_a_file(tmp_path: Path) -> None:
    tensors = {}
    for name, (dtype, shape, raw) in build_tensors(build_config()).items():
        if dtype == "BF16":
            wide = (np.frombuffer(raw, "<u2").astype("<u4") << 16).astype("<u4").tobytes()
            tensors[name] = ("F32", shape, wide)
    folder = build_draft(tmp_path / "d", tensors=tensors)
    assert answers(folder, deep=True) == {"ten.dtype": "warning"}


def test_ngram_settings(tmp_path: Path) -> None:
    def check(text: str) -> dict[str, str]:
        (tmp_path / "spec.json").write_text(text)
        return answers(tmp_path)

    base = '"family": "ngram", "num_speculative_tokens": 3'
    assert check(f"{{{base}}}") == {}
    assert check(f'{{{base}, "prompt_lookup_min": 2, "prompt_lookup_max": 4}}') == {}
    swapped = f'{{{base}, "prompt_lookup_min": 5, "prompt_lookup_max": 3}}'
    assert check(swapped) == {"spec.keys": "error"}
    assert check(f'{{{base}, "prompt_lookup_max": 0}}') == {"k.range": "error"}


def test_no_folder_is_the_only_exception(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="no such draft folder"):
        validate_draft(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    report = validate_draft(tmp_path / "empty")
    assert report.verdict == "fail"
    assert {item.file for item in report.findings if item.severity == "error"} == {
        "config.json",
        "model.safetensors",
        "spec.json",
    }


def test_the_json_shape_is_fixed(tmp_path: Path) -> None:
    shape = validate_draft(build_draft(tmp_path / "d")).to_json_dict()
    assert list(shape) == ["verdict", "findings"]
    assert {tuple(item) for item in shape["findings"]} == {
        ("rule", "severity", "file", "where", "found", "expected", "message", "fix")
    }
    assert all(isinstance(text, str) for item in shape["findings"] for text in item.values())


@pytest.mark.parametrize(("last", "rule"), [(63, {}), (64, {"ten.d2t": "error"})])
def test_the_last_target_id_is_the_edge(last: int, rule: dict[str, str], tmp_path: Path) -> None:
    ids = [*range(15), last]
    offsets = encode_d2t([token - index for index, token in enumerate(ids)])
    folder = build_draft(tmp_path / "d", tensors={"d2t": offsets, "t2d": REMOVE})
    assert answers(folder) == rule


def test_the_speculators_format_says_what_it_would_lock(tmp_path: Path) -> None:
    settings = {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": "owner/model", "architectures": []},
    }
    folder = build_draft(tmp_path / "a", config={"speculators_config": settings})
    (found,) = [item for item in validate_draft(folder).findings if item.rule == "cfg.spec"]
    assert "algorithm eagle3, K 5, verifier owner/model" in found.message
    broken = {"proposal_methods": [3], "verifier": "x"}
    folder = build_draft(tmp_path / "b", config={"speculators_config": broken})
    (found,) = [item for item in validate_draft(folder).findings if item.rule == "cfg.spec"]
    assert "it names none" in found.message


def test_rules_and_limits_together_are_refused(tmp_path: Path) -> None:
    rules, folder = read_rules("demo"), build_draft(tmp_path / "d")
    with pytest.raises(TypeError, match="one of the two"):
        validate_draft(folder, rules=rules, limits=rules.limits)


@pytest.mark.parametrize(
    ("change", "rule", "severity"),
    [
        ({"max_seq_len": 32768}, "cfg.unread", "warning"),
        ({"model_max_length": 32768}, "cfg.unread", "warning"),
        ({"n_positions": 2**20}, "cfg.unread", "warning"),
        ({"max_seq_len": 32767}, "cfg.unknown", "error"),
        ({"model_max_length": 2**20}, "cfg.unknown", "error"),
        ({"max_seq_length": 0}, "cfg.unknown", "error"),
        ({"seq_len": True}, "cfg.unknown", "error"),
    ],
)
def test_other_names_of_a_length(
    change: dict[str, Any], rule: str, severity: str, tmp_path: Path
) -> None:
    folder = build_draft(tmp_path / "d", config={"max_position_embeddings": 32768, **change})
    assert answers(folder).get(rule) == severity


def test_a_class_that_is_not_named(tmp_path: Path) -> None:
    """vLLM takes it from model_type, but for EAGLE-3 and DFlash, where it stops."""
    for family, name in (("draft_model", "draft_model, Llama"), ("dflash", "dflash")):
        (case,) = [case for case in CASES if case.name == name]
        folder = tmp_path / family
        write_folder(case, folder, build_tensors_of(case))
        config = {key: value for key, value in case.config.items() if key != "architectures"}
        (folder / "config.json").write_text(json.dumps(config))
        found = {item.where: item.severity for item in validate_draft(folder).findings}
        assert found["architectures"] == ("warning" if family == "draft_model" else "error")
