"""Two plots of the field: acceptance against memory, and against time. Matplotlib, as SVG.

Colours become the page's own CSS variables, so that a plot is right in light, dark and print; every
mark links to its entry's report.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

__all__ = ["Mark", "draw_field"]

# stand-ins drawn with, and what the page's style sheet puts in their place
_COLOURS = {
    "#010203": "var(--ink)",
    "#040506": "var(--soft)",
    "#070809": "var(--line)",
    "#0a0b0c": "var(--candidate)",
    "#0d0e0f": "var(--baseline)",
    "#101112": "var(--card)",
    "#131415": "var(--on)",
    "#161718": "var(--plain)",
}
_INK, _SOFT, _LINE, _CANDIDATE, _BASELINE, _CARD, _ON, _PLAIN = _COLOURS
_WIDTH, _HEIGHT = 4.6, 3.7  # inches of 72 units
_MARGIN = 0.06


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One entry. x, y: times the baseline's; intervals where they are known; label: its rank."""

    x: float
    y: float
    x_interval: tuple[float, float] | None
    y_interval: tuple[float, float] | None
    label: str
    title: str
    href: str
    is_ranked: bool


def draw_field(
    marks: Sequence[Mark], *, name: str, x_label: str, gate: float | None, label: str
) -> Markup:
    """Marks over `x_label`, with the baseline at (1, 1) and the gate as a line.

    name: of this plot on its page. label: what a screen reader says.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 10.5}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.135, 0.145, 0.85, 0.83))
        _frame(axes, x_label)
        for mark in marks:
            _draw_mark(axes, mark)
        _set_limits(axes, marks, gate)
        _draw_reference(axes, gate)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _adopt(out.getvalue(), marks, name=name, label=label)


def _frame(axes: Any, x_label: str) -> None:
    axes.set_xlabel(x_label, color=_SOFT, loc="right")
    axes.set_ylabel("acceptance length, baseline = 1", color=_SOFT, loc="top")
    axes.grid(color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_SOFT, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_color(_LINE)
        axes.spines[side].set_visible(side in ("left", "bottom"))


def _draw_reference(axes: Any, gate: float | None) -> None:
    """The baseline and the gate; drawn last, when the limits are known."""
    axes.axhline(1.0, color=_BASELINE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.axvline(1.0, color=_BASELINE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.scatter([1.0], [1.0], marker="s", s=70, color=_CARD, edgecolors=_BASELINE, linewidths=2)
    low, high = axes.get_xlim()
    is_right = (1.0 - low) / (high - low) > 0.7  # no room for the word beside it
    axes.annotate(
        "baseline",
        (1.0, 1.0),
        xytext=(-10 if is_right else 10, -15),
        textcoords="offset points",
        ha="right" if is_right else "left",
        color=_SOFT,
    )
    if gate is not None:
        axes.axhline(gate, color=_SOFT, linewidth=1, zorder=1)
        axes.annotate(
            "gate",
            (0.0, gate),
            xycoords=("axes fraction", "data"),
            xytext=(5, 4),
            textcoords="offset points",
            color=_SOFT,
        )


def _draw_mark(axes: Any, mark: Mark) -> None:
    colour = _CANDIDATE if mark.is_ranked else _PLAIN
    if mark.x_interval:
        axes.plot(mark.x_interval, (mark.y, mark.y), color=colour, linewidth=1.6, zorder=3)
    if mark.y_interval:
        axes.plot((mark.x, mark.x), mark.y_interval, color=colour, linewidth=1.6, zorder=3)
    points = axes.scatter([mark.x], [mark.y], s=160, color=colour, linewidths=0, zorder=4)
    points.set_urls([mark.href])
    axes.annotate(
        mark.label,
        (mark.x, mark.y),
        ha="center",
        va="center_baseline",
        color=_ON,
        fontsize=9,
        zorder=5,
    )


def _set_limits(axes: Any, marks: Sequence[Mark], gate: float | None) -> None:
    xs = [1.0, *(mark.x for mark in marks)]
    ys = [1.0, *(mark.y for mark in marks), *([gate] if gate is not None else [])]
    for mark in marks:
        xs += mark.x_interval or ()
        ys += mark.y_interval or ()
    for values, place in ((xs, axes.set_xlim), (ys, axes.set_ylim)):
        low, high = min(values), max(values)
        room = max(high - low, 0.1) * _MARGIN + 0.02
        place(max(0.0, low - room), high + room)


def _adopt(svg: str, marks: Sequence[Mark], *, name: str, label: str) -> Markup:
    """Matplotlib's file -> an element of the page: no header, our colours, fonts and titles."""
    body = svg[svg.index("<svg") :]
    # matplotlib's style element would hold for the whole page
    for part in ("metadata", "style"):
        body = re.sub(rf"<{part}.*?</{part}>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    for stand_in, variable in _COLOURS.items():
        body = body.replace(stand_in, variable)
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    for mark in marks:
        link = f'<a xlink:href="{escape(mark.href)}" target="_blank">'
        title = f"<title>{escape(mark.title)}</title>"
        body = body.replace(link, f'<a href="{escape(mark.href)}">{title}')
    # ids of two plots on one page must differ
    body = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", body)
    opening, _, rest = body.partition(">")
    view = re.search(r'viewBox="[^"]*"', opening)
    assert view is not None
    head = f'<svg class="plot field" {view[0]} role="group" aria-label="{escape(label)}"'
    links = ' xmlns:xlink="http://www.w3.org/1999/xlink"'
    return Markup(f"{head}{links}>{rest}")  # every text in it is a number, ours, or escaped
