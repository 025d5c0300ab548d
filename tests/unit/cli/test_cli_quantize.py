"""`paceline quantize`: options that do not go together, and one small target end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import HIDDEN, VOCAB, build_draft, random_bf16, write_safetensors
from command_line import Outcome

Run = Callable[..., Outcome]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A one-layer Llama target by hand."""
    folder = tmp_path / "target"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "self_attn.q_proj": (16, 16),
        "self_attn.k_proj": (8, 16),
        "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16),
        "mlp.gate_proj": (32, 16),
        "mlp.up_proj": (32, 16),
        "mlp.down_proj": (16, 32),
    }
    tensors = {
        f"model.layers.0.{name}.weight": random_bf16(*shape, seed=number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    tensors["model.embed_tokens.weight"] = random_bf16(VOCAB, HIDDEN, seed=9)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "nothing to do; expected --scheme, or for a draft --window, --vocab or --share-head"),
        (["--scheme", "w3a16"], "scheme 'w3a16' is unknown; expected one of w4a16, w8a16"),
        (["--scheme", "fp8", "--group-size", 32], "a group size of 32 has no effect with fp8"),
        (["--window", 32, "--keep", "fc"], "--keep has no effect without --scheme"),
        (["--scheme", "fp8", "--max-loss", "2%"], "--max-loss has no effect without --measure"),
        (["--scheme", "fp8", "--prompts", "x"], "--prompts has no effect without --measure"),
        (["--scheme", "fp8", "--rows", 4], "--rows has no effect without --data"),
        (["--scheme", "fp8", "--distill", 4], "--distill has no effect on a draft"),
        (["--scheme", "fp8", "--recurrent", "fp8"], "--recurrent has no effect on a draft"),
        (["--scheme", "fp8", "--edges", 1], "--edges has no effect on a draft"),
        (["--scheme", "fp8", "--head", "w8a8"], "expected the same scheme"),
        (["--scheme", "fp8", "--measure", "--max-loss", "2"], "'2' is no share"),
        (["--vocab", 8], "--vocab needs the target's answers to count"),
        (["--scheme", "w4a16", "--method", "rtn"], "does not divide the 48 inputs of 'fc'"),
        (["--scheme", "fp8"], "GPTQ needs the draft's own inputs"),
    ],
)
def test_drafts_and_options_that_do_not_fit(
    options: list[Any], told: str, run: Run, target: Path, tmp_path: Path
) -> None:
    draft = build_draft(tmp_path / "draft")
    out = tmp_path / "out"
    run("quantize", draft, "--target", target, "--out", out, *options).require(2, told)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--window", 32], "--window has no effect on a target"),
        (["--scheme", "fp8", "--keep", "fc"], "--keep has no effect on a target"),
        (["--scheme", "fp8", "--recurrent", "fp8"], "the target has no recurrent layers"),
        (["--scheme", "fp8", "--edges", 1], "1 layers kept at each end of 1; expected 0 to 0"),
        (["--scheme", "w4a16", "--distill", 4], "--distill has no effect without --data"),
        (["--scheme", "fp8", "--edges", 0], "gptq needs the target's own inputs"),
        (["--scheme", "w4a16", "--group-size", 64, "--edges", 0], "64 does not divide the 16"),
    ],
)
def test_targets_and_options_that_do_not_fit(
    options: list[Any], told: str, run: Run, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run("quantize", target, "--out", out, *options).require(2, told)
    assert not out.exists()


def test_a_measurement_that_cannot_start_is_told_first(
    run: Run, target: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    words = ("--out", tmp_path / "out", "--device", "cpu", "--measure", "--method", "rtn")
    draft = build_draft(tmp_path / "draft")
    for model in ((draft, "--target", target), (target, "--edges", 0)):
        found = run("quantize", *model, "--scheme", "w8a16", *words)
        found.require(2, "vLLM 0.31.0's CPU build has no kernel for w8a16")
    assert not list(tmp_path.glob("out*"))


def test_a_target_and_a_draft(run: Run, target: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    small = tmp_path / "small"
    words = ("--method", "rtn", "--edges", 0, "--out", small)
    done = run("quantize", target, "--scheme", "w8a8", "--head", "w8a8", *words)
    done.require(0)
    assert "8 matrices quantised, 0 kept" in done.out
    config = json.loads((small / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    run("quantize", target, "--scheme", "w8a8", *words).require(2, "is there already")

    draft = build_draft(tmp_path / "draft")
    out = tmp_path / "draft-small"
    words = ("--scheme", "fp8", "--head", "fp8", "--method", "rtn", "--window", 32, "--out", out)
    done = run("quantize", draft, "--target", target, *words)
    done.require(0)
    assert "MB now" in done.out
    config = json.loads((out / "config.json").read_text())
    assert config["sliding_window"] == 32
    assert config["quantization_config"]["format"] == "float-quantized"
    run("validate", out, "--target", target)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "draft",
        "draft-small",
        "small",
        "target",
    ]


def test_without_torch_the_extra_is_named(
    run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.quantize.find_spec", lambda name: None)
    found = run("quantize", target, "--scheme", "fp8", "--out", tmp_path / "out")
    found.require(2, "quantising needs torch and transformers", "paceline[train]")
