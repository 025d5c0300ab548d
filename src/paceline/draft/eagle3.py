"""The sizes of one EAGLE-3 draft as a record, for rules that compare them with a target.

Source of the facts: vllm/model_executor/models/{llama,qwen3}_eagle3.py and
vllm/config/speculative.py of 0.31.0. One decoder layer reads concat(norm(embedding),
norm(hidden)), so its q, k, v inputs are 2 x hidden_size wide; `fc` folds the tapped target layers
into one hidden state. Keys and tensors of the family are in the table of contracts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.draft.sizes import read_aux_layer_ids, read_eagle3, read_eagle3_qwen3
from paceline.draft.table import FAMILIES

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = [
    "EAGLE3_ARCHITECTURES",
    "EAGLE3_CONFIG_KEYS",
    "EAGLE3_MODEL_TYPES",
    "Eagle3Sizes",
    "default_aux_layer_ids",
    "read_aux_layer_ids",
    "read_eagle3_sizes",
]

_VARIANTS = FAMILIES["eagle3"].variants
EAGLE3_ARCHITECTURES = tuple(name for variant in _VARIANTS for name in variant.architectures)
EAGLE3_MODEL_TYPES = tuple(name for variant in _VARIANTS for name in variant.model_types)
EAGLE3_CONFIG_KEYS = {key: rule.kind for variant in _VARIANTS for key, rule in variant.keys.items()}


@dataclass(frozen=True, kw_only=True)
class Eagle3Sizes:
    """Sizes that vLLM 0.31.0 takes from one EAGLE-3 config, defaults filled in as it does."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    head_dim_is_stated: bool
    vocab_size: int
    draft_vocab_size: int
    num_aux_hidden_states: int
    attention_bias: bool
    mlp_bias: bool
    norm_before_fc: bool
    fc_norm: bool

    @property
    def has_draft_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """The layers vLLM taps when a config names none: {2, n // 2, n - 3}, sorted, unique."""
    return tuple(sorted({2, num_target_layers // 2, num_target_layers - 3}))


def read_eagle3_sizes(config: Mapping[str, Any], target: TargetFacts | None = None) -> Eagle3Sizes:
    """Reads the sizes; raises DraftError for one that is missing or senseless.

    target: only to count the layers that vLLM taps when the config names none.
    """
    is_qwen3 = config.get("model_type") == "qwen3"
    sizes = read_eagle3_qwen3(config) if is_qwen3 else read_eagle3(config)
    numbers = sizes.numbers
    stated = read_aux_layer_ids(config) or config.get("num_aux_hidden_states") is not None
    taps = numbers["num_taps"]
    if not stated and target is not None:
        taps = len(default_aux_layer_ids(target.num_hidden_layers))
    return Eagle3Sizes(
        hidden_size=numbers["hidden_size"],
        target_hidden_size=numbers["target_hidden_size"],
        intermediate_size=numbers["intermediate_size"],
        num_hidden_layers=numbers["num_hidden_layers"],
        num_attention_heads=numbers["num_attention_heads"],
        num_key_value_heads=numbers["num_key_value_heads"],
        head_dim=numbers["head_dim"],
        head_dim_is_stated=config.get("head_dim") is not None,
        vocab_size=numbers["vocab_size"],
        draft_vocab_size=numbers["draft_vocab_size"],
        num_aux_hidden_states=taps,
        attention_bias="attention_bias" in sizes.flags,
        mlp_bias="mlp_bias" in sizes.flags,
        norm_before_fc="norm_before_fc" in sizes.flags,
        fc_norm="fc_norm" in sizes.flags,
    )
