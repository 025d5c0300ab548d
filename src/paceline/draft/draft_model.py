"""The config.json of a new draft model: a whole small model of the target's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.draft.config import build_decoder_keys

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = ["build_draft_model_config"]

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
    kind = "qwen3" if target.model_type == "qwen3" else "llama"
    tied = target.tie_word_embeddings if own_head is None else not own_head
    return {
        "architectures": [_KINDS[kind]],
        **build_decoder_keys(
            target,
            model_type=kind,
            num_hidden_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            tie_word_embeddings=tied,
            dtype=dtype,
        ),
    }
