"""bench/compare_losses.py: every entry is a recipe, and the comparison is what hand would give."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.train import read_recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(ROOT / "bench"))
    import compare_losses

    return compare_losses


def test_runs_differ_in_their_loss_alone(bench: Any) -> None:
    recipe = read_recipe(ROOT / "recipes" / "pocket" / "eagle3-slim.toml")
    sizes = {"tokens_per_batch": 4096, "anchors_per_row": 32, "max_length": 256}
    made = {
        name: bench.with_loss(recipe, name, num_steps=50, seed=3, sizes=sizes).as_dict()
        for name in bench.LOSSES
    }
    plain = made[bench.DEFAULT]
    for name, value in made.items():
        differs = {key for key in plain if value[key] != plain[key]}
        expected = {"draft"} if "normed" in name else {"loss"}
        assert differs == (set() if name == bench.DEFAULT else expected), name
    assert plain["loss"]["position_weights"] == [1.0, 0.8, 0.64]
    assert made["ce, flat"]["loss"]["position_weights"] == [1.0, 1.0, 1.0]


def test_the_ratio_and_its_interval(bench: Any) -> None:
    """Two seeds, ten texts of 20 tokens: 5 steps for the one, 4 or 5 for the other."""
    few, many = [[20, 5]] * 10, [[20, 4]] * 10
    runs = {f"{bench.DEFAULT}/0": few, f"{bench.DEFAULT}/1": few, "ce/0": many, "ce/1": many}
    runs = {key: {"greedy": pairs} for key, pairs in runs.items()}
    ratio, half, length = bench.compare(runs, "ce", "greedy", ["0", "1"])
    assert (ratio, half, length) == (pytest.approx(1.25), 0.0, 5.0)
    runs["ce/1"] = {"greedy": few}  # seeds that disagree: the interval says so
    ratio, half, _ = bench.compare(runs, "ce", "greedy", ["0", "1"])
    assert ratio == pytest.approx((400 / 90) / 4)
    assert half > 1.0  # one degree of freedom between two seeds
