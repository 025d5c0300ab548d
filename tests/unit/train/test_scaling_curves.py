"""recipes/scaling/curves.py: what its trainings share, its marks, a kill, and its intervals."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_recipe

from paceline.data import read_rows
from paceline.draft import read_draft
from paceline.errors import DataError, PlanError
from paceline.target import TargetFacts
from paceline.train import train_draft
from paceline.train.setup import with_num_steps

RECIPES = Path(__file__).parents[3] / "recipes" / "scaling"


@pytest.fixture(scope="module")
def curves() -> Any:
    sys.path.insert(0, str(RECIPES))
    import curves

    yield curves
    sys.path.remove(str(RECIPES))


def _training(curves: Any, *marks: int) -> Any:
    recipe = make_recipe(
        optim__schedule="constant", optim__num_steps=marks[-1], optim__checkpoint_steps=marks[0]
    )
    return curves.Training(name="run", recipe=recipe, marks=marks, size=None)


@pytest.mark.parametrize(("axis", "key"), [("layers", "num_layers"), ("parameters", "width")])
def test_trainings_differ_in_their_axis_alone(curves: Any, axis: str, key: str) -> None:
    key = "intermediate_size" if key == "width" else key
    trainings = curves.list_trainings("pocket", axis, curves.BUDGETS["small"])
    assert len(trainings) >= 4  # as many as a fit needs
    rest = []
    for training in trainings:
        settings = training.recipe.as_dict()
        assert settings["draft"].pop(key) == training.size
        rest.append(settings)
    assert all(settings == rest[0] for settings in rest)


def test_tokens_are_one_run_at_a_constant_rate(curves: Any) -> None:
    for budget in curves.BUDGETS.values():
        (training,) = curves.list_trainings("pocket", "tokens", budget)
        assert training.recipe.optim.schedule == "constant"
        assert all(mark % training.recipe.optim.checkpoint_steps == 0 for mark in budget.marks)
        assert all(1.5 < b / a <= 3 for a, b in pairwise(budget.marks))


def test_what_has_no_recipe_or_no_such_size_is_told(curves: Any) -> None:
    budget = curves.BUDGETS["small"]
    with pytest.raises(PlanError, match="there is no recipe nemo-eagle3"):
        curves.list_trainings("nemo", "tokens", budget)
    with pytest.raises(PlanError, match="eagle3 draft has one layer"):
        curves.list_trainings("pocket", "layers", budget, family="eagle3")


def test_no_row_is_seen_twice(curves: Any, data_dir: Path) -> None:
    rows = read_rows(data_dir)
    curves.require_fresh_rows(_training(curves, 2, 4), rows)
    with pytest.raises(DataError, match="no row is seen twice"):
        curves.require_fresh_rows(_training(curves, 2, 40), rows)


def test_marks_are_shorter_runs_and_a_kill_changes_nothing(
    curves: Any, target: TargetFacts, data_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Each mark holds what a run of that length gives, bit for bit; the run is cut off between a
    checkpoint and its copy, where most is half done."""
    training = _training(curves, 2, 4)
    alone = train_draft(
        with_num_steps(training.recipe, 2),
        target=target,
        data_dir=data_dir,
        out_dir=tmp_path / "alone",
        device="cpu",
    )

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            curves.train_marks(training, target, data_dir, tmp_path / "a", device="cpu")
    cut = curves.train_marks(training, target, data_dir, tmp_path / "a", device="cpu")
    whole = curves.train_marks(training, target, data_dir, tmp_path / "b", device="cpu")
    for mark in training.marks:
        same = [(path[mark] / "model.safetensors").read_bytes() for path in (cut, whole)]
        assert same[0] == same[1]
    assert (whole[2] / "model.safetensors").read_bytes() == (
        alone.path / "model.safetensors"
    ).read_bytes()
    trained = [read_draft(whole[mark]).metadata["trained"] for mark in training.marks]
    assert [one["num_steps"] for one in trained] == [2, 4]
    assert 0 < trained[0]["tokens_seen"] < trained[1]["tokens_seen"]


def test_one_folder_holds_one_curve(curves: Any, target: TargetFacts, tmp_path: Path) -> None:
    for _ in range(2):
        curves.claim_work(tmp_path / "w", target, curves.BUDGETS["small"])
    with pytest.raises(PlanError, match="another target or budget"):
        curves.claim_work(tmp_path / "w", target, curves.BUDGETS["full"])


def test_lengths_and_their_draws_by_hand(curves: Any) -> None:
    """Pooled: 1 + (3 + 1) / (2 + 2) = 2; draws of one draft twice are the same."""
    one = [["p", "chat", 3, 2], ["q", "chat", 1, 2]]
    lengths, draws = curves.resample_lengths([one, one, [["p", "chat", 6, 2], ["q", "chat", 0, 2]]])
    assert lengths.tolist() == [2.0, 2.0, 2.5]
    assert (draws[:, 0] == draws[:, 1]).all()
    assert (draws[:, 0] == curves.resample_lengths([one])[1][:, 0]).all()  # a function of the seed
    assert set(draws[:, 0].tolist()) == {1.5, 2.0, 2.5}  # qq, pq, pp
    assert set(np.round(draws[:, 2] - draws[:, 0], 6).tolist()) == {-0.5, 0.5, 1.5}
    with pytest.raises(DataError, match="different prompts"):
        curves.resample_lengths([one, one[:1]])


def test_a_category_keeps_its_number_of_prompts(curves: Any) -> None:
    """One prompt a category: nothing to draw, no spread."""
    _, draws = curves.resample_lengths([[["p", "chat", 3, 2], ["q", "code", 1, 2]]])
    assert set(draws[:, 0].tolist()) == {2.0}


def test_the_curve_is_written_as_forecast_reads_it(curves: Any, tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    points = []
    for mark in (8, 16, 32, 64, 128):
        taken = dice.binomial(300, 0.9 - 0.8 * mark**-0.3, size=24)
        rows = [[f"p{n}", "chat", int(t), 100] for n, t in enumerate(taken)]
        points.append({"tokens": 1000 * mark, "size": None, "prompts": rows})
    args = curves.argparse.Namespace(
        axis="tokens",
        target=dataclasses.make_dataclass("Named", ["name"])("pocket"),
        work=tmp_path,
        budget="small",
        device="cpu",
    )
    curves.write_curve(args, "eagle3", 3, points[::-1])
    folder = tmp_path / "results"
    assert sorted(p.name for p in folder.iterdir()) == [
        f"pocket-eagle3-tokens.{end}" for end in ("json", "svg", "toml")
    ]
    record = json.loads((folder / "pocket-eagle3-tokens.json").read_text())
    assert [one["x"] for one in record["points"]] == [8e3, 16e3, 32e3, 64e3, 128e3]
    assert record["runs"][0]["prompts"] == points[0]["prompts"]
    assert record["held_out"][0]["num_left_out"] == 1
