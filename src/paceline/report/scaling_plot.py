"""Acceptance against tokens, layers or parameters as one SVG file: points, curve, its reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

__all__ = ["draw_scaling"]

_WIDTH, _HEIGHT = 720.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 20.0, 62.0, 88.0
_STYLE = """
.scaling text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#42505c}
.scaling .title{font-size:16px;font-weight:600;fill:#17212b}.scaling .grid{stroke:#dfe4e8}
.scaling .band{fill:#0b6e7f;opacity:.16}.scaling .curve{fill:none;stroke:#0b6e7f;stroke-width:1.8}
.scaling .beyond{stroke-dasharray:5 4}.scaling .bar{stroke:#17212b;stroke-width:1.4}
.scaling .dot{fill:#17212b}.scaling .held{stroke:#ac2f38;stroke-width:2;fill:#fff}
""".strip()


def draw_scaling(record: Mapping[str, Any]) -> Markup:
    """A record of format paceline-scaling/1 as an SVG document of its own; x is logarithmic."""
    points, band = record["points"], record["band"]
    held = list(record["held_out"])[-1:]
    left, right = float(band[0]["x"]), float(band[-1]["x"])
    ys = [float(v) for one in [*points, *band] for v in (one["low"], one["high"]) if v is not None]
    ys += [float(one["acceptance_length"]) for one in points]
    ys += [float(one[key]) for one in held for key in ("low", "high")]
    bottom, top, step = _span(min(ys), max(ys), float(record["num_speculative_tokens"]) + 1.0)

    def across(x: float) -> float:
        share = math.log(x / left) / math.log(right / left)
        return _LEFT + 12 + share * (_WIDTH - _RIGHT - _LEFT - 24)

    def up(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - bottom) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    k = record["num_speculative_tokens"]
    title = f"{record['family']} on {record['target']}, K = {k}: acceptance by {record['axis']}"
    parts = [
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" fill="#fff"/>',
        _text(_LEFT, 24, title, "start", "title"),
        _text(_LEFT, 46, "acceptance length, bonus token included", "start"),
    ]
    for number in range(round((top - bottom) / step) + 1):
        y = bottom + number * step
        parts.append(_line(_LEFT, up(y), _WIDTH - _RIGHT, up(y), "grid"))
        parts.append(_text(_LEFT - 8, up(y) + 4, f"{y:.3g}", "end"))
    for x in _ticks(left, right, str(record["axis"])):
        parts.append(_line(across(x), _TOP, across(x), _HEIGHT - _BOTTOM, "grid"))
        parts.append(_text(across(x), _HEIGHT - _BOTTOM + 18, _short(x), "middle"))
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 38, str(record["axis"]), "end"))
    edge = [(across(one["x"]), up(one["high"])) for one in band]
    edge += [(across(one["x"]), up(one["low"])) for one in reversed(band)]
    parts.append(f'<polygon class="band" points="{_path(edge)}"/>')
    end = float(points[-1]["x"]) * (1 + 1e-9)
    seen = [one for one in band if one["x"] <= end]
    for some, kind in ((seen, "curve"), (band[max(0, len(seen) - 1) :], "curve beyond")):
        path = _path([(across(one["x"]), up(one["acceptance_length"])) for one in some])
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
    for one in held:  # beside its point
        x = across(one["x"]) + 9
        parts.append(_line(x, up(one["low"]), x, up(one["high"]), "held"))
        parts.append(f'<circle class="held" cx="{x:.1f}" cy="{up(one["foreseen"]):.1f}" r="4"/>')
    for one in points:
        x, y = across(one["x"]), up(one["acceptance_length"])
        if one["low"] is not None:
            parts.append(_line(x, up(one["low"]), x, up(one["high"]), "bar"))
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    parts += _legend(held)
    body = "".join(parts)
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="scaling" role="img" aria-label='
        f'"{escape(title)}" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}">{body}</svg>\n'
    )


def _legend(held: list[Any]) -> list[str]:
    y = _HEIGHT - 30
    parts = [
        f'<circle class="dot" cx="{_LEFT + 5}" cy="{y - 4}" r="4"/>',
        _text(_LEFT + 16, y, "served, 95 % over prompts", "start"),
        _line(_LEFT + 220, y - 4, _LEFT + 244, y - 4, "curve"),
        _text(_LEFT + 252, y, "fit with 95 %, dashed beyond the points", "start"),
    ]
    if held:
        num = held[0]["num_left_out"]
        words = "last point" if num == 1 else f"last {num} points"
        parts.append(f'<circle class="held" cx="{_LEFT + 5}" cy="{y + 17}" r="4"/>')
        parts.append(
            _text(_LEFT + 16, y + 21, f"the last point as foreseen without the {words}", "start")
        )
    return parts


def _span(low: float, high: float, ceiling: float) -> tuple[float, float, float]:
    """Axis from, to and step; whole steps, never below 1 nor above what K allows."""
    room = max(high - low, 0.02)
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if room / s <= 8 or s == 1.0)
    bottom = max(1.0, math.floor(low / step + 1e-9) * step)
    top = min(ceiling, math.ceil(high / step - 1e-9) * step)
    return bottom, max(top, bottom + step), step


def _ticks(left: float, right: float, axis: str) -> list[float]:
    if axis == "layers":
        return [
            float(n) for n in range(math.ceil(left), math.floor(right) + 1) if n <= 4 or n % 4 == 0
        ]
    ticks = [
        m * 10.0**e
        for e in range(math.floor(math.log10(left)), math.ceil(math.log10(right)) + 1)
        for m in (1, 2, 5)
    ]
    return [x for x in ticks if left <= x <= right]


def _short(x: float) -> str:
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if x >= size:
            return f"{x / size:g}{letter}"
    return f"{x:g}"


def _path(places: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
