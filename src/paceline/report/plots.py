"""Plots as small inline SVG, drawn for 400 units of width so that text stays readable on a phone.

Colours are CSS classes of the page (light, dark and print); each arm also has its own mark.
Every string that enters a drawing is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup, escape

__all__ = [
    "draw_categories",
    "draw_mark",
    "draw_memory",
    "draw_paired",
    "draw_positions",
    "draw_times",
]

WIDTH = 400.0
_LEFT, _RIGHT = 40.0, 12.0


def _svg(height: float, label: str, parts: Sequence[str]) -> Markup:
    body = "".join(parts)
    return Markup(
        f'<svg class="plot" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _mark(arm: str, x: float, y: float, size: float = 4.5) -> str:
    if arm == "candidate":
        return f'<circle class="mark candidate" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    if arm == "baseline":
        side = size * 1.7
        return (
            f'<rect class="mark baseline" x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" '
            f'width="{side:.1f}" height="{side:.1f}"/>'
        )
    points = f"{x:.1f},{y - size:.1f} {x + size:.1f},{y:.1f} {x:.1f},{y + size:.1f}"
    return f'<polygon class="mark plain" points="{points} {x - size:.1f},{y:.1f}"/>'


def draw_mark(arm: str) -> Markup:
    """An arm's mark for a legend."""
    return Markup(
        f'<svg class="key" viewBox="0 0 12 12" aria-hidden="true">{_mark(arm, 6, 6)}</svg>'
    )


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values that cover low to high."""
    span = max(high - low, 1e-9)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _tick_text(value: float) -> str:
    return f"{value:.10g}"


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _across(ticks: Sequence[float], left: float) -> Callable[[float], float]:
    low, span = ticks[0], ticks[-1] - ticks[0]
    return lambda value: left + (value - low) / span * (WIDTH - _RIGHT - 8 - left)


def _x_axis(ticks: Sequence[float], left: float, top: float, bottom: float, unit: str) -> list[str]:
    across = _across(ticks, left)
    parts = [_line(across(tick), top, across(tick), bottom) for tick in ticks]
    parts += [_text(across(tick), bottom + 16, _tick_text(tick), anchor="middle") for tick in ticks]
    return [*parts, _text(WIDTH - _RIGHT - 8, bottom + 32, unit, anchor="end", kind="unit")]


def draw_positions(series: Mapping[str, Sequence[float | None]], label: str) -> Markup:
    """One line an arm: share (0 to 1) over draft position; gaps where a value is None."""
    top, bottom, right = 12.0, 176.0, WIDTH - _RIGHT
    depth = max((len(shares) for shares in series.values()), default=0)

    def place(index: int, share: float) -> tuple[float, float]:
        room = right - _LEFT - 48
        x = _LEFT + 24 + (room * index / (depth - 1) if depth > 1 else room / 2)
        return x, bottom - share * (bottom - top)

    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = place(0, tick)[1]
        parts += [_line(_LEFT, y, right, y), _text(_LEFT - 8, y + 4, f"{tick:g}", anchor="end")]
    every = max(1, math.ceil(depth / 12))
    for index in range(0, depth, every):
        parts.append(_text(place(index, 0)[0], bottom + 18, str(index + 1), anchor="middle"))
    parts.append(_text(right, bottom + 34, "draft position", anchor="end", kind="unit"))
    for arm, shares in reversed(list(series.items())):
        spots = [place(i, share) for i, share in enumerate(shares) if share is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline class="curve {_arm_class(arm)}" points="{path}"/>')
        parts += [_mark(arm, x, y) for x, y in spots]
    return _svg(bottom + 40, label, parts)


def _arm_class(arm: str) -> str:
    return arm if arm in {"candidate", "baseline"} else "plain"


def draw_categories(rows: Sequence[tuple[str, Mapping[str, float | None]]], label: str) -> Markup:
    """One row a category, one mark an arm, on a common acceptance-length axis from 1."""
    known = [value for _, arms in rows for value in arms.values() if value is not None]
    ticks = _ticks(min([1.0, *known]), max([1.5, *known]))
    left, top, pitch = 120.0, 8.0, 26.0
    bottom = top + pitch * len(rows)
    across = _across(ticks, left)
    parts = _x_axis(ticks, left, top, bottom, "tokens per target step")
    for index, (name, arms) in enumerate(rows):
        y = top + pitch * (index + 0.5)
        parts.append(_text(left - 12, y + 4, _short(name, 16), anchor="end", kind="name"))
        found = {arm: value for arm, value in arms.items() if value is not None}
        if len(found) > 1:
            ends = across(min(found.values())), across(max(found.values()))
            parts.append(_line(ends[0], y, ends[1], y, "bridge"))
        parts += [_mark(arm, across(value), y) for arm, value in reversed(list(found.items()))]
    return _svg(bottom + 40, label, parts)


def draw_times(series: Mapping[str, Sequence[float]], label: str) -> Markup:
    """One row an arm: each request's ms per token as a mark, the median as a bar."""
    known = [value for values in series.values() for value in values]
    ticks = _ticks(min(known), max(known))
    left, top, pitch = 84.0, 8.0, 46.0
    bottom = top + pitch * len(series)
    across = _across(ticks, left)
    parts = _x_axis(ticks, left, top, bottom, "ms per token")
    for index, (arm, values) in enumerate(series.items()):
        middle = top + pitch * (index + 0.5)
        parts.append(_text(left - 12, middle + 4, _short(arm, 11), anchor="end", kind="name"))
        for number, value in enumerate(_thin(sorted(values), 300)):
            y = middle + ((number * 7) % 11 - 5) * 2.2  # spread in a fixed pattern, not random
            parts.append(_mark(arm, across(value), y, 2.6))
        x = across(_median(values))
        parts.append(_line(x, middle - 18, x, middle + 18, "median"))
    return _svg(bottom + 40, label, parts)


