"""The config.json of a new draft model: a whole small model of the target's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import DraftError

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = ["build_draft_model_config"]

_NOT_FOR_DRAFTS = ("mrope_section", "mrope_interleaved")
_KINDS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def build_draft_model_config(
    target: TargetFacts,
    *,
    num_layers: int,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    own_head: bool | None = None,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Builds a config whose every size is stated; sizes not given are the target's own.

    The layers are Qwen3's for a Qwen3 target and Llama's for any other. own_head: an output matrix
    beside the embeddings; None is as the target has it. vLLM 0.31.0 shares nothing with the target
    and wants its whole vocabulary. Raises DraftError for sizes that vLLM refuses.
    """
    width = hidden_size or target.hidden_size
    heads = num_attention_heads or target.num_attention_heads
    kv_heads = num_key_value_heads or target.num_key_value_heads
    kind = "qwen3" if target.model_type == "qwen3" else "llama"
    if kind == "llama" and width % heads:
        raise DraftError(
            f"hidden_size {width} is not a multiple of {heads} attention heads",
            where="num_attention_heads",
            expected=f"a divisor of {width}",
            fix="vLLM refuses such a Llama layer, whatever head_dim says.",
        )
    if heads % kv_heads:
        raise DraftError(
            f"{heads} attention heads cannot share {kv_heads} key-value heads",
            where="num_key_value_heads",
            expected="a divisor of num_attention_heads",
        )
    rope = {
        key: value for key, value in target.rope_parameters.items() if key not in _NOT_FOR_DRAFTS
    }
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    config: dict[str, Any] = {
        "architectures": [_KINDS[kind]],
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or target.head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "attention_bias": False,
        "tie_word_embeddings": target.tie_word_embeddings if own_head is None else not own_head,
        "dtype": dtype,
    }
    if kind == "llama":
        config["mlp_bias"] = False
    return config
