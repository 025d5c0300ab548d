"""The nine systems of the AdaptFM results: each is commands that the command line takes."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli.app import app
from paceline.target import TargetFacts, read_target

FOLDER = Path(__file__).parents[3] / "recipes" / "adaptfm"
RECIPES = sorted(FOLDER.glob("*.toml"))
REPORTED = (7.745, 7.708, 6.978, 6.197, 6.118, 5.366, 5.090, 5.084, 5.056)


@pytest.fixture(scope="module")
def run() -> Any:
    spec = importlib.util.spec_from_file_location("adaptfm_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["adaptfm_run"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pocket() -> TargetFacts:
    return read_target("pocket")


def test_nine_rows_as_reported() -> None:
    found = [tomllib.loads(path.read_text()) for path in RECIPES]
    assert tuple(recipe["reported"]["mean"] for recipe in found) == REPORTED
    assert [recipe["place"] for recipe in found] == list(range(1, 10))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_step_is_a_command_that_is_taken(
    path: Path, device: str, run: Any, pocket: TargetFacts, tmp_path: Path
) -> None:
    recipe = tomllib.loads(path.read_text())
    steps = run.plan_steps(
        recipe,
        pocket,
        tmp_path / path.stem,
        device=device,
        regimes=["64:64"],
        num_steps=8,
        num_requests=3,
    )
    group = typer.main.get_command(app)
    for words in steps.commands:
        command: Any = group
        rest = list(words)
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        command.make_context(rest[0], rest)  # raises on an option or value that it has not
    assert steps.commands[-1][:2] == ["bench", steps.target]
    if "distill" in recipe.get("target", {}):
        words = steps.commands[1]
        assert words[words.index("--distill") + 1] == "8"  # no more than the draft's own
    if recipe["draft"]["family"] == "dflash":
        pytest.importorskip("torch")
        from paceline.train import read_recipe

        training = read_recipe(tmp_path / path.stem / "draft.toml")
        assert training.draft.num_speculative_tokens == recipe["draft"]["k"]
        assert training.optim.num_steps == 8


def test_what_a_machine_or_target_cannot_do_is_an_open_row(
    run: Any, pocket: TargetFacts, tmp_path: Path
) -> None:
    def open_rows(name: str, device: str) -> str:
        recipe = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        limits: dict[str, Any] = {"regimes": [], "num_steps": 8, "num_requests": 3}
        steps = run.plan_steps(recipe, pocket, tmp_path / name, device=device, **limits)
        return "\n".join(steps.open_rows)

    assert "no kernel for it on a CPU" in open_rows("01-w4a16-dflash15", "cpu")
    assert "no kernel" not in open_rows("01-w4a16-dflash15", "cuda")
    assert "distillation" not in open_rows("03-awq-dflash15-window", "cuda")
    assert "stale state" in open_rows("02-awq-suffix20", "cuda")
    assert "another engine" in open_rows("09-w8a8-dflash16", "cuda")
