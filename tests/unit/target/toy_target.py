"""Small target folders on demand."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
TOKENIZER: dict[str, Any] = {
    "added_tokens": [{"id": 59, "content": "<end>", "special": True}],
    "normalizer": None,
    "model": {
        "type": "BPE",
        "vocab": {f"t{i}": i for i in range(59)},
        "merges": ["t1 t2", "t3 t4"],
    },
}


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, size = end, 2
        for length in shape:
            size *= length
        end = start + size
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(end))


def write_target(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    tensors: dict[str, tuple[int, ...]] | None = None,
    tokenizer: dict[str, Any] | None = TOKENIZER,
    template: str | None = "{{ messages }}",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    full = {key: value for key, value in {**CONFIG, **(config or {})}.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(full))
    if tensors is None:
        tensors = {"model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,)}
    if tensors:
        write_tensors(folder / "model.safetensors", tensors)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder
