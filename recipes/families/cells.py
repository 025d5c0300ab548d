"""What table.py knows of each cell: its draft as a design on paper, and its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.draft import Draft, drafts_in_parallel
from paceline.eval.statistics import half_width, measure_spread
from paceline.forecast import CachePlan, measure_memory, parse_design, read_shape

__all__ = ["FORMAT", "design_of", "foresee_bytes", "length_by_category"]

FORMAT = "paceline-families/1"
CONTEXT = 16_384
CONFIDENCE = 0.95
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "draft_vocab_size": "draft_vocab_size",
}
_KEYS = {
    "mtp": (),
    "medusa": ("num_hidden_layers",),
    "eagle3": tuple(key for key in _SIZES if key not in ("num_hidden_layers", "hidden_size")),
    "dflash": tuple(key for key in _SIZES if key != "hidden_size"),
    "draft_model": tuple(key for key in _SIZES if key != "draft_vocab_size"),
}


def design_of(draft: Draft, kind: str) -> str:
    """A draft as a design on paper (`paceline forecast`)."""
    config = draft.config
    lines = [
        f'family = "{draft.family}"',
        f"num_speculative_tokens = {draft.num_speculative_tokens}",
        *(f"{_SIZES[key]} = {config[key]}" for key in _KEYS[draft.family] if key in config),
    ]
    if draft.family == "medusa":
        lines.append(f"one_head = {json.dumps(config.get('original_lm_head') is True)}")
    if draft.family in ("eagle3", "dflash"):
        taps = config.get("eagle_aux_hidden_state_layer_ids")
        taps = taps or config.get("dflash_config", {}).get("target_layer_ids")
        lines.append(f"num_taps = {len(taps)}")
    if draft.family == "eagle3" and config.get("mask_token_id") is not None:
        lines.append("parallel = true")
    if draft.family == "draft_model":
        lines.append(f"own_head = {json.dumps(not config.get('tie_word_embeddings', False))}")
    if config.get("sliding_window"):
        lines.append(f"window = {config['sliding_window']}")
    if kind != "bf16":
        lines.append(f'weights = "{kind}"')
        group = _group_size(config)
        if group:
            lines.append(f"group_size = {group}")
    return "\n".join(lines) + "\n"


def _group_size(config: Mapping[str, Any]) -> int:
    groups = config.get("quantization_config", {}).get("config_groups", {})
    sizes = [group.get("weights", {}).get("group_size") for group in groups.values()]
    return next((int(size) for size in sizes if size and size > 0), 0)


def foresee_bytes(draft: Draft, kind: str, target: Path, device: str) -> int | None:
    """M at 16,384 tokens by arithmetic; None for what the forecast has no sizes for: w8a8, and a
    quantised draft that keeps a matrix (P-EAGLE)."""
    if kind == "w8a8" or (kind != "bf16" and drafts_in_parallel(draft.config)):
        return None
    shape = read_shape(str(target))
    design = parse_design(design_of(draft, kind), shape)
    plan = CachePlan(device=device)
    return measure_memory(design, shape, context_tokens=CONTEXT, plan=plan).total_bytes


def length_by_category(requests: list[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Delivered tokens a target step, each category and `all`, with half of a 95 % interval.

    A ratio of sums d / s over prompts; prompts are the clusters, so the cell of one is its
    (d - ratio s) / mean s.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for request in requests:
        groups.setdefault(str(request["category"]), []).append(request)
    found: dict[str, dict[str, float | None]] = {}
    for name, group in [*sorted(groups.items()), ("all", list(requests))]:
        delivered = np.array([float(r["delivered"]) for r in group])
        steps = np.array([float(r["steps"]) for r in group])
        if not steps.sum():
            continue
        ratio = float(delivered.sum() / steps.sum())
        spread = measure_spread([((delivered - ratio * steps) / steps.mean())[:, None]])
        half = None if spread is None else half_width(spread, confidence=CONFIDENCE)
        found[name] = {"value": ratio, "half_width": half, "num_prompts": len(group)}
    return found
