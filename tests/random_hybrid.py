"""A random Qwen3.5-style target of four layers, with layer types of no regular interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.data import Row

__all__ = ["TYPES", "build_rows", "save_hybrid"]

TYPES = ["linear_attention", "full_attention", "full_attention", "linear_attention"]


def build_rows(count: int) -> list[Row]:
    """Texts of 20 tokens, of which the last 16 are the answer."""
    return [
        Row(
            row_id=f"r{number}",
            category="chat",
            input_ids=tuple((number * 7 + place * 5) % 96 for place in range(20)),
            loss_spans=((4, 20),),
            finish_reason="length",
        )
        for number in range(count)
    ]


def save_hybrid(folder: Path, **changes: Any) -> Path:
    """The target, a file beside it, and an MTP tensor that is to be carried over."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": TYPES,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 0,
        "eos_token_id": 2,
        **changes,
    }
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():  # a few columns with large inputs, as in real models
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.ndim == 2:
                parameter.mul_(6.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.randn(64, 128).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "notes.txt").write_text("carried over")
    return folder
