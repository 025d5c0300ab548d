"""Sound draft folders of every family and variant, tiny: usual ones, and odd ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from builders import Tensor, encode_d2t, ones_bf16, random_bf16, write_safetensors

from paceline.draft import TensorRule, build_contract
from paceline.draft.quantized import HEAD_TARGET

__all__ = ["CASES", "Case", "build_tensors_of", "write_folder"]

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_LLAMA_TARGET = {
    **_BASE,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
}
_QWEN_TARGET = {
    **_BASE,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
}
_TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "num_aux_hidden_states": 3}
_EAGLE3 = {
    **_BASE,
    **_TAPS,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": 128,
    "norm_before_residual": False,
}
_EAGLE3_QWEN3 = {**_EAGLE3, "architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
_MEDUSA = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": 64,
    "vocab_size": 256,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "original_lm_head": True,
    "dtype": "bfloat16",
}
_DFLASH = {
    **_BASE,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 1, 2]},
}
_WHOLE = {**_BASE, "num_hidden_layers": 2}


def quantize(
    kind: str, bits: int, group_size: int | None, *, with_inputs: bool = False, head: bool = False
) -> dict[str, Any]:
    """A quantization_config in the compressed-tensors format, for all layers but the head.

    with_inputs: inputs are quantised too, as FP8 always does. head: the output layer is meant too.
    """
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
    }
    with_inputs = with_inputs or kind == "float"
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True}
    form = f"{kind}-quantized" if with_inputs else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {
            "group_0": {
                "targets": ["Linear", HEAD_TARGET] if head else ["Linear"],
                "weights": weights,
                "input_activations": {**inputs, "strategy": "token"} if with_inputs else None,
            }
        },
        "ignore": [] if head else ["lm_head"],
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sound folder. optional: tensors to add that no contract asks for; renamed: other names.

    with_faults: try every single fault of it too.
    """

    name: str
    family: str
    config: Mapping[str, Any]
    target: Mapping[str, Any] = field(default_factory=lambda: _LLAMA_TARGET)
    settings: Mapping[str, Any] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    num_shards: int = 1
    with_faults: bool = True


def _case(name: str, family: str, config: Mapping[str, Any], /, **more: Any) -> Case:
    return Case(name=name, family=family, config=config, **more)


CASES: tuple[Case, ...] = (
    _case("eagle3, Llama layer, cut vocabulary", "eagle3", _EAGLE3, optional=("t2d",)),
    _case(
        "eagle3, two layers, biases, norms before fc",
        "eagle3",
        {
            **_EAGLE3,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_before_fc": True,
            "fc_norm": True,
        },
        optional=("layers.1.hidden_norm.weight",),
    ),
    _case(
        "eagle3, width of its own",
        "eagle3",
        {**_EAGLE3, "hidden_size": 32, "head_dim": 32, "target_hidden_size": 64},
    ),
    _case("eagle3, Qwen3 layer", "eagle3", {**_EAGLE3_QWEN3, "num_hidden_layers": 2}),
    _case(
        "eagle3, drafts in parallel",
        "eagle3",
        {**_EAGLE3, "mask_token_id": 255},
        settings={"parallel_drafting": True},
    ),
    _case("mtp, Qwen3.5", "mtp", {**_QWEN_TARGET}, target=_QWEN_TARGET),
    _case("medusa, one output layer", "medusa", _MEDUSA),
    _case(
        "medusa, an output layer each, biases, two layers",
        "medusa",
        {
            **_MEDUSA,
            "original_lm_head": False,
            "medusa_fc_bias": True,
            "num_hidden_layers": 2,
        },
    ),
    _case(
        "draft_model, Llama",
        "draft_model",
        {**_WHOLE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    ),
    _case(
        "draft_model, Qwen3, tied",
        "draft_model",
        {
            **_WHOLE,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "tie_word_embeddings": True,
        },
    ),
    _case(
        "draft_model, Qwen2",
        "draft_model",
        {
            **{key: value for key, value in _WHOLE.items() if key != "head_dim"},
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
        },
    ),
    _case("dflash", "dflash", {**_DFLASH, "attention_bias": True}),
    _case(
        "eagle3, int4 weights in groups of 32",
        "eagle3",
        {**_EAGLE3, "quantization_config": quantize("int", 4, 32)},
    ),
    _case(
        "draft_model, int4 weights by rows",
        "draft_model",
        {
            **_WHOLE,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "quantization_config": quantize("int", 4, None),
        },
    ),
    _case(
        "dflash, FP8",
        "dflash",
        {**_DFLASH, "quantization_config": quantize("float", 8, None)},
    ),
    _case(
        "eagle3, int8 weights and inputs",
        "eagle3",
        {**_EAGLE3, "quantization_config": quantize("int", 8, None, with_inputs=True)},
    ),
    _case(
        "draft_model, Qwen3, int8 weights and inputs",
        "draft_model",
        {
            **_WHOLE,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "quantization_config": quantize("int", 8, None, with_inputs=True),
        },
    ),
    _case(
        "eagle3, int4 weights, the output layer too",
        "eagle3",
        {**_EAGLE3, "quantization_config": quantize("int", 4, 32, head=True)},
    ),
    # odd but sound folders: loaded by vLLM, so read by us
    _case(
        "odd: eagle3, full vocabulary, nothing of its own",
        "eagle3",
        {**_EAGLE3, "draft_vocab_size": 256},
        with_faults=False,
    ),
    _case(
        "odd: eagle3, own embeddings and head",
        "eagle3",
        {**_EAGLE3, "draft_vocab_size": 256},
        optional=("embed_tokens.weight", "lm_head.weight"),
        with_faults=False,
    ),
    _case("odd: eagle3, two shards", "eagle3", _EAGLE3, num_shards=2, with_faults=False),
    _case(
        "odd: eagle3, layers.0 for midlayer",
        "eagle3",
        {**_EAGLE3, "architectures": ["Eagle3LlamaForCausalLM"]},
        renamed={"midlayer.": "layers.0."},
        with_faults=False,
    ),
    _case(
        "odd: eagle3, head_dim is not hidden / heads",
        "eagle3",
        {**_EAGLE3, "head_dim": 64},
        with_faults=False,
    ),
    _case(
        "odd: eagle3, plain Llama architecture",
        "eagle3",
        {**_EAGLE3, "architectures": ["LlamaForCausalLM"]},
        with_faults=False,
    ),
    _case(
        "odd: eagle3, the class by another name",
        "eagle3",
        {**_EAGLE3, "architectures": ["Eagle3Qwen3vlForCausalLM"]},
        with_faults=False,
    ),
    _case(
        "odd: eagle3, plain Qwen3 architecture, default head_dim of 128",
        "eagle3",
        {
            **{key: value for key, value in _EAGLE3_QWEN3.items() if key != "head_dim"},
            "architectures": ["Qwen3ForCausalLM"],
        },
        with_faults=False,
    ),
    _case(
        "odd: eagle3, Qwen3 layer, four taps told once",
        "eagle3",
        {
            **{key: v for key, v in _EAGLE3_QWEN3.items() if key != "num_aux_hidden_states"},
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2, 4],
        },
        with_faults=False,
    ),
    _case(
        "odd: eagle3, rotary tables in the file",
        "eagle3",
        _EAGLE3,
        optional=("midlayer.self_attn.rotary_emb.inv_freq",),
        with_faults=False,
    ),
    _case(
        "odd: eagle3, FP8, one layer left plain by vLLM's own number for it",
        "eagle3",
        {
            **_EAGLE3,
            "quantization_config": {
                **quantize("float", 8, None),
                "ignore": ["lm_head", "model.layers.4.mlp.down_proj"],
            },
        },
        with_faults=False,
    ),
    _case(
        "odd: mtp with the target's embeddings and head",
        "mtp",
        {**_QWEN_TARGET},
        target=_QWEN_TARGET,
        optional=("model.embed_tokens.weight", "lm_head.weight"),
        with_faults=False,
    ),
    _case(
        "odd: medusa, names of old checkpoints",
        "medusa",
        {
            **{key: v for key, v in _MEDUSA.items() if key not in ("num_heads",)},
            "medusa_num_heads": 3,
        },
        renamed={
            "blocks.0.layers.0.": "medusa_heads.0.0.linear.",
            "blocks.1.layers.0.": "1.0.linear.",
            "lm_head.": "lm_heads.0.",
        },
        with_faults=False,
    ),
    _case(
        "odd: draft_model, tied, and a head in the file",
        "draft_model",
        {
            **_WHOLE,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "tie_word_embeddings": True,
        },
        optional=("lm_head.weight",),
        with_faults=False,
    ),
    _case(
        "odd: dflash, cut vocabulary, two layers",
        "dflash",
        {**_DFLASH, "draft_vocab_size": 128, "num_hidden_layers": 2},
        with_faults=False,
    ),
)


