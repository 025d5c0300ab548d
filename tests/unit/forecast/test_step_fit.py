"""The step-time model: amounts of work, costs by hand, held-out errors, files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PlanError, ResultError
from paceline.forecast import (
    CachePlan,
    StepPoint,
    StepRun,
    append_run,
    build_forecast,
    fit_runs,
    parse_design,
    read_runs,
    read_shape,
    read_step_model,
    write_step_model,
)
from paceline.forecast.fit import (
    FitPoint,
    build_points,
    describe_fit,
    fit_step_model,
    solve_costs,
)
from paceline.forecast.sizes import measure_design
from paceline.forecast.step_model import FEATURES, list_features
from paceline.forecast.steps import shape_sha256
from paceline.forecast.work import StepWork, measure_work
from paceline.rules import read_rules

SHAPE = read_shape("qwen3.8-27b")
SMALL_MODEL = """family = "draft_model"
num_layers = 2
hidden_size = 1024
intermediate_size = 4096
num_heads = 16
num_kv_heads = 4
head_dim = 64
own_head = false"""
NOTHING = StepWork(
    target_bytes=0,
    cache_bytes=0,
    pass_bytes=0,
    head_bytes=0,
    num_drafted=0,
    num_layers=0,
    num_state_layers=0,
    num_draft_layers=0,
    num_passes=0,
    waits=False,
    num_eager_layers=0,
    num_eager_passes=0,
)


def _point(name: str, step_ms: float, **work: Any) -> FitPoint:
    return FitPoint(
        target="t",
        configuration=name,
        work=dataclasses.replace(NOTHING, **work),
        step_ms=step_ms,
        tokens=1,
    )


def test_work_of_the_native_head_by_hand() -> None:
    design = parse_design('family = "mtp"\nnum_speculative_tokens = 3\n', SHAPE)
    sizes = measure_design(design, SHAPE, context_tokens=16384)
    work = measure_work(design, sizes, SHAPE, tokens=1000, plan=CachePlan())
    head = 248_320 * 5120 * 2
    assert work.head_bytes == 3 * head
    cache = 1000 * 2 * 4 * 256 * 2  # one layer's keys and values
    assert work.pass_bytes == 3 * (sizes.pass_bytes + cache)
    state = (2 * 16 * 128 + 48 * 128) * (3 + 3) * 2 + 48 * 128 * 128 * 4
    assert work.cache_bytes == 16 * cache + 48 * state * (2 + 3)
    counts = (work.num_drafted, work.num_layers, work.num_state_layers)
    assert counts == (3, 64, 48)
    assert (work.num_draft_layers, work.num_passes) == (3, 3)


@pytest.mark.parametrize(
    ("sizes", "passes", "layers", "heads"),
    [
        ('family = "eagle3"\nnum_layers = 2', 4, 8, 4),
        ('family = "medusa"\nnum_layers = 2', 1, 8, 4),  # one matrix, read for each head
        ('family = "dflash"\nnum_layers = 2', 1, 2, 1),
        ('family = "eagle3"\nnum_layers = 2\nparallel = true', 1, 2, 1),
        ('family = "ngram"', 0, 0, 0),
    ],
)
def test_passes_of_each_family(sizes: str, passes: int, layers: int, heads: int) -> None:
    design = parse_design(f"{sizes}\nnum_speculative_tokens = 4\n", SHAPE)
    found = measure_design(design, SHAPE, context_tokens=16384)
    work = measure_work(design, found, SHAPE, tokens=1000, plan=CachePlan())
    assert (work.num_passes, work.num_draft_layers) == (passes, layers)
    assert work.head_bytes == heads * found.head_bytes


@pytest.mark.parametrize(
    ("sizes", "waits", "eager"),
    [
        ('family = "mtp"', False, (0, 0)),
        ('family = "eagle3"', False, (0, 0)),
        ('family = "eagle3"\nparallel = true', True, (0, 0)),
        ('family = "medusa"', True, (0, 0)),
        ('family = "suffix"', True, (0, 0)),
        (SMALL_MODEL, False, (8, 4)),
    ],
)
def test_what_a_gpu_waits_for_and_launches_alone(
    sizes: str, waits: bool, eager: tuple[int, int]
) -> None:
    design = parse_design(f"{sizes}\nnum_speculative_tokens = 4\n", SHAPE)
    found = measure_design(design, SHAPE, context_tokens=16384)
    work = measure_work(design, found, SHAPE, tokens=1000, plan=CachePlan())
    assert work.waits is waits
    assert (work.num_eager_layers, work.num_eager_passes) == eager
    on_cpu = measure_work(design, found, SHAPE, tokens=1000, plan=CachePlan(device="cpu"))
    assert (on_cpu.waits, on_cpu.num_eager_layers) == (False, 0)


def test_costs_by_hand() -> None:
    """10 GB take 7 ms and 20 GB take 12: 0.5 ms a GB and 2 ms a step. Nothing else occurred."""
    costs = solve_costs(
        [
            _point("a", 7.0, target_bytes=10 * 10**9),
            _point("b", 12.0, target_bytes=20 * 10**9),
        ],
        lean=0.0,
    )
    assert costs["target_gb"] == pytest.approx(0.5)
    assert costs["step"] == pytest.approx(2.0)
    assert sum(costs.values()) == pytest.approx(2.5)


def test_no_cost_is_below_zero() -> None:
    """A line through these points has a slope below zero. With the slope at zero the best single
    step cost c makes (c/4 - 1)^2 + (c/2 - 1)^2 least: c = (1/4 + 1/2) / (1/16 + 1/4) = 2.4."""
    costs = solve_costs(
        [
            _point("a", 4.0, cache_bytes=10**9),
            _point("b", 2.0, cache_bytes=2 * 10**9),
        ],
        lean=0.0,
    )
    assert all(cost >= 0 for cost in costs.values())
    assert costs["cache_gb"] == pytest.approx(0.0, abs=1e-9)
    assert costs["step"] == pytest.approx(2.4)


def test_what_no_measurement_tells_apart_leans_to_one_bandwidth() -> None:
    """Cache and weights always move together, 1 GB of each in 4 ms and 2 in 8: one bandwidth of
    2 ms a GB for both, and nothing for the rest."""
    costs = solve_costs(
        [
            _point("a", 4.0, target_bytes=10**9, cache_bytes=10**9),
            _point("b", 8.0, target_bytes=2 * 10**9, cache_bytes=2 * 10**9),
        ]
    )
    assert costs["target_gb"] == pytest.approx(2.0)
    assert costs["cache_gb"] == pytest.approx(2.0)
    assert costs["step"] == pytest.approx(0.0, abs=1e-9)


def _synthetic(noise: float) -> list[FitPoint]:
    truth = dict.fromkeys(FEATURES, 0.0) | {
        "target_gb": 0.28,
        "cache_gb": 0.3,
        "draft_gb": 0.27,
        "head_gb": 0.26,
        "wide_states": 0.006,
        "draft_passes": 0.05,
        "speculation": 0.2,
    }
    dice, points = random.Random(0), []
    for k, layers, rows in itertools.product((1, 3, 5, 7), (1, 2), (32768, 248320)):
        text = (
            f'family = "eagle3"\nnum_speculative_tokens = {k}\nnum_layers = {layers}\n'
            f"draft_vocab_size = {rows}\n"
        )
        design = parse_design(text, SHAPE)
        for tokens in (256, 8192):
            sizes = measure_design(design, SHAPE, context_tokens=16384)
            work = measure_work(design, sizes, SHAPE, tokens=tokens, plan=CachePlan())
            amounts = list_features(work)
            step = sum(c * a for c, a in zip(truth.values(), amounts, strict=True))
            step *= 1 + dice.uniform(-noise, noise)
            points.append(
                FitPoint(
                    target="qwen3.8-27b",
                    configuration=text,
                    work=work,
                    step_ms=step,
                    tokens=tokens,
                )
            )
    return points


def test_held_out_error_is_of_configurations_left_out() -> None:
    exact = fit_step_model(_synthetic(0.0), machine="m", targets=["qwen3.8-27b"])
    assert exact.held_out_worst is not None
    assert exact.held_out_worst < 1e-4
    rough = fit_step_model(_synthetic(0.03), machine="m", targets=["qwen3.8-27b"])
    assert rough.held_out_median is not None
    assert rough.held_out_worst is not None
    assert 0.003 < rough.held_out_median < 0.03
    # work that one configuration alone does is fitted without error and not foreseen without it
    points = [_point(str(n), 1.0 + n, target_bytes=n * 10**9) for n in range(1, 6)]
    points.append(_point("only", 10.0, target_bytes=10**9, head_bytes=10**9))
    alone = fit_step_model(points, machine="m", targets=["t"])
    assert alone.fit_worst == pytest.approx(0.0, abs=1e-3)
    assert alone.held_out_worst == pytest.approx(0.8, abs=1e-3)  # 2 ms foreseen, 10 measured
    few = fit_step_model(points[:3], machine="m", targets=["t"])
    assert few.held_out_median is None
    assert "not measured" in few.describe()


def test_a_model_is_used_and_says_so(tmp_path: Path) -> None:
    model = fit_step_model(_synthetic(0.0), machine="H200", targets=["qwen3.8-27b"])
    write_step_model(tmp_path / "m.json", model)
    again = read_step_model(tmp_path / "m.json")
    assert again == model
    design = parse_design('family = "eagle3"\nnum_speculative_tokens = 3\n', SHAPE)
    rules = read_rules("emc2-2027")
    with_model = build_forecast(design, SHAPE, rules, model=again)
    without = build_forecast(design, SHAPE, rules)
    sizes = measure_design(design, SHAPE, context_tokens=16384)
    work = measure_work(design, sizes, SHAPE, tokens=8192, plan=CachePlan())
    assert with_model.step.step_ms == again.predict(work) != without.step.step_ms
    assert with_model.step_source is not None
    assert "H200" in with_model.step_source
    assert without.step_source is None
    other = read_shape("qwen3.5-4b")
    design = parse_design('family = "eagle3"\nnum_speculative_tokens = 3\n', other)
    with pytest.raises(PlanError, match=r"knows nothing of qwen3\.5-4b"):
        build_forecast(design, other, rules, model=again)


@pytest.mark.parametrize("change", ["format", "costs", "machine"])
def test_a_wrong_model_file_gets_a_message(tmp_path: Path, change: str) -> None:
    path = tmp_path / "m.json"
    write_step_model(path, fit_step_model(_synthetic(0.0), machine="m", targets=["t"]))
    record = json.loads(path.read_text())
    if change == "costs":
        record["costs"]["step"] = -1.0
    else:
        del record[change]
    path.write_text(json.dumps(record))
    with pytest.raises(ResultError):
        read_step_model(path)


def _run(step_ms: float, *, k: int = 3, machine: str = "cuda H200") -> StepRun:
    point = StepPoint(
        context_tokens=8192,
        num_repeats=3,
        step_ms=step_ms,
        step_ms_low=step_ms,
        step_ms_high=step_ms,
        tpot_ms=step_ms / 2,
        acceptance_length=2.0,
        reference_ms=None,
        ratio=None,
        ratio_low=None,
        ratio_high=None,
        repeats_ms=(step_ms,) * 3,
    )
    return StepRun(
        key=f"{machine}-{k}",
        machine=machine,
        engine="vllm 0.31.0",
        target="qwen3.8-27b",
        target_sha256=shape_sha256(SHAPE),
        arm="design",
        name="x",
        settings={"family": "mtp", "num_speculative_tokens": k},
        num_speculative_tokens=k,
        acceptance_length=2.0,
        reference=None,
        points=(point,),
        memory=None,
        start_s=1.0,
        provenance={},
    )


def test_runs_survive_a_file_and_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    runs = [_run(17.0, k=1), _run(18.0), _run(20.0, k=5)]
    for run in runs:
        append_run(path, run)
    with open(path, "a") as file:
        file.write('{"format": "paceline-steps/1", "key"')
    assert read_runs(path) == runs
    model = fit_runs(read_runs(path), [SHAPE])
    assert (model.num_points, model.max_k, model.max_tokens) == (3, 5, 8192)
    assert model.fit_worst < 0.05


def test_the_time_of_a_point_is_that_of_an_undisturbed_answer() -> None:
    """Answers of 17, 19 and 30 ms a step: 17. The reference's fastest is among those that were
    asked beside another configuration."""
    reference, other = _run(18.0, k=3), _run(17.0, k=1)
    slow = dataclasses.replace(other.points[0], repeats_ms=(19.0, 17.0, 30.0), reference_ms=16.5)
    other = dataclasses.replace(other, reference=reference.key, points=(slow,))
    found = build_points([reference, other], [SHAPE])
    assert [point.step_ms for point in found] == [16.5, 17.0]


def test_one_model_of_two_targets_says_its_error_on_each() -> None:
    points = [_point(str(n), 1.0 + n, target_bytes=n * 10**9) for n in range(1, 6)]
    others = [
        dataclasses.replace(p, target="u", configuration=f"u{p.configuration}") for p in points
    ]
    others[-1] = dataclasses.replace(others[-1], step_ms=9.0)
    model = fit_step_model([*points, *others], machine="m", targets=["t", "u"])
    assert sorted(model.held_out) == ["t", "u"]
    assert model.held_out["u"][1] == model.held_out_worst
    assert model.held_out["t"][1] < model.held_out["u"][1]
    shown = dict(describe_fit(model))
    assert shown["unseen, u"] == "off by " + "{:.1%} (median), {:.1%}".format(*model.held_out["u"])


def test_runs_that_do_not_belong_together(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="2 machines"):
        fit_runs([_run(17.0), _run(17.0, machine="cuda H100")], [SHAPE])
    with pytest.raises(ResultError, match=r"no run is of qwen3\.5-4b"):
        fit_runs([_run(17.0)], [SHAPE, read_shape("qwen3.5-4b")])
    path = tmp_path / "steps.jsonl"
    path.write_text('{"format": "paceline-steps/2"}\n')
    with pytest.raises(ResultError, match="no measured run"):
        read_runs(path)


def test_the_bundled_model_knows_both_shapes_and_its_error_on_each(tmp_path: Path) -> None:
    model = read_step_model("h200")
    assert set(model.held_out) == {"qwen3.5-4b", "qwen3.8-27b"}
    assert model.errors("qwen3.8-27b") == model.held_out["qwen3.8-27b"]
    assert model.errors() == (model.held_out_median, model.held_out_worst)
    assert "of qwen3.5-4b" in model.describe("qwen3.5-4b")
    with pytest.raises(ResultError, match="h200"):
        read_step_model(tmp_path / "h100")
