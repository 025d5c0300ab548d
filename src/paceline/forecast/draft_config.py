"""A design as the config.json that vLLM 0.31.0 would build it from, for runs by shape."""

from __future__ import annotations

from typing import Any

from paceline.forecast.design import Design
from paceline.forecast.shape import TargetShape

__all__ = ["build_draft_config", "list_own_tensors"]

_MROPE = ("mrope_section", "mrope_interleaved")


def build_draft_config(design: Design, shape: TargetShape) -> dict[str, Any]:
    """The config of a draft folder; {} for the target's own MTP head and for model-free methods."""
    if design.family in ("mtp", "ngram", "suffix"):
        return {}
    if design.family == "medusa":
        return _medusa(design)
    facts = shape.facts
    rope = {key: value for key, value in facts.rope_parameters.items() if key not in _MROPE}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    config: dict[str, Any] = {
        "hidden_size": design.hidden_size,
        "intermediate_size": design.intermediate_size,
        "num_hidden_layers": design.num_layers,
        "num_attention_heads": design.num_heads,
        "num_key_value_heads": design.num_kv_heads,
        "head_dim": design.head_dim,
        "vocab_size": design.vocab_size,
        "max_position_embeddings": design.max_position_embeddings,
        "rms_norm_eps": facts.rms_norm_eps,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if design.window:
        config["sliding_window"] = design.window
        config["layer_types"] = ["sliding_attention"] * design.num_layers
    if design.weights != "bf16":
        config["quantization_config"] = _quantization(design)
    if design.family == "draft_model":
        config |= {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "mlp_bias": False,
            "tie_word_embeddings": not design.own_head,
        }
        return config
    taps = _spread(design.num_taps, facts.num_hidden_layers)
    config |= {"draft_vocab_size": design.draft_vocab_size, "target_hidden_size": facts.hidden_size}
    if design.family == "eagle3":
        return config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "mlp_bias": False,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": taps,
            "num_aux_hidden_states": len(taps),
            **({"mask_token_id": design.vocab_size - 1} if design.parallel else {}),
        }
    config |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": design.num_speculative_tokens + 1,
        "dflash_config": {
            "mask_token_id": design.vocab_size - 1,
            "target_layer_ids": [tap - 1 for tap in taps],
        },
    }
    if design.window:
        config["use_sliding_window"] = True
    return config


def list_own_tensors(design: Design) -> tuple[str, ...]:
    """Tensors that a folder may leave out and that this design stores."""
    names = {
        "eagle3": ("embed_tokens.weight", "lm_head.weight", "d2t"),
        "dflash": ("embed_tokens.weight", "lm_head.weight", "d2t"),
    }.get(design.family, ())
    has = (design.own_embedding, design.own_head, design.has_draft_vocabulary)
    return tuple(name for name, is_own in zip(names, has, strict=False) if is_own)


def _medusa(design: Design) -> dict[str, Any]:
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": design.hidden_size,
        "vocab_size": design.vocab_size,
        "num_heads": design.num_speculative_tokens,
        "num_hidden_layers": design.num_layers,
        "original_lm_head": design.one_head,
        "dtype": "bfloat16",
    }
    if design.has_draft_vocabulary:
        config["truncated_vocab_size"] = design.draft_vocab_size
    return config


def _spread(count: int, num_layers: int) -> list[int]:
    """Ascending, unique layers from 1 to the last, spread evenly."""
    return [1 + (num_layers - 1) * (2 * i + 1) // (2 * count) for i in range(count)]


def _quantization(design: Design) -> dict[str, Any]:
    """compressed-tensors: every linear layer but the output layer."""
    is_float = design.weights == "fp8"
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4 if design.weights == "w4a16" else 8,
                    "type": "float" if is_float else "int",
                    "symmetric": True,
                    "dynamic": False,
                    "strategy": "group" if design.group_size else "channel",
                    "group_size": design.group_size or None,
                },
                "input_activations": {**inputs, "strategy": "token"} if is_float else None,
            }
        },
        "ignore": ["lm_head"],
    }
