"""Builders of the tiny target, its data folder and recipes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from paceline.records import sha256_file
from paceline.target import TargetFacts, read_target
from paceline.train import Recipe, build_recipe
from paceline.train.families.mtp import build_module
from paceline.train.families.mtp_weights import start_mtp_random

VOCAB = 64


def make_target(path: Path) -> Path:
    """A random 4-layer Llama, hidden 32, 4/2 heads of 8, vocabulary 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # a spread that makes its greedy choices clear
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    model.save_pretrained(path)
    return path


def make_hybrid(path: Path) -> Path:
    """A random 4-layer hybrid with a head of its own, hidden 32, vocabulary 64."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(1)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attn_output_gate=True,
        mtp_num_hidden_layers=1,
        eos_token_id=2,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "conv" not in name:
                parameter.mul_(6.0)
    model.save_pretrained(path)
    head = build_module(read_target(path).config)
    start_mtp_random(head, 5)
    weights = load_file(str(path / "model.safetensors"))
    save_file(
        {**weights, **head.state_dict()},
        str(path / "model.safetensors"),
        metadata={"format": "pt"},
    )
    return path


def make_data(path: Path, target: TargetFacts, *, num_rows: int = 20, top: int = VOCAB) -> Path:
    """Rows of one or two spans, of varying length, ids below top; the record names the target."""
    generator = torch.Generator().manual_seed(3)
    path.mkdir(parents=True)
    lines = []
    for number in range(num_rows):
        length = 12 + int(torch.randint(0, 20, (), generator=generator))
        ids = torch.randint(3, top, (length,), generator=generator).tolist()
        spans = [[4, length]] if number % 2 else [[3, 6], [8, length]]
        lines.append(
            {
                "id": f"row-{number}",
                "category": "chat",
                "input_ids": ids,
                "loss_spans": spans,
                "finish_reason": "length",
            }
        )
    (path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = {
        "format": "paceline-data/1",
        "complete": True,
        "target": {
            "tokenizer_sha256": target.tokenizer_sha256,
            "chat_template_sha256": target.chat_template_sha256,
            "weights_fingerprint": target.weights_fingerprint,
        },
        "sampling": {"temperature": 0.7},
        "thinking": "none",
        "prompts": {"name": "made", "sha256": "0", "num_prompts": num_rows},
        "counts": {"rows": num_rows},
        "rejected": [],
        "rows_sha256": sha256_file(path / "rows.jsonl"),
    }
    (path / "data.json").write_text(json.dumps(record))
    return path


RECIPE: dict[str, Any] = {
    "family": "eagle3",
    "seed": 5,
    "dtype": "float32",
    "draft": {"num_speculative_tokens": 3, "aux_layer_ids": [1, 2, 3]},
    "optim": {
        "lr": 1e-3,
        "warmup_steps": 5,
        "schedule": "linear",
        "num_steps": 20,
        "tokens_per_batch": 96,
        "max_length": 32,
        "checkpoint_steps": 10,
    },
}


def make_recipe(**changes: Any) -> Recipe:
    """The recipe above with "table.key" or top-level keys replaced; None removes a key."""
    value = copy.deepcopy(RECIPE)
    for name, setting in changes.items():
        *table, key = name.split("__")
        place = value.setdefault(table[0], {}) if table else value
        if setting is None:
            place.pop(key, None)
        else:
            place[key] = setting
    return build_recipe(value, where="made.toml")
