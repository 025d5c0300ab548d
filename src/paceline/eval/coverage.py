"""How often an interval holds the truth in simulation, to be said beside it.

The figures come from bench/coverage.py, which prints this table; docs/results/coverage.md has them
by scenario.
"""

from __future__ import annotations

from typing import Any

__all__ = ["COVERAGE", "state_coverage"]

# figure -> (prompts of the smallest category, lowest and highest share over all scenarios)
COVERAGE: dict[str, tuple[tuple[int, float, float], ...]] = {}
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
