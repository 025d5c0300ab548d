"""One bad folder for every rule: a function of (folder) that builds it, by rule id."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from builders import (
    REMOVE,
    build_config,
    build_draft,
    build_shards,
    build_tensors,
    encode_bf16,
    encode_d2t,
    random_bf16,
    write_safetensors,
)
from envelopes import build_envelope

__all__ = ["BAD_FOLDERS", "build_packed", "raw_header"]


def raw_header(folder: Path, entries: object, data: bytes = b"", **more: bytes) -> Path:
    """The sound draft, its weights replaced by a hand-made header."""
    build_draft(folder)
    text = more.get("text", json.dumps(entries).encode())
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def text_file(name: str, text: str | bytes = "x") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        build_draft(folder)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder

    return make


def changed_config(**changes: object) -> Callable[[Path], Path]:
    return lambda folder: build_draft(folder, config=changes, weights_follow_config=False)


def changed_spec(**changes: object) -> Callable[[Path], Path]:
    return lambda folder: build_draft(folder, spec=changes)


def changed_metadata(**changes: object) -> Callable[[Path], Path]:
    return lambda folder: build_draft(folder, metadata=changes)


def changed_tensors(**changes: object) -> Callable[[Path], Path]:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda folder: build_draft(folder, tensors=named)


def without(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        build_draft(folder)
        (folder / name).unlink()
        return folder

    return make


def symlink(folder: Path) -> Path:
    build_draft(folder)
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere.json")
    return folder


def sparse(folder: Path) -> Path:
    build_draft(folder)
    with open(folder / "model.safetensors", "ab") as file:
        file.truncate(8 * 1024 * 1024)
    return folder


def unreadable(folder: Path) -> Path:
    """A socket is there, but cannot be opened."""
    import socket

    build_draft(folder)
    (folder / "spec.json").unlink()
    here = Path.cwd()  # a socket's path is short, so bind by its bare name
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("spec.json")
    finally:
        os.chdir(here)
    return folder


def many_files(folder: Path) -> Path:
    build_draft(folder)
    for index in range(70):
        (folder / f"extra{index}.txt").touch()
    return folder


def copy_of_target(folder: Path, *, noise: float = 0.0) -> Path:
    """A target beside the draft whose gate projection the draft has taken over, or started from.

    noise: size of what was trained into it, in units of the layer's own values.
    """
    build_draft(folder)
    gate = build_tensors(build_config())["midlayer.mlp.gate_proj.weight"]
    if noise:
        values = (np.frombuffer(gate[2], dtype="<u2").astype("<u4") << 16).view("<f4")
        drift = np.random.default_rng(77).standard_normal(values.shape) * noise * values.std()
        gate = (*gate[:2], encode_bf16((values + drift).astype(np.float32)))
    target = folder.parent / "target"
    target.mkdir()
    norms = {
        f"model.layers.{layer}.input_layernorm.weight": half(16, value=1.0) for layer in range(4)
    }
    write_safetensors(
        target / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": gate, **norms}
    )
    return folder


def half(*shape: int, value: float) -> tuple[str, tuple[int, ...], bytes]:
    return "BF16", shape, encode_bf16(np.full(shape, value, dtype=np.float32))


def one_value(value: float) -> tuple[str, tuple[int, ...], bytes]:
    values = np.random.default_rng(5).standard_normal((16, 48)).astype(np.float32)
    values[3, 4] = value
    return "BF16", (16, 48), encode_bf16(values)


ONE = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
MISALIGNED = {
    "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
}

BAD_FOLDERS: dict[str, Callable[[Path], Path]] = {
    "fs.read": unreadable,
    "fs.missing": without("config.json"),
    "fs.allow": text_file("notes.txt"),
    "fs.code": text_file("modeling.py"),
    "fs.pickle": text_file("README.md", b"\x80\x04\x95pickle"),
    "fs.tokenizer": text_file("tokenizer.json", "{}"),
    "fs.quantjson": text_file("quantize_config.json", "{}"),
    "fs.type": symlink,
    "fs.flat": text_file(".hidden"),
    "fs.count": many_files,
    "fs.size": text_file("README.md", "x" * (1024 * 1024 + 1)),
    "fs.sparse": sparse,
    "lfs.pointer": text_file(
        "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    ),
    "json.utf8": text_file("config.json", b'\xef\xbb\xbf{"a": 1}'),
    "json.syntax": text_file("config.json", '{"hidden_size": 16'),
    "json.dup": text_file("spec.json", '{"family": "ngram", "family": "eagle3"}'),
    "json.const": text_file("config.json", '{"rms_norm_eps": NaN}'),
    "json.depth": text_file("config.json", "[" * 100_000),
    "json.type": text_file("config.json", "[1, 2]"),
    "spec.missing": without("spec.json"),
    "spec.keys": changed_spec(rejection_sample_method="synthetic"),
    "k.range": changed_spec(num_speculative_tokens=0),
    "meta.keys": changed_metadata(name=REMOVE),
    "meta.target": changed_metadata(trained={"target": {"tokenizer_sha256": "f" * 64}}),
    "meta.thinking": changed_metadata(trained={"thinking": "sometimes"}),
    "cfg.auto_map": changed_config(rope_parameters={"auto_map": {"AutoModel": "x.Y"}}),
    "cfg.unknown": changed_config(n_predict=3),
    "cfg.missing": changed_config(intermediate_size=REMOVE),
    "cfg.arch": changed_config(architectures=["MistralForCausalLM"]),
    "cfg.model_type": changed_config(model_type="qwen3_next"),
    "cfg.family": changed_spec(family="mtp"),
    "cfg.contract": lambda folder: build_envelope(folder, speculators_model_type="dspark"),
    "cfg.spec": lambda folder: build_envelope(folder, speculators_model_type="hydra"),
    "cfg.hidden": lambda folder: build_draft(folder, config={"hidden_size": 32, "head_dim": 8}),
    "cfg.vocab": lambda folder: build_draft(folder, config={"vocab_size": 72}),
    "cfg.pos": changed_config(max_position_embeddings=2048),
    "cfg.rope": changed_config(rope_parameters={"rope_type": "default", "mrope_section": [1, 1]}),
    "cfg.heads": changed_config(num_key_value_heads=3),
    "cfg.layers": changed_config(num_hidden_layers=40),
    "cfg.aux": changed_config(eagle_aux_hidden_state_layer_ids=[3, 2, 1]),
    "cfg.residual": changed_config(norm_before_residual=REMOVE),
    "cfg.dtype": changed_config(dtype="int9"),
    "cfg.eps": changed_config(rms_norm_eps=2.0),
    "cfg.tie": changed_config(tie_word_embeddings=True),
    "cfg.act": changed_config(hidden_act="gelu"),
    "q.method": changed_config(quantization_config={"ignore": ["re:(a+)+$"]}),
    "st.header": text_file("model.safetensors", b"\x08\0\0\0\0\0\0\0{not json"),
    "st.dup": lambda folder: raw_header(
        folder, None, b"\0" * 4, text=b'{"a": %s, "a": %s}' % ((json.dumps(ONE).encode(),) * 2)
    ),
    "st.fields": lambda folder: raw_header(folder, {"a": {**ONE, "hidden": 1}}, b"\0" * 4),
    "st.dtype": lambda folder: raw_header(folder, {"a": {**ONE, "dtype": "F4"}}, b"\0" * 4),
    "st.shape": lambda folder: raw_header(folder, {"a": {**ONE, "shape": [2**62, 0]}}, b"\0" * 4),
    "st.cover": lambda folder: raw_header(folder, {"a": ONE}, b"\0" * 9),
    "st.align": lambda folder: raw_header(folder, MISALIGNED, b"\0" * 5),
    "st.count": lambda folder: raw_header(
        folder,
        {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(20_001)},
        b"\0" * 20_001,
    ),
    "st.name": lambda folder: raw_header(folder, {"../a": ONE}, b"\0" * 4),
    "st.meta": lambda folder: raw_header(
        folder, {"__metadata__": {"format": "tf"}, "a": ONE}, b"\0" * 4
    ),
    "idx.base": lambda folder: build_shards(folder, index={"norm.weight": "../../secret"}),
    "idx.complete": lambda folder: build_shards(folder, index={"norm.weight": REMOVE}),
    "idx.naming": lambda folder: _drop_shard(build_shards(folder)),
    "ten.missing": changed_tensors(fc__weight=REMOVE),
    "ten.extra": changed_tensors(secret=random_bf16(4, seed=1)),
    "ten.shape": changed_tensors(norm__weight=random_bf16(17, seed=1)),
    "ten.dtype": changed_tensors(d2t=("F32", (16,), b"\0" * 64)),
    "ten.unread": changed_tensors(
        midlayer__self_attn__rotary_emb__inv_freq=("F32", (2,), b"\0" * 8)
    ),
    "ten.params": lambda folder: build_draft(folder),  # against limits of 100 parameters
    "ten.lm_head": lambda folder: build_draft(folder, config={"draft_vocab_size": 64}),
    "ten.embed": changed_tensors(embed_tokens__weight=random_bf16(64, 16, seed=7)),
    "ten.d2t": changed_tensors(d2t=encode_d2t([0] * 15 + [60])),
    "ten.t2d": changed_tensors(d2t=encode_d2t(list(range(16)))),
    "ten.finite": changed_tensors(fc__weight=one_value(float("nan"))),
    "ten.fp16": changed_tensors(fc__weight=one_value(70000.0)),
    "ten.const": changed_tensors(fc__weight=half(16, 48, value=0.0)),
    "ten.norm": changed_tensors(norm__weight=half(16, value=2000.0)),
    "ten.copy": copy_of_target,
    "ten.start": lambda folder: copy_of_target(folder, noise=1.0),
    "ten.scale": lambda folder: build_packed(folder, scale=0.0),
    "ten.dupcontent": changed_tensors(
        midlayer__mlp__gate_proj__weight=random_bf16(32, 16, seed=3),
        midlayer__mlp__up_proj__weight=random_bf16(32, 16, seed=3),
    ),
    "cfg.value": lambda folder: _mtp(folder, k=3, layers=1, attention_bias=True),
    "cfg.default": lambda folder: build_draft(
        folder, spec={"family": "dflash"}, config={"rms_norm_eps": REMOVE}
    ),
    "cfg.unread": lambda folder: _medusa(folder, k=3, topk=5),
    "cfg.mask": changed_config(mask_token_id=64),
    "cfg.moe": changed_config(num_experts=8),
    "cfg.mtp_div": lambda folder: _mtp(folder, k=3, layers=2),
    "cfg.medusa": lambda folder: _medusa(folder, k=4),
    "q.regex": changed_config(quantization_config={"ignore": ["re:(a+)+$"]}),
    "q.group": lambda folder: build_packed(folder, group_size=10),
    "q.fused": lambda folder: build_packed(folder, plain="k_proj"),
    "fs.path": lambda folder: _medusa(folder / "dflash-vs-medusa" / "d", k=3),
    "q.target": lambda folder: _mtp(folder, k=3, layers=1),  # of a quantized target
    "q.nokv": changed_config(quantization_config={"kv_cache_scheme": {"num_bits": 8}}),
    "q.online": changed_config(quantization_config={"quant_method": "experts_int8"}),
    "rules.target": lambda folder: build_draft(folder),  # against a contest of another target
    "ten.token_map": lambda folder: _medusa(folder, k=3, kept=[0, 1, 64]),
    "mem.load": lambda folder: build_draft(folder),  # against a limit of 100 bytes
    "mem.est": lambda folder: build_draft(folder),
    "not.checked": lambda folder: build_draft(folder),
}


def _mtp(folder: Path, *, k: int, layers: int, **more: object) -> Path:
    return build_draft(
        folder,
        spec={"family": "mtp", "num_speculative_tokens": k},
        config={"mtp_num_hidden_layers": layers, **more},
    )


def _medusa(folder: Path, *, k: int, kept: list[int] | None = None, **more: object) -> Path:
    """Three heads on the toy target; with `kept`, a vocabulary of these ids."""
    build_draft(folder, spec={"family": "medusa", "num_speculative_tokens": k})
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 16,
        "vocab_size": 64,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "original_lm_head": True,
        "dtype": "bfloat16",
        **more,
    }
    tensors = {f"blocks.{i}.layers.0.weight": random_bf16(16, 16, seed=i) for i in range(3)}
    rows = 64
    if kept is not None:
        rows = config["truncated_vocab_size"] = len(kept)
        tensors["token_map"] = encode_d2t(kept)
    tensors["lm_head.weight"] = random_bf16(rows, 16, seed=9)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def build_packed(folder: Path, *, group_size: int = 8, plain: str = "", scale: float = 1.0) -> Path:
    """Every projection stored as packed int4, but the one named `plain`."""
    groups = {"0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": group_size}}}
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    build_draft(folder, config={"quantization_config": settings})
    tensors = build_tensors(build_config())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name][1]
        if plain and plain in name:
            continue
        del tensors[name]
        packed = ("I32", (rows, columns // 8), b"\1" * (rows * columns // 2))
        tensors[f"{name}_packed"] = packed
        tensors[f"{name}_scale"] = half(rows, columns // 8, value=scale)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _drop_shard(folder: Path) -> Path:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder
