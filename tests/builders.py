"""Tiny draft folders, good and bad, on demand: safetensors bytes by hand, no torch.

folder = build_draft(tmp_path / "draft")                        # a sound EAGLE-3 draft
folder = build_draft(tmp_path / "bad", config={"head_dim": 8})  # the same with one change
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.target import TargetFacts

__all__ = [
    "build_config",
    "build_draft",
    "build_target_facts",
    "build_tensors",
    "encode_bf16",
    "encode_d2t",
    "write_safetensors",
]

REMOVE = object()  # as a value of `config`, `spec`, `metadata` or `tensors`: drop the key
HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, DRAFT_VOCAB, INTER = 16, 4, 4, 2, 64, 16, 32
KEPT_IDS = (0, 1, 2, 3, 5, 6, 7, 11, 12, 20, 21, 30, 31, 40, 62, 63)

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes


def encode_bf16(values: np.ndarray) -> bytes:
    """Rounds float32 to bfloat16 by truncation."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4") >> 16
    return bits.astype("<u2").tobytes()


def encode_d2t(offsets: list[int] | np.ndarray) -> Tensor:
    data = np.asarray(offsets, dtype="<i8")
    return "I64", data.shape, data.tobytes()


def encode_t2d(kept: list[int] | tuple[int, ...], vocab: int = VOCAB) -> Tensor:
    mask = np.zeros(vocab, dtype="u1")
    mask[list(kept)] = 1
    return "BOOL", (vocab,), mask.tobytes()


def random_bf16(*shape: int, seed: int) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.1
    return "BF16", shape, encode_bf16(values)


def ones_bf16(*shape: int) -> Tensor:
    return "BF16", shape, encode_bf16(np.ones(shape, dtype=np.float32))


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, header: bytes | None = None
) -> None:
    """Writes a sound file; with `header`, that JSON in place of the right one."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    data = b""
    # wide elements first, as the public writer does: every start is then aligned
    for name in sorted(tensors, key=lambda name: (tensors[name][0] != "I64", name)):
        dtype, shape, raw = tensors[name]
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, at + len(raw)],
        }
        at += len(raw)
        data += raw
    text = json.dumps(entries).encode() if header is None else header
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def build_target_facts(path: Path = Path("target"), **changes: Any) -> TargetFacts:
    """A 4-layer Llama-like target, hidden 16, vocabulary 64."""
    facts: dict[str, Any] = {
        "name": "toy",
        "path": path,
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "num_tokenizer_tokens": 60,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_ids": (1,),
        "pad_token_id": None,
        "layer_types": ("full_attention",) * LAYERS,
        "num_mtp_layers": 0,
        "tokenizer_sha256": "a" * 64,
        "chat_template_sha256": "b" * 64,
        "weights_fingerprint": "c" * 64,
        "config": {},
    }
    return TargetFacts(**{**facts, **changes})


def build_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "num_aux_hidden_states": 3,
    }
    return _change(config, changes)


def build_tensors(config: Mapping[str, Any], layer: str = "midlayer") -> dict[str, Tensor]:
    """Every tensor of one config, sizes worked out here and not by the code under test."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim
    num_aux = len(config.get("eagle_aux_hidden_state_layer_ids") or [0, 0, 0])
    shapes = {
        "fc.weight": (hidden, num_aux * hidden),
        f"{layer}.self_attn.q_proj.weight": (query, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (key, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (key, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, query),
        f"{layer}.mlp.gate_proj.weight": (inter, hidden),
        f"{layer}.mlp.up_proj.weight": (inter, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inter),
    }
    tensors = {
        name: random_bf16(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{layer}.{name}.weight"] = ones_bf16(hidden)
    tensors["norm.weight"] = ones_bf16(hidden)
    rows = config.get("draft_vocab_size") or config["vocab_size"]
    if rows != config["vocab_size"]:
        tensors["lm_head.weight"] = random_bf16(rows, hidden, seed=99)
        kept = KEPT_IDS[:rows] if rows <= len(KEPT_IDS) else tuple(range(rows))
        tensors["d2t"] = encode_d2t([token - index for index, token in enumerate(kept)])
        tensors["t2d"] = encode_t2d(kept, config["vocab_size"])
    return tensors


def _change(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**values, **changes}
    return {key: value for key, value in merged.items() if value is not REMOVE}


def build_draft(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    weights_follow_config: bool = True,
) -> Path:
    """A draft folder with the given changes. Weights fit the changed config unless told not to."""
    folder.mkdir(parents=True)
    full_config = build_config(**(config or {}))
    shaped = full_config if weights_follow_config else build_config()
    write_safetensors(folder / "model.safetensors", _change(build_tensors(shaped), tensors or {}))
    full_spec = _change({"family": "eagle3", "num_speculative_tokens": 3}, spec or {})
    trained = {
        "target": {
            "tokenizer_sha256": "a" * 64,
            "chat_template_sha256": "b" * 64,
            "weights_fingerprint": "c" * 64,
        },
        "thinking": "none",
    }
    full_metadata = _change({"name": "toy draft", "trained": trained}, metadata or {})
    for name, value in (
        ("config.json", full_config),
        ("spec.json", full_spec),
        ("metadata.json", full_metadata),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


def build_shards(folder: Path, *, index: Mapping[str, str] | None = None) -> Path:
    """The sound draft in two shards; `index` changes entries of the weight map (REMOVE drops)."""
    build_draft(folder)
    tensors = build_tensors(build_config())
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[:6],
        "model-00002-of-00002.safetensors": names[6:],
    }
    weight_map: dict[str, Any] = {}
    for file, part in parts.items():
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    total = sum(len(raw) for _, _, raw in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {"metadata": {"total_size": total}, "weight_map": _change(weight_map, index or {})}
        )
    )
    return folder
