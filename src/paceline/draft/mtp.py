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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.draft.rows import TensorRule, build_rules
from paceline.draft.sizes import read_mtp
from paceline.draft.table import FAMILIES
from paceline.errors import DraftError, TargetError
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

_VARIANT = FAMILIES["mtp"].variants[0]
MTP_ARCHITECTURES = _VARIANT.architectures
MTP_MODEL_TYPES = _VARIANT.model_types
MTP_CONFIG_KEYS = {key: rule.kind for key, rule in _VARIANT.keys.items()}
_MTP_FILE = "mtp.safetensors"
_INDEX = "model.safetensors.index.json"


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
    numbers = read_mtp(config).numbers
    return MtpSizes(
        hidden_size=numbers["hidden_size"],
        intermediate_size=numbers["intermediate_size"],
        num_attention_heads=numbers["num_attention_heads"],
        num_key_value_heads=numbers["num_key_value_heads"],
        head_dim=numbers["head_dim"],
        vocab_size=numbers["vocab_size"],
        attn_output_gate=numbers["query_parts"] == 2,
        attention_bias=config.get("attention_bias", False) is True,
    )


def build_mtp_rules(sizes: MtpSizes) -> dict[str, TensorRule]:
    """Every tensor of the head by its name in the file."""
    config = {**asdict(sizes), "mtp_num_hidden_layers": 1}
    rules = build_rules(_VARIANT, read_mtp(config))
    return {name: rule for name, rule in rules.items() if rule.required}


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
