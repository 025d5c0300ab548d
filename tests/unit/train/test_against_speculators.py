"""recipes/families/against_speculators.py: one pass for both, and stages that stop and go on."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.data import read_rows
from paceline.target import TargetFacts
from paceline.train.features import load_frozen_target

FAMILIES = Path(__file__).parents[3] / "recipes" / "families"


@pytest.fixture(scope="module")
def against() -> Any:
    sys.path.insert(0, str(FAMILIES))
    import against_speculators

    return against_speculators


def test_both_are_given_the_same_states(
    against: Any, target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """The taps are equal; the last state is ours before the final norm, which they apply."""
    from speculators_data import run_for_both

    rows = read_rows(data_dir)
    run = run_for_both(
        tmp_path,
        target,
        {row.row_id: number for number, row in enumerate(rows)},
        layers=(1, 2),
        max_length=24,
        device="cpu",
    )
    norm = load_frozen_target(target, device="cpu", dtype=torch.bfloat16).backbone.norm
    for number, (row, ours_TF) in enumerate(zip(rows, run(rows), strict=True)):
        theirs = load_file(tmp_path / f"hs_{number}.safetensors")
        assert theirs["token_ids"].tolist() == list(row.input_ids[:24])
        states_TLD = theirs["hidden_states"]
        assert torch.equal(states_TLD[:, :2].flatten(1), ours_TF[:, :64])
        assert torch.equal(norm(states_TLD[:, 2]), ours_TF[:, 64:])
        assert not torch.equal(states_TLD[:, 2], ours_TF[:, 64:])


def test_stages_stop_and_go_on(
    against: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def stage(name: str) -> Any:
        def run(_: argparse.Namespace) -> dict[str, Any]:
            ran.append(name)
            if name == "slow" and len(ran) < 3:
                time.sleep(60)
            return {"name": name}

        return run

    monkeypatch.setattr(against, "STAGES", {name: stage(name) for name in ("one", "slow", "long")})
    wanted = {"one": 0.0, "slow": 0.0, "long": 50.0}
    monkeypatch.setattr(against, "foresee_seconds", lambda _: wanted)
    args, path = argparse.Namespace(stage=None, minutes=0.01), tmp_path / "log.json"
    log: dict[str, Any] = {}
    assert against.run_stages(args, log, path) == "the minutes ended in stage slow"
    assert (ran, [*log]) == (["one", "slow"], ["one", "provenance"])
    args.minutes = 0.5
    why = against.run_stages(args, log, path)
    assert why is not None
    assert why.startswith("long takes about 50 s, ")
    assert ran == ["one", "slow", "slow"]
    args.minutes = None
    assert against.run_stages(args, log, path) is None
    assert {"one", "slow", "long"} <= set(log)
