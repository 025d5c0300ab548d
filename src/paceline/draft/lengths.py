"""Other names of a length in config.json, of which vLLM 0.31.0 takes the smallest for the draft.

Past it vLLM drafts nothing (transformers_utils/model_arch_config_convertor.py and
config/speculative.py of 0.31.0); on a hybrid target a step without a draft reads a stale state.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from paceline.problems import Problem, show_value

__all__ = ["LENGTHS", "check_lengths", "is_length"]

LENGTHS = (
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",  # goes before all others, max_position_embeddings too
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_ENOUGH = 262_144  # of a draft without positions, as Medusa's heads are


def check_lengths(config: Mapping[str, Any], known: Container[str]) -> list[Problem]:
    """`cfg.unread` of a length that binds nothing, `cfg.unknown` of one that ends drafting.

    known: keys that the family has. Values that are no lengths are left to the rule of strange
    keys.
    """
    return [
        _tell(key, config[key], _binds(key, config))
        for key in LENGTHS
        if key in config and key not in known and is_length(config[key])
    ]


def is_length(value: Any) -> bool:
    """Whether a value is one that vLLM can take for a length."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**53


def _binds(key: str, config: Mapping[str, Any]) -> bool:
    positions = config.get("max_position_embeddings", _ENOUGH)
    if not is_length(positions) or (key == "model_max_length" and config[key] != positions):
        return True
    return bool(config[key] < positions)


def _tell(key: str, value: int, binds: bool) -> Problem:
    message = f"'{key}' has no effect: no text is longer"
    if binds:
        message = (
            f"'{key}' is {value:,}, and vLLM takes that for the draft's length: it drafts nothing"
            " beyond"
        )
    return Problem(
        rule="cfg.unknown" if binds else "cfg.unread",
        file="config.json",
        where=key,
        found=show_value(value),
        expected="max_position_embeddings alone" if binds else "no such key",
        message=message,
        fix="Remove the key.",
    )
