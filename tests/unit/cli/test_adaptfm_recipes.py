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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))  # its page lies beside it
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


def test_a_step_with_a_result_is_not_run_again_and_a_failure_has_its_reason(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    script = (
        "import sys; print('error: no kernel here,\\n  take a GPU'); sys.exit('bench' in sys.argv)"
    )
    monkeypatch.setattr(run, "PACELINE", (sys.executable, "-c", script))
    monkeypatch.setattr(
        run.subprocess,
        "run",
        lambda words, _run=run.subprocess.run, **k: (ran.append(list(words[3:])), _run(words, **k))[
            1
        ],
    )
    done = tmp_path / "target"
    done.mkdir()
    commands = [
        ["data", "answer", "--out", str(done)],
        ["quantize", "pocket", "--out", str(done)],
        ["bench", "pocket", "--out", str(tmp_path / "plain.json")],
        ["bench", "pocket", "--out", str(tmp_path / "optimised.json")],
    ]
    steps = run.Steps(commands=commands, open_rows=[], target="pocket", draft="ngram")
    reason = run.run_steps(steps, tmp_path)
    assert reason == "paceline bench: no kernel here, take a GPU"
    assert [words[0] for words in ran] == ["data", "bench"]


def test_kept_rows_become_the_pages_table(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- ours: written by run.py --render -->\nold\n<!-- ours: end -->\nafter\n"
    )
    row = {
        "recipe": "05-w4a16-ngram23",
        "place": 5,
        "target": "pocket",
        "machine": "two cores",
        "regimes": ["64:32"],
        "requests": 6,
        "answers": 32,
        "steps": None,
        "open": ["no graphs"],
        "reason": None,
        "tau": [1.5],
        "rungs": [
            {"rung": "target alone, eager", "mean": 1.0, "low": None, "high": None},
            {"rung": "target alone, as vLLM starts it", "mean": 1.01, "low": 0.9, "high": 1.1},
            {"rung": "and its draft", "mean": 1.25, "low": 1.125, "high": 1.5},
        ],
    }
    kept = tmp_path / "kept.json"
    run.keep(kept, {**row, "tau": [9.0]})
    run.keep(kept, row)  # in place of the first
    run.keep(kept, {**row, "recipe": "04-dflash12", "steps": 20, "reason": "paceline train: no"})
    run.write_ours(kept, page)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    rows = [line for line in lines if line.startswith("| 0")]
    assert rows == [
        "| 04-dflash12 | 6 x 64:32; 32 answers, draft 20 steps |  |  |  |  | paceline train: no |",
        "| 05-w4a16-ngram23 | 6 x 64:32; 32 answers | 1.01 (0.90 to 1.10) |  |"
        " 1.25 (1.12 to 1.50) | 1.50 | no graphs |",
    ]
