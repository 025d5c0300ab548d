"""A quantisation's price as a table: before, after, and the ratio with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

__all__ = ["render_price"]

_LABELS = {
    "files_bytes": "files",
    "memory_bytes": "M, 16K tokens",
    "acceptance_length": "acceptance length",
    "tau": "tau",
    "tpot_ms": "TPOT, ms",
    "score": "score, original 100",
    "perplexity": "perplexity",
    "identical": "same answers",
}


def render_price(price: Mapping[str, Any]) -> Table:
    """price: fields of paceline.quantize's Price. Above 1 is better in every ratio."""
    table = Table(title="the smaller one beside the original", title_justify="left")
    for name in ("", "before", "after", "ratio", "95 %"):
        table.add_column(name, justify="left" if not name else "right")
    for key, row in price["rows"].items():
        low, high = row["low"], row["high"]
        interval = "" if low is None or high is None or low == high else f"{low:.3f}–{high:.3f}"
        table.add_row(
            _LABELS[key],
            _show(key, row["before"]),
            _show(key, row["after"]),
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            interval,
        )
    return table


def _show(key: str, value: float | None) -> str:
    if value is None:
        return "not measured"
    if key.endswith("_bytes"):
        return f"{value / 1e6:,.2f} MB"
    digits = {"score": 1, "identical": 0}.get(key, 3)
    return f"{value:.{digits}f}"
