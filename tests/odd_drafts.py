"""Odd but valid EAGLE-3 folders: what exporters, people and other tools leave, and vLLM serves.

Those that only vLLM's own loader can judge are in tests/contract_cases.py; these differ in files,
index, maps and records, which vLLM takes as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from builders import (
    KEPT_IDS,
    REMOVE,
    build_draft,
    build_shards,
    encode_d2t,
    encode_t2d,
    ones_bf16,
    random_bf16,
)
from envelopes import build_envelope

from paceline.safetensors_header import read_header

__all__ = ["ODD_DRAFTS"]

INDEX = "model.safetensors.index.json"
MASK = np.frombuffer(encode_t2d(KEPT_IDS)[2], dtype="u1")
SHORT_MAP = (
    "I16",
    (16,),
    np.array([token - i for i, token in enumerate(KEPT_IDS)], dtype="<i2").tobytes(),
)
SECOND_LAYER = {
    "layers.1.input_layernorm.weight": ones_bf16(16),
    "layers.1.post_attention_layernorm.weight": ones_bf16(16),
    **{
        f"layers.1.{name}.weight": random_bf16(*shape, seed=seed)
        for seed, (name, shape) in enumerate(
            {
                "self_attn.q_proj": (16, 16),
                "self_attn.k_proj": (8, 16),
                "self_attn.v_proj": (8, 16),
                "self_attn.o_proj": (16, 16),
                "mlp.gate_proj": (32, 16),
                "mlp.up_proj": (32, 16),
                "mlp.down_proj": (16, 32),
            }.items(),
            start=100,
        )
    },
}


def draft(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: build_draft(folder, **changes)


def with_index(folder: Path, file: str = "model.safetensors", **metadata: int) -> Path:
    """An index beside one file, under its usual name or as the only shard."""
    build_draft(folder)
    names = read_header(folder / "model.safetensors").tensors
    (folder / "model.safetensors").rename(folder / file)
    index = {"metadata": metadata, "weight_map": dict.fromkeys(names, file)}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def shards_without_total(folder: Path) -> Path:
    build_shards(folder)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))
    return folder


def with_papers(folder: Path) -> Path:
    build_draft(folder)
    for name in ("README.md", "LICENSE", "LICENSE-MIT", "LICENCE.txt", ".gitattributes"):
        (folder / name).write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    return folder


def envelope_with_records(folder: Path) -> Path:
    build_envelope(folder, auto_map=REMOVE)
    (folder / "spec.json").write_text('{"family": "eagle3", "num_speculative_tokens": 3}')
    (folder / "metadata.json").write_text('{"name": "d", "trained": {"thinking": "none"}}')
    return folder


def of_ids(ids: list[int], **tensors: Any) -> Callable[[Path], Path]:
    offsets = encode_d2t([token - index for index, token in enumerate(ids)])
    return draft(tensors={"d2t": offsets, **tensors})


# name -> (folder, the loudest verdict that is right for it)
ODD_DRAFTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "identity map": (of_ids(list(range(16)), t2d=encode_t2d(range(16))), "pass"),
    "map without its mask": (draft(tensors={"t2d": REMOVE}), "pass"),
    "mask of bytes": (draft(tensors={"t2d": ("U8", (64,), MASK.tobytes())}), "pass"),
    "mask of numbers": (draft(tensors={"t2d": ("I64", (64,), b"\1" * 512)}), "warn"),
    "mask of another length": (draft(tensors={"t2d": encode_t2d(KEPT_IDS, 128)}), "warn"),
    "mask of another list": (draft(tensors={"t2d": encode_t2d(range(16))}), "warn"),
    "map of 16 bits": (draft(tensors={"d2t": SHORT_MAP}), "pass"),
    "rows of the head in another order": (of_ids(list(reversed(KEPT_IDS))), "warn"),
    "head_dim is not hidden / heads": (draft(config={"head_dim": 8}), "pass"),
    "own embeddings": (
        draft(tensors={"embed_tokens.weight": random_bf16(64, 16, seed=7)}),
        "warn",
    ),
    "full vocabulary, own head": (
        draft(
            config={"draft_vocab_size": 64},
            tensors={"lm_head.weight": random_bf16(64, 16, seed=3)},
        ),
        "pass",
    ),
    "two layers": (draft(config={"num_hidden_layers": 2}, tensors=SECOND_LAYER), "pass"),
    "two shards": (build_shards, "pass"),
    "two shards, no total": (shards_without_total, "pass"),
    "one file and an index": (with_index, "pass"),
    "one numbered shard": (lambda f: with_index(f, "model-00001-of-00001.safetensors"), "pass"),
    "papers beside it": (with_papers, "pass"),
    "float16 for a bfloat16 target": (draft(config={"dtype": "float16"}), "warn"),
    "keys that nobody reads": (
        draft(config={"made_by": "me", "ttt_length": 7, "target_model_type": "llama"}),
        "warn",
    ),
    "keys of a Qwen target": (
        draft(config={"use_sliding_window": False, "max_window_layers": 28}),
        "pass",
    ),
    "keys of a target with experts": (
        draft(config={"num_experts": 8, "decoder_sparse_step": 1, "norm_topk_prob": True}),
        "warn",
    ),
    "a million positions": (draft(config={"max_position_embeddings": 2**20}), "warn"),
    "as speculators saves it": (build_envelope, "warn"),
    "as speculators saves it, with spec.json": (envelope_with_records, "pass"),
    "an envelope without a contract here": (
        lambda folder: build_envelope(folder, speculators_model_type="dspark"),
        "warn",
    ),
    "quantised by another format": (
        draft(config={"quantization_config": {"quant_method": "awq", "bits": 4}}),
        "warn",
    ),
    "no record": (draft(metadata={"name": REMOVE, "trained": REMOVE}), "pass"),
    "one token a step": (draft(spec={"num_speculative_tokens": 1}), "pass"),
    "many tokens a step": (draft(spec={"num_speculative_tokens": 32}), "warn"),
    "five taps": (
        draft(
            config={
                "eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3, 4],
                "num_aux_hidden_states": 5,
            }
        ),
        "pass",
    ),
}

# validate says of these that it knows no contract for them: that vLLM loads them is not claimed
UNCOVERED = ("an envelope without a contract here", "quantised by another format")
