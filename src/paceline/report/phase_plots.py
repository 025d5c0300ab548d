"""The score as a function of the acceptance length, with what is expected of the design."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

__all__ = ["draw_score_curve"]

_WIDTH, _HEIGHT = 640.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 16.0, 14.0, 44.0


def draw_score_curve(
    record: Mapping[str, Any], *, measured: tuple[float, float] | None = None
) -> Markup:
    """The curve, a band from low to high, the expected point, 100 as a line; measured: a cross."""
    curve = [(float(length), float(score)) for length, score in record["curve"]]
    lengths = [length for length, _ in curve]
    top = max(150.0, *(score for _, score in curve), measured[1] if measured else 0.0) * 1.03
    low_x, high_x = lengths[0], lengths[-1]

    def across(length: float) -> float:
        return _LEFT + (length - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)

    def up(score: float) -> float:
        return _HEIGHT - _BOTTOM - score / top * (_HEIGHT - _TOP - _BOTTOM)

    bottom = _HEIGHT - _BOTTOM
    parts = []
    for tick in range(0, int(top) + 1, 25):
        kind = "unity" if tick == 100 else "grid"
        parts.append(_line(_LEFT, up(tick), _WIDTH - _RIGHT, up(tick), kind))
        parts.append(_text(_LEFT - 8, up(tick) + 4, str(tick), "end"))
    length = low_x
    while length <= high_x + 1e-9:
        parts.append(_line(across(length), _TOP, across(length), bottom, "grid"))
        parts.append(_text(across(length), bottom + 18, f"{length:g}", "middle"))
        length += 1.0
    parts.append(_text(_WIDTH - _RIGHT, bottom + 36, "acceptance length, bonus included", "end"))
    stated, scores = record["acceptance"], record["score"]
    left, right = across(float(stated["low"])), across(float(stated["high"]))
    parts.append(
        f'<rect class="band" x="{left:.1f}" y="{_TOP}" width="{max(right - left, 1):.1f}"'
        f' height="{bottom - _TOP:.1f}"/>'
    )
    points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve)
    parts.append(f'<polyline class="curve" points="{points}"/>')
    x, y = across(float(stated["expected"])), up(float(scores["expected"]))
    parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>')
    # above and left of the point: the curve rises to its right
    side, shift = ("end", -8) if x > _WIDTH * 0.3 else ("start", 10)
    parts.append(_text(x + shift, y - 10, f"{scores['expected']:.0f} expected", side, "label"))
    if measured is not None:
        mx, my = across(min(max(measured[0], low_x), high_x)), up(measured[1])
        parts.append(f'<path class="cross" d="M{mx - 6:.1f} {my - 6:.1f}l12 12m0 -12l-12 12"/>')
        parts.append(_text(mx + 10, my + 16, f"{measured[1]:.0f} measured", "start", "label"))
    label = "Score over acceptance length"
    return Markup(
        f'<svg class="plot wide" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
