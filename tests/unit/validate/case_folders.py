"""Small folders and targets that the reports of `user_cases.py` are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from builders import (
    REMOVE,
    build_config,
    build_draft,
    build_shards,
    encode_bf16,
    random_bf16,
)
from contract_cases import CASES, build_tensors_of, write_folder

__all__ = [
    "ATTENTION",
    "AUX",
    "LAYER",
    "LEFT_ALONE",
    "MLP",
    "NO_D2T",
    "ONE_HEAD",
    "SHARD_1",
    "SHARD_2",
    "SHARED_HEAD",
    "WIDE",
    "UserCase",
    "cut_shard",
    "dflash",
    "draft",
    "head_dim_removed",
    "head_of",
    "in_path",
    "of_contract",
    "of_hybrid",
    "of_mtp",
    "over_fp16",
    "own_embeddings",
    "rotary",
    "row",
    "with_pickle",
    "without_weights",
]

AUX = "eagle_aux_hidden_state_layer_ids"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHARD_1, SHARD_2 = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
SHARED_HEAD = {"trained": {"thinking": "none", "lm_head": "shared with the target"}}
NO_D2T = "draft vocabulary is 16 of 64 but there is no d2t"
OF_TARGET = {"tokenizer_sha256": "a" * 64}


def draft(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: build_draft(folder, **changes)


def with_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """The weights stay, config.json is another."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_contract(name: str, **changes: Any) -> Callable[[Path], Path]:
    """A sound folder of another family, with other config keys, spec or tensors."""
    (case,) = [case for case in CASES if case.name == name]

    def make(folder: Path) -> Path:
        tensors = build_tensors_of(case)
        write_folder(case, folder, changes.get("tensors", lambda found: found)(tensors))
        config = {**case.config, **changes.get("config", {})}
        with_config(folder, {key: v for key, v in config.items() if v is not REMOVE})
        spec = {"family": case.family, "num_speculative_tokens": changes.get("k", 3)}
        (folder / "spec.json").write_text(json.dumps(spec))
        record = {"name": "d", "trained": {"thinking": "none", "target": OF_TARGET}}
        (folder / "metadata.json").write_text(json.dumps(record))
        return folder

    return make


def cut_shard(folder: Path) -> Path:
    build_shards(folder)
    (folder / SHARD_2).unlink()
    return folder


def over_fp16(folder: Path) -> Path:
    values = np.random.default_rng(0).standard_normal((16, 48)).astype(np.float32)
    values[3, 4] = 70000.0
    return build_draft(folder, tensors={"fc.weight": ("BF16", (16, 48), encode_bf16(values))})


def own_embeddings(record: str | None) -> Callable[[Path], Path]:
    trained = {"thinking": "none", **({"embeddings": record} if record else {})}
    return draft(
        tensors={"embed_tokens.weight": random_bf16(64, 16, seed=2)}, metadata={"trained": trained}
    )


def rotary(recorded: int | None) -> Callable[[Path], Path]:
    return draft(
        config={"head_dim": 8, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
        metadata={"trained": {"thinking": "none", "trained_rotary_dim": recorded}},
    )


def head_dim_removed(folder: Path) -> Path:
    return with_config(build_draft(folder, config={"head_dim": 8}), build_config(head_dim=REMOVE))


def dflash(token: Any) -> Callable[[Path], Path]:
    inner = {"target_layer_ids": [0, 1, 2]}
    if token is not None:
        inner["mask_token_id"] = token
    return of_contract("dflash", config={"dflash_config": inner})


def with_pickle(folder: Path) -> Path:
    (folder / "mask_embedding.pt").write_bytes(b"PK\x03\x04")
    return folder


def without_weights(family: str, **settings: Any) -> Callable[[Path], Path]:
    """A folder of spec.json alone."""

    def make(folder: Path) -> Path:
        folder.mkdir()
        (folder / "spec.json").write_text(json.dumps({"family": family, **settings}))
        return folder

    return make


def in_path(word: str) -> Callable[[Path], Path]:
    return lambda folder: of_contract("medusa, one output layer")(folder / word / "a")


def head_of(*kept: str) -> Callable[[Path], Path]:
    """An MTP folder of which only the tensors that begin so are left; none for all."""
    return of_contract(
        "mtp, Qwen3.5",
        tensors=lambda found: (
            {
                name: tensor
                for name, tensor in found.items()
                if not kept or (kept != ("-",) and name.startswith(kept))
            }
            or {"other.weight": random_bf16(4, 4, seed=1)}
        ),
    )


(MTP_CASE,) = [case for case in CASES if case.name == "mtp, Qwen3.5"]
LAYER = "mtp.layers.0"
ATTENTION = [f"{LAYER}.self_attn.{letter}_proj" for letter in "qkvo"]
MLP = [f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down")]


def of_mtp(*, ignore: list[str] | None = None, layers: int = 1) -> dict[str, Any]:
    """The hybrid toy target, quantized to four bits when it ignores anything."""
    config = {**MTP_CASE.target, "mtp_num_hidden_layers": layers}
    if ignore is not None:
        scheme = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": scheme},
            "ignore": ignore,
        }
    return {"from_config": config}


LEFT_ALONE = ["lm_head", "re:^mtp.*", "re:.*mlp.*"]


def of_hybrid(
    *, packed: tuple[str, ...] = (), attention: bool, ignore: list[str], without: int | None = None
) -> Any:
    """The same target of eight layers (three recurrent, one attention, twice) with its weights.

    packed: projections of recurrent layers that are stored packed; attention: so are q, k, v, o.
    """
    config = of_mtp(ignore=ignore)["from_config"]
    config |= {
        "num_hidden_layers": 8,
        "layer_types": 2 * (["linear_attention"] * 3 + ["full_attention"]),
    }
    ends = ("lm_head.weight", "model.embed_tokens.weight")
    tensors: dict[str, Any] = {name: random_bf16(256, 64, seed=9) for name in ends}
    for layer, kind in enumerate(config["layer_types"]):
        if layer == without:
            continue
        if kind == "linear_attention":
            names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
            place, stored = f"model.layers.{layer}.linear_attn", packed
        else:
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            place, stored = f"model.layers.{layer}.self_attn", names if attention else ()
        for name in names:
            if name in stored:
                tensors[f"{place}.{name}.weight_packed"] = ("I32", (4, 1), b"\1" * 16)
                tensors[f"{place}.{name}.weight_scale"] = random_bf16(4, 1, seed=1)
            else:
                tensors[f"{place}.{name}.weight"] = random_bf16(4, 8, seed=layer)
    return {"from_config": config, "tensors": tensors}


@dataclass(frozen=True, kw_only=True)
class UserCase:
    """verdict: of the whole folder. rule, words: a finding that must be there, "" for none.

    target: changes of the toy target; embeddings: seed of a target's own, on disk.
    """

    case: str
    make: Callable[[Path], Path]
    verdict: str
    rule: str = ""
    words: tuple[str, ...] = ()
    target: Mapping[str, Any] = field(default_factory=dict)
    deep: bool = False
    embeddings: int | None = None
    context_tokens: int | None = None


WIDE = {"hidden_size": 64, "vocab_size": 256, "num_tokenizer_tokens": 250, "eos_token_ids": (2,)}
ONE_HEAD = "medusa, one output layer"


def row(
    case: str, make: Callable[[Path], Path], verdict: str, rule: str = "", *words: str, **more: Any
) -> UserCase:
    return UserCase(case=case, make=make, verdict=verdict, rule=rule, words=words, **more)
