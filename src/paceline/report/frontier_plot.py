"""The frontier of a search as one SVG file: draft memory against time per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

__all__ = ["draw_frontier"]

_WIDTH, _HEIGHT = 720.0, 440.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 24.0, 48.0, 92.0
_FAMILIES = ("mtp", "eagle3", "medusa", "draft_model", "dflash")
_STYLE = """
.frontier text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#42505c}
.frontier .title{font-size:16px;font-weight:600;fill:#17212b}
.frontier .grid{stroke:#dfe4e8}.frontier .edge{fill:none;stroke:#17212b;stroke-width:1.6}
.frontier .mtp{fill:#7b6a4f}.frontier .eagle3{fill:#0b6e7f}.frontier .medusa{fill:#b07d2b}
.frontier .draft_model{fill:#5b5fa8}.frontier .dflash{fill:#1b7145}
.frontier .cloud{opacity:.22}.frontier .base{fill:none;stroke:#ac2f38;stroke-width:2}
""".strip()


def draw_frontier(record: Mapping[str, Any]) -> Markup:
    """A search record (format paceline-search/1) as an SVG document of its own."""
    cloud = [(str(f), int(m) / 1e9, float(t)) for f, m, t in record["cloud"]]
    edge = [_point(one) for one in record["frontier"]]
    base = _point(record["baseline"])
    points = [*cloud, *edge, base]
    memories = [max(memory, 1e-3) for _, memory, _ in points]
    across = _scale(memories, _LEFT, _WIDTH - _RIGHT)
    # the slowest tenth would press the rest together
    times = sorted(time for _, _, time in points)
    top_time = max(times[int(0.9 * (len(times) - 1))], base[2] * 1.1)
    up, time_ticks = _linear(min(times), top_time)
    parts = [f"<style>{_STYLE}</style>", f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>']
    title = f"{record['target']} under {record['rules']}: memory against time per token"
    parts.append(f'<text class="title" x="{_LEFT}" y="26">{escape(title)}</text>')
    for tick in _log_ticks(min(memories), max(memories)):
        x = across(tick)
        parts.append(_line(x, _TOP, x, _HEIGHT - _BOTTOM))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{tick:g}", "middle"))
    for tick in time_ticks:
        parts.append(_line(_LEFT, up(tick), _WIDTH - _RIGHT, up(tick)))
        parts.append(_text(_LEFT - 8, up(tick) + 4, f"{tick:.4g}", "end"))
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 36, "draft memory M, GB", "end"))
    parts.append(_text(_LEFT, _TOP - 8, "ms a token, acceptance assumed", "start"))
    for family, memory, time in cloud:
        if time <= top_time:
            parts.append(_mark(family, across(max(memory, 1e-3)), up(time), 2.2, "cloud"))
    shown = [one for one in edge if one[2] <= top_time]
    if shown:
        path = " ".join(f"{across(max(m, 1e-3)):.1f},{up(t):.1f}" for _, m, t in shown)
        parts.append(f'<polyline class="edge" points="{path}"/>')
        for family, memory, time in shown:
            parts.append(_mark(family, across(max(memory, 1e-3)), up(time), 4.2, ""))
    x, y = across(max(base[1], 1e-3)), up(base[2])
    parts.append(f'<circle class="base" cx="{x:.1f}" cy="{y:.1f}" r="8"/>')
    parts += _legend([f for f in _FAMILIES if any(f == one[0] for one in points)])
    body = "".join(parts)
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="frontier" role="img" aria-label='
        f'"{escape(title)}" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}">{body}</svg>\n'
    )


def _legend(families: Sequence[str]) -> list[str]:
    parts, x, y = [], _LEFT, _HEIGHT - 34
    for family in families:
        parts.append(_mark(family, x + 5, y - 4, 4.2, ""))
        parts.append(_text(x + 15, y, family, "start"))
        x += 30 + 8.0 * len(family)
    x, y = _LEFT, _HEIGHT - 12
    parts.append(f'<circle class="base" cx="{x + 5}" cy="{y - 4}" r="6"/>')
    parts.append(_text(x + 18, y, "baseline", "start"))
    parts.append(f'<polyline class="edge" points="{x + 86},{y - 4} {x + 108},{y - 4}"/>')
    parts.append(_text(x + 114, y, "frontier: no allowed design has less of both", "start"))
    return parts


def _point(candidate: Mapping[str, Any]) -> tuple[str, float, float]:
    family = str(candidate["settings"]["family"])
    return family, int(candidate["memory_bytes"]) / 1e9, float(candidate["tpot_ms"])


def _mark(family: str, x: float, y: float, size: float, kind: str) -> str:
    """A family's own form beside its colour."""
    names = f"{family} {kind}".strip() if family in _FAMILIES else kind
    if family in ("eagle3", "dflash"):
        return f'<circle class="{names}" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    if family == "mtp":
        side = size * 1.8
        corner = f'x="{x - side / 2:.1f}" y="{y - side / 2:.1f}"'
        return f'<rect class="{names}" {corner} width="{side:.1f}" height="{side:.1f}"/>'
    tip = -1 if family == "medusa" else 1
    points = (
        f"{x:.1f},{y + tip * size * 1.2:.1f} {x - size * 1.1:.1f},{y - tip * size * 0.8:.1f}"
        f" {x + size * 1.1:.1f},{y - tip * size * 0.8:.1f}"
    )
    return f'<polygon class="{names}" points="{points}"/>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _scale(values: Sequence[float], left: float, right: float) -> Any:
    low, high = math.log(min(values) * 0.93), math.log(max(values) * 1.07)
    return lambda value: left + (math.log(value) - low) / (high - low) * (right - left)


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of every power of ten inside the range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [m * 10.0**p for p in range(first, last + 1) for m in (1, 2, 5)]
    return [tick for tick in ticks if low * 0.93 <= tick <= high * 1.07]


def _linear(low: float, high: float) -> tuple[Any, list[float]]:
    span = max(high - low, 1e-6)
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= raw * 0.999)
    first = math.floor(low / step)
    ticks = [step * i for i in range(first, math.ceil(high / step) + 1)]
    top, bottom = _TOP + 6, _HEIGHT - _BOTTOM

    def up(value: float) -> float:
        return bottom - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - top)

    return up, ticks
