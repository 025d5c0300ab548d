"""The config.json of a new Medusa draft, as vLLM 0.31.0 reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import DraftError

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = ["build_medusa_config"]

_MAX_LAYERS = 16


def build_medusa_config(
    target: TargetFacts,
    *,
    num_heads: int,
    num_layers: int = 1,
    one_head: bool = True,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Builds a config for num_heads heads, one a drafted token, each of num_layers residual layers.

    one_head: all heads end in one output matrix, which the draft stores; otherwise in one each.
    vLLM 0.31.0 never lends Medusa the target's, and loads no cut vocabulary. No key but the two
    below may hold "num" with "heads" or "layers": vLLM would take it for them.
    """
    if not 1 <= num_layers <= _MAX_LAYERS:
        raise DraftError(
            f"{num_layers} residual layers a head cannot be used",
            where="num_hidden_layers",
            expected=f"1 to {_MAX_LAYERS}",
        )
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "original_lm_head": one_head,
        "medusa_fc_bias": False,
        "dtype": dtype,
    }
