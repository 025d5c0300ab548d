"""paceline compare, and the options of eval that say how a run is made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Outcome

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

from test_eval_compare import make_run

Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("a-folder-with-quite-a-long-name-" + "x" * 60)
    return [
        make_run(folder / "a", jitter=1),
        make_run(folder / "b", jitter=2),
        make_run(folder / "slow", jitter=3, slower=0.05),
        make_run(folder / "thinking", jitter=4, thinking="on"),
    ]


def test_table_fits_80_columns_and_tells_real_from_noise(run: Run, runs: list[Path]) -> None:
    outcome = run("compare", *runs[:3])
    outcome.require(0)
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    (a_b,) = [line for line in lines if line.startswith("A less B")]
    (a_slow,) = [line for line in lines if line.startswith("A less C")]
    assert a_b.rstrip().endswith("noise: within the interval")
    assert a_slow.rstrip().endswith("real")
    assert "Noise floor of this machine: not measured" in outcome.out
    ranks = [line.split()[5] for line in lines if line.startswith(("A  ", "B  ", "C  "))]
    assert len(ranks) == 3


def test_json_is_one_object_with_every_pair(run: Run, runs: list[Path]) -> None:
    outcome = run("compare", *runs[:3], "--json")
    outcome.require(0)
    found = json.loads(outcome.out)
    assert [r["run"] for r in found["runs"]] == [str(path) for path in runs[:3]]
    assert len(found["differences"]) == 9  # three pairs, three figures


def test_unlike_runs_are_one_message(run: Run, runs: list[Path]) -> None:
    run("compare", runs[0], runs[3]).require(2, "thinking is none", "on in", "same settings")
    run("compare", runs[0]).require(2, "1 run to compare")
    run("compare", runs[0], runs[0].parent / "nowhere").require(2, "does not exist")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cycles", 2), ("need a second arm", "--baseline")),
        (("--stop-at", 1.0), ("--stop-at 1 without --cycles",)),
        (("--stop-at", 0, "--cycles", 2), ("--stop-at 0", "above 0")),
        (
            ("--noise-floor", "--baseline", "none"),
            ("--baseline has no effect with --noise-floor",),
        ),
    ],
)
def test_options_that_make_no_sense_together(
    run: Run, options: tuple[object, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    common = ("eval", "smollm2-eagle3", "--target", "smollm2", "--out", tmp_path / "run")
    run(*common, *options).require(2, *words)
    assert not (tmp_path / "run").exists()
