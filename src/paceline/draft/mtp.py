"""The MTP contract for Qwen3.5-style targets, as vLLM 0.31.0 builds it; and the stitched target.

Source of the facts: vllm/model_executor/models/qwen3_5_mtp.py and vllm/config/speculative.py of
0.31.0. The config is the target's own. vLLM takes `mtp.*` and, of everything else, only names with
embed_tokens or lm_head, which it then replaces by the target's: such a copy is weight carried for
nothing, so the contract refuses it. What cannot be expressed at all: a vocabulary of the head's own
(no d2t), and a quantisation of its own (the target's applies).

Two ways out: a folder of its own (config.json and `mtp.*`), and a copy of the target whose `mtp.*`
are exchanged (`stitch_target`), with every other file hard-linked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.draft.eagle3 import TensorRule
from paceline.errors import DraftError, TargetError
from paceline.problems import show_value
from paceline.records import atomic_folder, read_json, write_json
from paceline.safetensors_header import read_header

if TYPE_CHECKING:
    import torch

    from paceline.target import TargetFacts

__all__ = [
    "MTP_ARCHITECTURES",
    "MTP_CONFIG_KEYS",
    "MTP_MODEL_TYPES",
    "MtpSizes",
    "build_mtp_config",
    "build_mtp_rules",
    "read_mtp_sizes",
    "stitch_target",
]

MTP_ARCHITECTURES = ("Qwen3_5ForCausalLM",)
MTP_MODEL_TYPES = ("qwen3_5_text",)
_MTP_FILE = "mtp.safetensors"
_INDEX = "model.safetensors.index.json"

MTP_CONFIG_KEYS: dict[str, str] = {
    "architectures": "str list",
    "model_type": "str",
    "hidden_size": "int",
    "intermediate_size": "int",
    "num_hidden_layers": "int",
    "num_attention_heads": "int",
    "num_key_value_heads": "int",
    "head_dim": "int",
    "vocab_size": "int",
    "max_position_embeddings": "int",
    "rms_norm_eps": "float",
    "hidden_act": "str",
    "rope_parameters": "object",
    "partial_rotary_factor": "number",
    "attention_bias": "bool",
    "attention_dropout": "number",
    "attn_output_gate": "bool",
    "layer_types": "str list",
    "full_attention_interval": "int",
    "linear_conv_kernel_dim": "int",
    "linear_key_head_dim": "int",
    "linear_num_key_heads": "int",
    "linear_num_value_heads": "int",
    "linear_value_head_dim": "int",
    "mtp_num_hidden_layers": "int",
    "tie_word_embeddings": "bool",
    "dtype": "str",
    "initializer_range": "float",
    "use_cache": "bool",
    "bos_token_id": "int",
    "eos_token_id": "int or int list",
    "pad_token_id": "int",
    "transformers_version": "str",
}


@dataclass(frozen=True, kw_only=True)
class MtpSizes:
    """Sizes of the head; they are the target's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    attn_output_gate: bool
    attention_bias: bool


