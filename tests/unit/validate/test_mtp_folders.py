"""Folders of family mtp: a sound one, then one thing wrong at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline.draft.mtp import build_mtp_rules, read_mtp_sizes
from paceline.rules import read_rules
from paceline.target import TargetFacts, read_target
from paceline.validate import validate_draft

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}


@pytest.fixture
def target(tmp_path: Path) -> TargetFacts:
    path = tmp_path / "target"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return read_target(path, require_weights=False)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    path = tmp_path / "draft"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "spec.json").write_text('{"family": "mtp", "num_speculative_tokens": 3}')
    metadata = {"name": "d", "trained": {"thinking": "off"}}
    (path / "metadata.json").write_text(json.dumps(metadata))
    rules = build_mtp_rules(read_mtp_sizes(CONFIG))
    draw = np.random.default_rng(0)
    tensors = {n: draw.normal(0, 0.1, r.shape).astype(np.float16) for n, r in rules.items()}
    save_file(tensors, str(path / "model.safetensors"))
    return path


def found(draft: Path, target: TargetFacts) -> dict[str, str]:
    report = validate_draft(draft, target=target, limits=read_rules("emc2-2027").limits)
    return {f.rule: f.message + f.fix for f in report.findings if f.severity == "error"}


def test_a_sound_head_passes(draft: Path, target: TargetFacts) -> None:
    limits = read_rules("emc2-2027").limits
    assert found(draft, target) == {}
    assert validate_draft(draft, target=target, limits=limits, deep=True).verdict == "pass"


def config_of(draft: Path, **change: Any) -> None:
    config = {k: v for k, v in {**CONFIG, **change}.items() if v is not None}
    (draft / "config.json").write_text(json.dumps(config))


def tensors_of(draft: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(str(draft / "model.safetensors"))
    change(tensors)
    save_file(tensors, str(draft / "model.safetensors"))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hidden_size": 64}, "cfg.hidden"),
        ({"vocab_size": 65}, "cfg.vocab"),
        ({"num_key_value_heads": 4}, "cfg.heads"),
        ({"head_dim": "16"}, "json.type"),
        ({"head_dim": None}, "cfg.missing"),
        ({"mtp_num_hidden_layers": 2}, "cfg.missing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "cfg.rope"),
        ({"rms_norm_eps": 1e-5}, "cfg.eps"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "cfg.arch"),
        ({"model_type": "llama"}, "cfg.model_type"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "cfg.auto_map"),
        ({"n_embd": 1}, "cfg.unknown"),
    ],
)
def test_a_wrong_config(
    draft: Path, target: TargetFacts, change: dict[str, Any], rule: str
) -> None:
    config_of(draft, **change)
    assert rule in found(draft, target)


def test_what_vllm_cannot_express_is_said_plainly(draft: Path, target: TargetFacts) -> None:
    config_of(draft, quantization_config={"quant_method": "fp8"}, draft_vocab_size=32)
    errors = found(draft, target)
    assert "one of its own cannot be expressed" in errors["q.method"]
    assert "a smaller one cannot be expressed" in errors["cfg.unknown"]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_what_the_target_always_gives_only_warns(
    draft: Path, target: TargetFacts, name: str
) -> None:
    """vLLM loads such a copy, replaces it by the target's, and serves the head as it is."""
    tensors_of(draft, lambda t: t.update({name: np.ones((64, 32), np.float16)}))
    assert found(draft, target) == {}
    report = validate_draft(draft, target=target, limits=read_rules("emc2-2027").limits)
    told = {f.rule: f.message for f in report.findings if f.severity == "warning"}
    assert "gives an MTP head the target's embeddings" in told["ten.unread"]


def test_a_vocabulary_of_its_own_is_refused(draft: Path, target: TargetFacts) -> None:
    tensors_of(draft, lambda t: t.update({"d2t": np.zeros(64, np.int64)}))
    assert "gives an MTP head the target's embeddings" in found(draft, target)["ten.extra"]


@pytest.mark.parametrize("name", sorted(build_mtp_rules(read_mtp_sizes(CONFIG))))
def test_each_missing_or_reshaped_tensor(draft: Path, target: TargetFacts, name: str) -> None:
    tensors_of(draft, lambda t: t.update({name: t[name][:-1].copy()}))
    assert f"'{name}'" in found(draft, target)["ten.shape"]
    tensors_of(draft, lambda t: t.pop(name))
    assert f"'{name}' is missing" in found(draft, target)["ten.missing"]


def test_a_single_width_query_projection_is_explained(draft: Path, target: TargetFacts) -> None:
    name = "mtp.layers.0.self_attn.q_proj.weight"
    tensors_of(draft, lambda t: t.update({name: t[name][:64].copy()}))
    assert "with the output gate" in found(draft, target)["ten.shape"]


def test_a_target_without_a_head(draft: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare"
    path.mkdir()
    config = {k: v for k, v in CONFIG.items() if k != "mtp_num_hidden_layers"}
    (path / "config.json").write_text(json.dumps(config))
    errors = found(draft, read_target(path, require_weights=False))
    assert "has no MTP head" in errors["cfg.arch"]
