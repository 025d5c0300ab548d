"""DFlash as its config.json says it: what each layer sees, and the config of a new draft.

Source of the facts: vllm/model_executor/models/qwen3_dflash.py of 0.31.0. What a layer sees follows
from four keys: `is_causal`, else `dflash_config.causal`, else a sliding layer is causal and a full
one is not; a window comes from `layer_types`, or from `dflash_config.use_swa` for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.draft.config import build_decoder_keys, check_mask_token, choose_draft_rows
from paceline.errors import DraftError

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = ["build_dflash_config", "read_dflash_attention"]

_SLIDING = "sliding_attention"


def read_dflash_attention(config: Mapping[str, Any]) -> list[tuple[int | None, bool]]:
    """For each layer (window or None for all, causal), as vLLM 0.31.0 resolves them.

    Raises DraftError for a sliding layer without a window, which stops vLLM.
    """
    nested = config.get("dflash_config")
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    types = config.get("layer_types") or None
    slides = types is not None and _SLIDING in types
    result: list[tuple[int | None, bool]] = []
    for layer in range(int(config["num_hidden_layers"])):
        is_sliding = bool(inner.get("use_swa", False))
        if types is not None and (slides or not is_sliding):
            is_sliding = types[layer] == _SLIDING
        window = None
        if is_sliding:
            own = config.get("sliding_window") if config.get("use_sliding_window") else None
            window = inner.get("swa_window_size", own)
            if window is None:
                raise DraftError(
                    f"layer {layer} slides, but no window is stated",
                    where="config.json: sliding_window",
                    expected="a number of tokens, and use_sliding_window true",
                )
        causal = config.get("is_causal")
        if causal is None:
            causal = inner.get("causal")
        if causal is None:
            causal = types is not None and types[layer] == _SLIDING
        result.append((window, bool(causal)))
    return result


def build_dflash_config(
    target: TargetFacts,
    *,
    aux_layer_ids: Sequence[int],
    mask_token_id: int,
    num_speculative_tokens: int,
    num_hidden_layers: int = 1,
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    max_position_embeddings: int | None = None,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Builds a config whose every size is stated; sizes not given are the target's own.

    aux_layer_ids: layers to tap by EAGLE-3's count (id i: the stream after i layers, 1 to the
    layer count), ascending; the file counts from 0. mask_token_id: the target's row that stands for
    a slot to be filled. causal: whether a slot sees the later slots of its block. sliding_window:
    places that every layer sees. Raises DraftError for what vLLM would refuse or read differently.
    """
    ids, top = list(aux_layer_ids), target.num_hidden_layers
    if not ids or ids != sorted(set(ids)) or not all(1 <= layer <= top for layer in ids):
        raise DraftError(
            f"tapped layers {ids} cannot be used",
            where="dflash_config.target_layer_ids",
            expected=f"ascending, unique ids from 1 to {top}",
            fix="vLLM sorts the ids, so another order would feed fc the wrong layers.",
        )
    check_mask_token(mask_token_id, target)
    window = sliding_window
    if window is not None and window <= num_speculative_tokens:
        raise DraftError(
            f"sliding_window {window} cannot be used",
            where="sliding_window",
            expected=f"more than a block of {num_speculative_tokens + 1} slots less one",
        )
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        **build_decoder_keys(
            target,
            model_type="qwen3",
            num_hidden_layers=num_hidden_layers,
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            dtype=dtype,
        ),
        "draft_vocab_size": choose_draft_rows(target, draft_vocab_size),
        "block_size": num_speculative_tokens + 1,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": [layer - 1 for layer in ids],
            "causal": causal,
        },
    }
    if window is not None:
        config |= {
            "layer_types": [_SLIDING] * num_hidden_layers,
            "sliding_window": window,
            "use_sliding_window": True,
        }
    return config
