"""How often an interval holds the truth in simulation, to be said beside it.

Simulated by bench/coverage.py; docs/results/coverage.md has the shares by scenario, of which this
is the range.
"""

from __future__ import annotations

from typing import Any

__all__ = ["COVERAGE", "state_coverage"]

# figure -> (prompts of the smallest category, lowest and highest share over all scenarios)
COVERAGE: dict[str, tuple[tuple[int, float, float], ...]] = {
    "tau": (
        (1, 0.897, 0.955),
        (3, 0.944, 0.980),
        (5, 0.908, 0.966),
        (10, 0.938, 0.956),
        (25, 0.932, 0.948),
        (40, 0.941, 0.961),
    ),
    "geomean": (
        (1, 0.958, 0.975),
        (3, 0.950, 0.978),
        (5, 0.938, 0.982),
        (10, 0.930, 0.976),
        (25, 0.945, 0.953),
        (40, 0.944, 0.967),
    ),
    "medians": (
        (1, 0.952, 0.972),
        (3, 0.969, 0.984),
        (5, 0.952, 0.974),
        (10, 0.938, 0.964),
        (25, 0.945, 0.955),
        (40, 0.945, 0.969),
    ),
    "score": (
        (1, 0.902, 0.967),
        (3, 0.955, 0.977),
        (5, 0.934, 0.980),
        (10, 0.932, 0.958),
        (25, 0.927, 0.962),
        (40, 0.943, 0.964),
    ),
}
_CONFIDENCE = 0.95


def state_coverage(figure: str, least: int, confidence: float) -> dict[str, Any] | None:
    """{"low", "high", "num_per_category"} simulated at no more prompts than there are, or None."""
    if confidence != _CONFIDENCE:
        return None
    rows = [row for row in COVERAGE.get(figure, ()) if row[0] <= least]
    if not rows:
        return None
    num, low, high = max(rows)
    return {"low": low, "high": high, "num_per_category": num}
