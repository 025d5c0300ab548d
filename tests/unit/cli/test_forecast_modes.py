"""Modes of `paceline forecast`: one at a time, and no setting without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.forecast import forecast
from paceline.errors import PacelineError, PlanError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "0 designs are named"),
        ({"designs": [Path("a"), Path("b")]}, "2 designs are named"),
        ({"search": "default", "measure": True}, "are two commands"),
        ({"search": "default", "designs": [Path("a")]}, "a design has no effect with --search"),
        ({"designs": [Path("a")], "out": Path("o")}, "--out has no effect here"),
        ({"search": "default", "baseline": Path("a")}, "--baseline has no effect"),
        ({"search": "default", "lengths": "1"}, "--lengths has no effect"),
        ({"fit": Path("a"), "bandwidth": 3000.0}, "--bandwidth has no effect with --fit"),
        ({"acceptance": Path("a"), "rules": "demo"}, "--rules has no effect"),
        ({"search": "default", "bandwidth": 1.0, "step_model": Path("m")}, "with --step-model"),
        ({"measure": True}, "--measure has no --out"),
        ({"measure": True, "out": Path("/nope/o"), "plan": Path("p"), "repeats": 3}, "--plan"),
        ({"measure": True, "out": Path("/nope/o"), "lengths": "8;9"}, "--lengths is"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        forecast(target="qwen3.5-4b", **settings)  # type: ignore[arg-type]


def test_a_search_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.toml"
    space.write_text(
        '[[designs]]\nfamily = "mtp"\nnum_speculative_tokens = [1, 3, 5]\n'
        "[acceptance.mtp]\nfirst = 0.8\ndecay = 0.9\n"
    )
    forecast(target="qwen3.5-4b", search=str(space), out=tmp_path / "out")
    text = capsys.readouterr().out
    assert "Best at any K" in text
    assert "an assumption, not a measurement" in text
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "frontier.svg",
        "search.json",
    ]
    with pytest.raises(PacelineError, match="already exists"):
        forecast(target="qwen3.5-4b", search=str(space), out=tmp_path / "out")
