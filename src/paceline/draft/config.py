"""The config.json of a new EAGLE-3 draft as vLLM 0.31.0 reads it, and the keys of all decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import DraftError

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = [
    "build_decoder_keys",
    "build_eagle3_config",
    "check_mask_token",
    "choose_draft_rows",
    "copy_rope",
]

_NOT_FOR_DRAFTS = ("mrope_section", "mrope_interleaved")


def build_eagle3_config(
    target: TargetFacts,
    *,
    aux_layer_ids: Sequence[int],
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    num_hidden_layers: int = 1,
    norm_before_residual: bool = False,
    mask_token_id: int | None = None,
    max_position_embeddings: int | None = None,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Builds a config whose every size is stated; sizes not given are the target's own.

    aux_layer_ids: layers to tap, ascending; id i is the residual stream after i layers (0: the
    embeddings, num_hidden_layers: before the final norm). vLLM sorts and de-duplicates them.
    draft_vocab_size: None or the target's own size for the full vocabulary (head shared).
    mask_token_id: for a draft of all K tokens in one pass, the target's row that stands for a token
    still to come; None drafts one after another.
    Raises DraftError for ids or sizes that vLLM would refuse or read differently.
    """
    ids = list(aux_layer_ids)
    top = target.num_hidden_layers
    if not ids or ids != sorted(set(ids)) or not all(0 <= layer <= top for layer in ids):
        raise DraftError(
            f"tapped layers {ids} cannot be used",
            where="eagle_aux_hidden_state_layer_ids",
            expected=f"ascending, unique ids from 0 to {top}",
            fix="vLLM sorts the ids, so another order would feed fc the wrong layers.",
        )
    parallel = {}
    if mask_token_id is not None:
        check_mask_token(mask_token_id, target)
        parallel["mask_token_id"] = mask_token_id
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **build_decoder_keys(
            target,
            model_type="llama",
            num_hidden_layers=num_hidden_layers,
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            dtype=dtype,
        ),
        "draft_vocab_size": choose_draft_rows(target, draft_vocab_size),
        "norm_before_residual": norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": ids,
        "num_aux_hidden_states": len(ids),
        **parallel,
    }


def build_decoder_keys(
    target: TargetFacts,
    *,
    model_type: str,
    num_hidden_layers: int,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    max_position_embeddings: int | None = None,
    tie_word_embeddings: bool = False,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """The keys of a draft's decoder layers, every size stated; those not given are the target's.

    model_type: "llama" or "qwen3", whose layer vLLM runs. Raises DraftError for head counts that it
    refuses.
    """
    width = hidden_size or target.hidden_size
    heads = num_attention_heads or target.num_attention_heads
    kv_heads = num_key_value_heads or target.num_key_value_heads
    if model_type == "llama" and width % heads:
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
    return {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or target.head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": max_position_embeddings or target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "hidden_act": "silu",  # the only activation of vLLM's Llama and Qwen3 layers
        "rope_parameters": copy_rope(target),
        "attention_bias": False,
        **({"mlp_bias": False} if model_type == "llama" else {}),
        "tie_word_embeddings": tie_word_embeddings,
        "dtype": dtype,
    }


def choose_draft_rows(target: TargetFacts, draft_vocab_size: int | None) -> int:
    """Rows of the draft's output matrix; None is the whole vocabulary. Raises DraftError."""
    rows = target.vocab_size if draft_vocab_size is None else draft_vocab_size
    if not 1 <= rows <= target.vocab_size:
        raise DraftError(
            f"a draft vocabulary of {rows} cannot be used",
            where="draft_vocab_size",
            expected=f"1 to {target.vocab_size}, the target's own vocabulary",
        )
    return rows


def check_mask_token(token: int, target: TargetFacts) -> None:
    """Raises DraftError for an id that is no row of the target's, or stands in its texts."""
    ends = {*target.eos_token_ids, target.bos_token_id, target.pad_token_id}
    if not 0 <= token < target.vocab_size or token in ends:
        raise DraftError(
            f"mask_token_id {token} cannot be used",
            where="mask_token_id",
            expected=f"0 to {target.vocab_size - 1}, not begin, end or padding",
            fix="Take a token that never stands in a text: a reserved one that is not in use.",
        )


def copy_rope(target: TargetFacts) -> dict[str, Any]:
    """The target's rotary parameters as a text-only draft has them."""
    rope = {
        key: value for key, value in target.rope_parameters.items() if key not in _NOT_FOR_DRAFTS
    }
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    return rope