def draw_paired(ratios: Sequence[float], label: str) -> Markup:
    """Baseline over candidate for each prompt, smallest first; above 1 the candidate is faster."""
    values = _thin(sorted(ratios), 300)
    ticks = _ticks(min([*values, 0.9]), max([*values, 1.1]))
    top, bottom, right = 12.0, 148.0, WIDTH - _RIGHT

    def up(value: float) -> float:
        return bottom - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - top)

    parts = []
    for tick in ticks:
        parts.append(_line(_LEFT, up(tick), right, up(tick)))
        parts.append(_text(_LEFT - 8, up(tick) + 4, f"{tick:.4g}", anchor="end"))
    for index, value in enumerate(values):
        x = _LEFT + 10 + (right - _LEFT - 20) * (index + 0.5) / len(values)
        parts.append(_line(x, up(1.0), x, up(value), "stem"))
        parts.append(_mark("candidate" if value >= 1 else "baseline", x, up(value), 3.2))
    parts.append(_line(_LEFT, up(1.0), right, up(1.0), "unity"))
    parts.append(
        _text(right, bottom + 20, "prompts, slowest gain first", anchor="end", kind="unit")
    )
    return _svg(bottom + 28, label, parts)


def draw_memory(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], label: str) -> Markup:
    """One stacked bar an arm; parts are (kind, bytes) with kind naming a CSS class."""
    totals = [sum(size for _, size in parts) for _, parts in rows]
    ticks = _ticks(0.0, max([*totals, 1.0]) / 2**20)
    left, top, pitch = 84.0, 8.0, 44.0
    bottom = top + pitch * len(rows)
    across = _across(ticks, left)
    parts = _x_axis(ticks, left, top, bottom, "MiB")
    for index, (arm, sizes) in enumerate(rows):
        y = top + pitch * index + 9
        parts.append(_text(left - 12, y + 17, _short(arm, 11), anchor="end", kind="name"))
        begin = 0.0
        for kind, size in sizes:
            x1, x2 = across(begin / 2**20), across((begin + size) / 2**20)
            begin += size
            if x2 - x1 > 0:
                width = max(x2 - x1 - (1.5 if x2 - x1 > 4 else 0), 0.8)
                parts.append(
                    f'<rect class="part {kind}" x="{x1:.1f}" y="{y:.1f}" '
                    f'width="{width:.1f}" height="26"/>'
                )
    return _svg(bottom + 40, label, parts)


def _median(values: Sequence[float]) -> float:
    ranked = sorted(values)
    half = len(ranked) // 2
    return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2


def _thin(values: Sequence[float], limit: int) -> list[float]:
    """At most `limit` values, evenly taken from a sorted sequence, both ends kept."""
    if len(values) <= limit:
        return list(values)
    return [values[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)]
