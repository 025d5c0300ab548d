"""One plan several times: a GPU, or a share of the cores, for each engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.serve import build_plan, spread_plan
from paceline.serve.spread import find_gpus
from paceline.target import TargetFacts

Targets = Callable[..., TargetFacts]


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 5, 7})


def test_engines_share_the_cores(make_target: Targets) -> None:
    plan = build_plan(make_target(), device="cpu")
    assert spread_plan(plan, 1) == [plan]
    for num, threads in ((2, 2), (3, 1), (4, 1)):
        plans = spread_plan(plan, num)
        assert [one.num_threads for one in plans] == [threads] * num
        assert [one.env["OMP_NUM_THREADS"] for one in plans] == [str(threads)] * num
        assert all(one.engine_args == plan.engine_args for one in plans)
    with pytest.raises(PlanError, match="5 engines at once, and this machine has 4 cores") as said:
        spread_plan(plan, 5)
    assert said.value.fix == "Use --data-parallel 4."


@pytest.mark.parametrize(
    ("visible", "named"), [("0,1", ["0", "1"]), (" 3, GPU-8c ,6", ["3", "GPU-8c", "6"])]
)
def test_each_engine_has_a_gpu_of_those_that_may_be_seen(
    make_target: Targets, monkeypatch: pytest.MonkeyPatch, visible: str, named: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = build_plan(make_target(), device="cuda", max_model_len=2048)
    plans = spread_plan(plan, len(named))
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in plans] == named
    assert {one.num_threads for one in plans} == {None}
    with pytest.raises(PlanError, match=f"this machine has {len(named)} GPUs"):
        spread_plan(plan, len(named) + 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(PlanError, match="has 1 GPU") as said:
        spread_plan(plan, 2)
    assert said.value.fix == "Leave --data-parallel out."


def test_gpus_are_counted_from_0_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = [Path(f"/dev/nvidia{n}") for n in (10, 2, 0)]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(names))
    assert find_gpus() == ("0", "1", "2")
