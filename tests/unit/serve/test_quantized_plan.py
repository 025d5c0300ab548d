"""A list of plain layers by number fits one length of target: the plan holds it to that."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from contract_cases import CASES, build_tensors_of, write_folder

from paceline.draft import read_draft
from paceline.errors import PlanError
from paceline.serve import build_plan, check_plan
from paceline.target import read_target

NAME = "odd: eagle3, FP8, one layer left plain by vLLM's own number for it"


@pytest.fixture(autouse=True)
def _installed(play_vllm: Callable[..., None]) -> None:
    play_vllm("")


@pytest.mark.parametrize("num_layers", [4, 5])
def test_the_number_of_the_targets_layers_decides(num_layers: int, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == NAME]
    write_folder(case, tmp_path / "d", build_tensors_of(case))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(case.target))
    target = read_target(tmp_path / "target", require_weights=False)
    target = dataclasses.replace(target, num_hidden_layers=num_layers)
    plan = build_plan(target, read_draft(tmp_path / "d"), device="cpu")
    if num_layers == 4:
        check_plan(plan)
        return
    with pytest.raises(PlanError, match="calls the draft's first layer 5"):
        check_plan(plan)