def _values(name: str, rule: TensorRule, seed: int, logical: tuple[int, ...]) -> Tensor:
    if name == "d2t":
        return encode_d2t(list(range(rule.shape[0])))  # target ids 0, 2, 4, ...
    if name == "t2d":
        mask = np.zeros(rule.shape, dtype="u1")
        mask[0 : rule.shape[0] : 2] = 1
        return "BOOL", rule.shape, mask.tobytes()
    if name.endswith("weight_shape"):
        return "I64", (2,), np.array(logical, dtype="<i8").tobytes()
    if rule.dtypes in (("I32",), ("F8_E4M3",), ("I8",)):
        size = 4 if rule.dtypes == ("I32",) else 1
        count = size * int(np.prod(rule.shape))
        # below 0x78: no pattern of E4M3 that is not finite
        raw = np.random.default_rng(seed).integers(0, 0x78, count, dtype="u1").tobytes()
        return rule.dtypes[0], rule.shape, raw
    if name.endswith("weight_scale"):
        return ones_bf16(*rule.shape)
    return random_bf16(*rule.shape, seed=seed) if len(rule.shape) > 1 else ones_bf16(*rule.shape)


def build_tensors_of(case: Case) -> dict[str, Tensor]:
    """Every tensor that the contract asks for, and the optional ones of the case."""
    contract = replace(
        build_contract(case.family, case.config),
        num_target_layers=case.target["num_hidden_layers"],
    )
    plain = contract.tensors
    # every linear layer in its packed form, where the case has one
    packed = [f"{name.removesuffix('weight')}weight_scale" for name in plain]
    tensors = {}
    for seed, (name, rule) in enumerate(contract.rules_for(packed).items()):
        if rule.required or name in case.optional:
            renamed = name
            for ours, theirs in case.renamed.items():
                renamed = theirs + renamed[len(ours) :] if renamed.startswith(ours) else renamed
            logical = plain.get(name.replace("weight_shape", "weight"), rule).shape
            tensors[renamed] = _values(name, rule, seed, logical)
    return tensors


def write_folder(case: Case, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    for name, value in (
        ("config.json", case.config),
        ("spec.json", {"family": case.family, "num_speculative_tokens": 3}),
        ("metadata.json", {"name": case.name}),
    ):
        (folder / name).write_text(json.dumps(value))
    if case.num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(case.num_shards):
        file = f"model-{shard + 1:05}-of-{case.num_shards:05}.safetensors"
        part = names[shard :: case.num_shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(len(raw) for _, _, raw in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
