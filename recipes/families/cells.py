"""What table.py knows of each cell: what its draft takes on paper, and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.draft import Draft
from paceline.errors import PlanError
from paceline.eval.statistics import half_width, measure_spread
from paceline.forecast import CachePlan, design_of_draft, measure_memory, read_shape

__all__ = ["FORMAT", "foresee_bytes", "length_by_category"]

FORMAT = "paceline-families/1"
CONTEXT = 16_384
CONFIDENCE = 0.95


def foresee_bytes(draft: Draft, target: Path, device: str) -> int | None:
    """M at 16,384 tokens by arithmetic; None for a folder that no design describes: 8-bit inputs,
    a matrix that was kept (P-EAGLE)."""
    shape = read_shape(str(target))
    try:
        design = design_of_draft(draft, shape)
    except PlanError:
        return None
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