def read_mtp_sizes(config: Mapping[str, Any]) -> MtpSizes:
    """Reads the sizes; raises DraftError for one that is missing or senseless."""
    layers = _size(config, "mtp_num_hidden_layers")
    if layers != 1:
        raise DraftError(
            f"'mtp_num_hidden_layers' is {layers}",
            where="config.json: mtp_num_hidden_layers",
            expected="1, a layer that vLLM runs K times",
        )
    return MtpSizes(
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        num_attention_heads=_size(config, "num_attention_heads"),
        num_key_value_heads=_size(config, "num_key_value_heads"),
        head_dim=_size(config, "head_dim"),
        vocab_size=_size(config, "vocab_size"),
        attn_output_gate=config.get("attn_output_gate", True) is True,
        attention_bias=config.get("attention_bias", False) is True,
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**26:
        raise DraftError(
            f"'{key}' is missing" if value is None else f"'{key}' is {show_value(value)}",
            where=f"config.json: {key}",
            expected="a whole number from 1 to 67,108,864",
            fix="State the target's own size.",
        )
    return value


def build_mtp_rules(sizes: MtpSizes) -> dict[str, TensorRule]:
    """Every tensor of the head by its name in the file."""
    hidden, inter, head = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    query, key = sizes.num_attention_heads * head, sizes.num_key_value_heads * head
    gate = 2 if sizes.attn_output_gate else 1
    one, many = f"hidden_size {hidden}", f"intermediate_size {inter}"
    q_rows = f"{sizes.num_attention_heads} heads x head_dim {head}"
    k_rows = f"{sizes.num_key_value_heads} key-value heads x head_dim {head}"
    double = f"{q_rows} x 2, with the output gate" if gate == 2 else q_rows
    layer = "mtp.layers.0"
    rules = {
        "mtp.fc.weight": TensorRule(shape=(hidden, 2 * hidden), rows=one, columns=f"2 x {one}")
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        rules[f"mtp.{name}.weight"] = TensorRule(shape=(hidden,), rows=one)
    for name in ("input_layernorm", "post_attention_layernorm"):
        rules[f"{layer}.{name}.weight"] = TensorRule(shape=(hidden,), rows=one)
    for name in ("q_norm", "k_norm"):
        rules[f"{layer}.self_attn.{name}.weight"] = TensorRule(
            shape=(head,), rows=f"head_dim {head}"
        )
    for name, shape, rows, columns, has_bias in (
        ("self_attn.q_proj", (gate * query, hidden), double, one, sizes.attention_bias),
        ("self_attn.k_proj", (key, hidden), k_rows, one, sizes.attention_bias),
        ("self_attn.v_proj", (key, hidden), k_rows, one, sizes.attention_bias),
        ("self_attn.o_proj", (hidden, query), one, q_rows, False),
        ("mlp.gate_proj", (inter, hidden), many, one, False),
        ("mlp.up_proj", (inter, hidden), many, one, False),
        ("mlp.down_proj", (hidden, inter), one, many, False),
    ):
        rules[f"{layer}.{name}.weight"] = TensorRule(shape=shape, rows=rows, columns=columns)
        if has_bias:
            rules[f"{layer}.{name}.bias"] = TensorRule(shape=shape[:1], rows=rows)
    return rules


def build_mtp_config(target: TargetFacts, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The target's own text config, keys of the contract only. Raises DraftError."""
    if target.num_mtp_layers < 1 or "qwen3_5" not in target.model_type:
        raise DraftError(
            f"target '{target.name}' ({target.model_type}) has no MTP head of the Qwen3.5 kind",
            expected="a target with model_type qwen3_5_text and mtp_num_hidden_layers 1",
            fix="Train another family, such as eagle3.",
        )
    nested = target.config.get("text_config")
    level = {**target.config, **(nested if isinstance(nested, dict) else {})}
    config = {key: level[key] for key in MTP_CONFIG_KEYS if level.get(key) is not None}
    rope = {key: v for key, v in target.rope_parameters.items() if not key.startswith("mrope")}
    config.update(
        architectures=list(MTP_ARCHITECTURES),
        model_type=MTP_MODEL_TYPES[0],
        rope_parameters=rope,
        dtype=dtype,
    )
    read_mtp_sizes(config)
    return config


def stitch_target(
    target_dir: str | Path, tensors: Mapping[str, torch.Tensor], out_dir: str | Path
) -> Path:
    """A target folder with other `mtp.*`: every file without them is hard-linked, not copied.

    A shard that holds `mtp.*` beside other tensors is written again without them. Both folders
    must lie on one disk. A linked file is one file under two names: changing it in place changes
    both. Raises DraftError for wrong tensors, TargetError for a folder that cannot be stitched.
    """
    from safetensors.torch import load_file, save_file

    target_dir, out_dir = Path(target_dir), Path(out_dir)
    config = read_json(target_dir / "config.json", error=TargetError)
    nested = config.get("text_config")
    rules = build_mtp_rules(read_mtp_sizes(nested if isinstance(nested, dict) else config))
    for name in sorted({*rules, *tensors}):
        rule, found = rules.get(name), tensors.get(name)
        if rule is None or found is None or tuple(found.shape) != rule.shape:
            raise DraftError(
                f"tensor '{name}' " + ("is missing" if found is None else "does not fit"),
                expected="no such tensor" if rule is None else f"shape {list(rule.shape)}",
            )
    names: dict[str, str] = dict.fromkeys(sorted(tensors), _MTP_FILE)
    with atomic_folder(out_dir) as folder:
        for file in sorted(item for item in target_dir.iterdir() if item.is_file()):
            if file.name == _INDEX:
                continue
            if file.suffix != ".safetensors":
                _link(file, folder / file.name)
                continue
            held = read_header(file).tensors
            kept = [name for name in held if not name.startswith("mtp.")]
            if len(kept) == len(held):
                _link(file, folder / file.name)
            elif kept:
                rest = load_file(str(file))
                save_file(
                    {name: rest[name] for name in kept},
                    str(folder / file.name),
                    metadata={"format": "pt"},
                )
            names.update(dict.fromkeys(kept, file.name))
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            str(folder / _MTP_FILE),
            metadata={"format": "pt"},
        )
        total = sum(
            tensor.num_bytes
            for file_name in set(names.values())
            for tensor in read_header(folder / file_name).tensors.values()
        )
        write_json(
            folder / _INDEX,
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))},
        )
    return out_dir


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source.resolve(), place)
    except OSError as problem:
        raise TargetError(
            f"cannot be hard-linked: {problem.strerror}",
            where=str(source),
            fix="Write the stitched target to the disk that holds the target.",
        ) from None
