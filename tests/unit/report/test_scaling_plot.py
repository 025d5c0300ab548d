"""The drawing of a scaling curve: every mark where its number is."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

import pytest

from paceline.report import draw_scaling


def _record(**changes: Any) -> dict[str, Any]:
    def at(x: float, y: float) -> dict[str, Any]:
        return {"x": x, "acceptance_length": y, "low": y - 0.1, "high": y + 0.1, "carries": True}

    points = [at(1e4 * 2**n, 1.5 + 0.1 * n) for n in range(6)]
    return {
        "axis": "tokens",
        "target": "pocket",
        "family": "eagle3",
        "num_speculative_tokens": 3,
        "points": points,
        "band": [at(1e4 * 2**n, 1.5 + 0.1 * n) for n in range(8)],
        "held_out": [
            {"x": 3.2e5, "num_left_out": 2, "foreseen": 1.9, "low": 1.8, "high": 2.1},
        ],
        **changes,
    }


def _numbers(tag: ET.Element, *names: str) -> list[float]:
    return [float(tag.attrib[name]) for name in names]


def test_points_stand_on_their_numbers() -> None:
    tree = ET.fromstring(str(draw_scaling(_record())))
    dots = [tag for tag in tree.iter() if tag.get("class") == "dot"][:6]
    xs = [_numbers(dot, "cx")[0] for dot in dots]
    ys = [_numbers(dot, "cy")[0] for dot in dots]
    # equal factors of x are equal steps; equal steps of y too, upwards
    assert [b - a for a, b in pairwise(xs)] == pytest.approx([xs[1] - xs[0]] * 5, abs=0.11)
    assert [b - a for a, b in pairwise(ys)] == pytest.approx([ys[1] - ys[0]] * 5, abs=0.11)
    assert ys[1] < ys[0]
    bars = [tag for tag in tree.iter() if tag.get("class") == "bar"]
    assert len(bars) == 6
    for bar, y in zip(bars, ys, strict=True):
        low, high = _numbers(bar, "y1", "y2")
        assert low - y == pytest.approx(y - high, abs=0.11)


def test_everything_lies_inside_and_labels_are_true() -> None:
    text = str(draw_scaling(_record()))
    tree = ET.fromstring(text)
    for tag in tree.iter():
        for name in ("cx", "x1", "x2"):
            if name in tag.attrib:
                assert 0 <= float(tag.attrib[name]) <= 720
        for name in ("cy", "y1", "y2"):
            if name in tag.attrib:
                assert 0 <= float(tag.attrib[name]) <= 420
    assert "foreseen without the last 2 points" in text
    assert {"10 k", "100 k", "1 M"} <= set(re.findall(r">([\d.]+ [kM])<", text))
    assert "foreseen" not in str(draw_scaling(_record(held_out=[])))


def test_names_are_text_and_points_may_have_no_interval() -> None:
    record = _record(target="<b>&", axis="layers", held_out=[])
    for number, one in enumerate(record["points"], 1):
        one.update(x=number, low=None, high=None)
    for number, one in enumerate(record["band"], 1):
        one["x"] = number
    text = str(draw_scaling(record))
    tree = ET.fromstring(text)
    assert "<b>" not in text
    assert not [tag for tag in tree.iter() if tag.get("class") == "bar"]
