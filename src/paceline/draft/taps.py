"""Tapped layers, as far as config.json alone can be wrong about them.

vLLM 0.31.0 sorts the ids and drops repeats. The width of fc follows num_aux_hidden_states, else
the length of the list inside eagle_config, else 3: never the length of the top-level list. Only
Qwen3's variant also counts the top-level list, and has num_aux_layers before all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.draft.sizes import read_aux_layer_ids
from paceline.problems import Problem, show_value

__all__ = ["AUX_KEY", "check_tapped_layers"]

AUX_KEY = "eagle_aux_hidden_state_layer_ids"


def check_tapped_layers(config: Mapping[str, Any]) -> list[Problem]:
    """Order and number of the ids; ids that are no whole numbers are left to the type rules."""
    ids = read_aux_layer_ids(config)
    if ids is None or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return []
    problems = []
    if list(ids) != sorted(set(ids)):
        problems.append(
            Problem(
                rule="cfg.aux",
                file="config.json",
                where=AUX_KEY if config.get(AUX_KEY) else f"eagle_config.{AUX_KEY}",
                found=show_value(list(ids)),
                expected=show_value(sorted(set(ids))),
                message=(
                    "tapped layers are not ascending and unique; vLLM sorts them and drops"
                    " repeats, so fc would read other layers than in training"
                ),
                fix="Train with ascending ids and state them so.",
            )
        )
    is_qwen3 = config.get("model_type") == "qwen3"
    stated = config.get("num_aux_hidden_states")
    if is_qwen3 and config.get("num_aux_layers") is not None:
        stated = config["num_aux_layers"]
    built = len(ids) if stated is None and is_qwen3 else stated
    if built is None:
        nested = config.get("eagle_config")
        inner = nested.get(AUX_KEY) if isinstance(nested, Mapping) else None
        built = len(inner) if isinstance(inner, list) and inner else 3
    if built != len(ids):
        reason = "without" if stated is None else "as it says in"
        problems.append(
            Problem(
                rule="cfg.aux",
                file="config.json",
                where="num_aux_hidden_states",
                found=show_value(built),
                expected=str(len(ids)),
                message=(
                    f"the draft taps {len(ids)} layers, but vLLM builds fc for"
                    f" {show_value(built)} ({reason} num_aux_hidden_states)"
                ),
                fix=f'Write "num_aux_hidden_states": {len(ids)}.',
            )
        )
    return problems
