"""Distillation on the fixed grid: its arithmetic by hand; what is trained is what is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from random_hybrid import build_rows, save_hybrid  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from paceline.draft import dequantize_tensors  # noqa: E402
from paceline.errors import DataError, PlanError, RecipeError  # noqa: E402
from paceline.quantize import (  # noqa: E402
    Distillation,
    choose_scheme,
    distill_target,
    hold_out_rows,
    plan_target,
    require_distillable,
    round_target,
    write_target,
)
from paceline.quantize.distill import compare_divergences  # noqa: E402
from paceline.quantize.distill_run import _diverge, _scale_rate, build_student  # noqa: E402
from paceline.quantize.grid import QuantizedWeight  # noqa: E402
from paceline.quantize.grid_layer import GridLayer  # noqa: E402
from paceline.quantize.target_run import load_target  # noqa: E402
from paceline.target import TargetFacts, read_target  # noqa: E402

ROWS, HELD_OUT = build_rows(48)[:40], build_rows(48)[40:]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return read_target(str(save_hybrid(tmp_path_factory.mktemp("target") / "hybrid")))


def plan_all(target: TargetFacts, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "method": "awq",
        "recurrent": choose_scheme("w4a16"),
        "head": choose_scheme("w8a16"),
        "num_edge_layers": 0,
    }
    return plan_target(target, choose_scheme("w4a16"), **{**settings, **changes})


def test_a_layer_rounds_forward_and_passes_gradients_back() -> None:
    scale_RG = torch.tensor([[0.5, 2.0]])
    codes_RC = torch.tensor([[3.0, -8.0, 7.0, 0.0]])
    start = QuantizedWeight(scheme=choose_scheme("w4a16"), codes_RC=codes_RC, scale_RG=scale_RG)
    layer = GridLayer(start, None)
    with torch.no_grad():
        layer.latent_RC.copy_(torch.tensor([[3.4, -7.6, 6.8, 0.2]]))  # same codes
    inputs = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    output = layer(inputs)
    # 3 * 0.5 * 1 - 8 * 0.5 * 10 + 7 * 2 * 100 + 0
    assert output.tolist() == [[1.5 - 40.0 + 1400.0]]
    (2 * output.sum()).backward()
    assert layer.latent_RC.grad.tolist() == [[1.0, 10.0, 400.0, 4000.0]]  # 2 * input * scale
    with torch.no_grad():
        layer.latent_RC.copy_(torch.tensor([[3.6, -9.4, 8.0, -0.6]]))
    layer.stay_inside()
    assert layer.read().codes_RC.tolist() == [[4.0, -8.0, 7.0, -1.0]]
    assert layer.read().scale_RG is scale_RG


def test_inputs_are_rounded_where_they_are_when_served() -> None:
    start = QuantizedWeight(
        scheme=choose_scheme("w8a8"),
        codes_RC=torch.tensor([[100.0, -3.0]]),
        scale_RG=torch.tensor([[0.25]]),
    )
    inputs = torch.tensor([[127.0, 0.4], [0.0, 0.0], [63.5, 0.3]], requires_grad=True)
    output = GridLayer(start, None)(inputs)
    # the largest input of a token is 127 steps; 0.4 of a step is none, 0.3 of half a one is one
    assert output.flatten().tolist() == [3175.0, 0.0, 63.5 * 25 - 0.5 * 0.75]
    output.sum().backward()
    assert inputs.grad.tolist() == [[25.0, -0.75]] * 3


def test_the_student_is_the_target_that_is_written(target: TargetFacts, tmp_path: Path) -> None:
    plan = plan_all(target)
    start = round_target(plan, tmp_path / "out", rows=ROWS, where="rows")
    student = load_target(plan, torch.float32, "cpu")
    assert set(build_student(student, plan, start)) == set(plan.schemes)
    done = write_target(plan, start, tmp_path / "out")
    written = load_target(plan, torch.float32, "cpu")
    plain = dequantize_tensors(load_file(done.path / "model.safetensors"))
    head = plain.pop("lm_head.weight")
    written.lm_head = torch.nn.Linear(64, 96, bias=False)
    state = {n: t.float() for n, t in plain.items() if not n.startswith("mtp.")}
    written.load_state_dict({**state, "lm_head.weight": head.float()})
    tokens = torch.tensor([list(row.input_ids) for row in ROWS[:4]])
    with torch.no_grad():
        assert torch.equal(student(tokens).logits, written(tokens).logits)


def test_divergences_are_those_of_each_row_alone(target: TargetFacts, tmp_path: Path) -> None:
    plan = plan_all(target, method="rtn")
    start = round_target(plan, tmp_path / "out")
    teacher = load_target(plan, torch.float32, "cpu")
    student = load_target(plan, torch.float32, "cpu")
    build_student(student, plan, start)
    short = dataclasses.replace(
        ROWS[1], input_ids=ROWS[1].input_ids[:9], loss_spans=((2, 4), (6, 9))
    )
    with torch.no_grad():
        owners, found = _diverge(student, teacher, [short, ROWS[0]])
        assert owners.tolist() == [0] * 5 + [1] * 16
        wanted = []
        for row, places in ((short, (1, 2, 5, 6, 7)), (ROWS[0], range(3, 19))):
            tokens = torch.tensor([list(row.input_ids)])
            one, other = (
                model(tokens).logits[0, list(places)].double().softmax(-1)
                for model in (teacher, student)
            )
            wanted += (one * (one / other).log()).sum(-1).tolist()
    assert found.tolist() == pytest.approx(wanted, rel=1e-3)
    assert min(wanted) > 1e-4


def test_training_helps_and_stays_on_the_grid(target: TargetFacts, tmp_path: Path) -> None:
    plan = plan_all(target, method="rtn")
    start = round_target(plan, tmp_path / "out")
    how = Distillation(rows=ROWS, held_out=HELD_OUT, num_steps=20)
    shown: list[tuple[int, int]] = []
    better, told = distill_target(
        plan, start, how, where="rows", on_step=lambda *step: shown.append(step)
    )
    assert shown[-1] == (20, 20)
    assert told["kept"]
    assert told["kl_after"] < 0.5 * told["kl_before"]
    assert told["change_high"] < 0
    assert 0 < told["codes_moved"] < 0.5
    for name, weight in better.weights.items():
        assert torch.equal(weight.scale_RG, start.weights[name].scale_RG)
        half = 2 ** (weight.scheme.num_bits - 1)
        assert torch.equal(weight.codes_RC, weight.codes_RC.round().clamp(-half, half - 1))
    done = write_target(plan, better, tmp_path / "out", distilled=told)
    plain = dequantize_tensors(load_file(done.path / "model.safetensors"))
    name = "model.layers.1.mlp.down_proj"
    kept = better.weights[name]
    assert torch.equal(plain[f"{name}.weight"], kept.plain_RC.to(torch.bfloat16))
    assert not torch.equal(kept.codes_RC, start.weights[name].codes_RC)
    record = json.loads((done.path / "quantized.json").read_text())
    assert record["distilled"]["num_held_out"] == len(HELD_OUT)
    # the same seed, the same codes
    again, _ = distill_target(plan, start, how, where="rows")
    assert torch.equal(again.weights[name].codes_RC, kept.codes_RC)


def test_what_is_no_better_is_not_taken(target: TargetFacts, tmp_path: Path) -> None:
    plan = plan_all(target, method="rtn")
    start = round_target(plan, tmp_path / "out")
    how = Distillation(rows=ROWS, held_out=HELD_OUT, num_steps=2, learning_rate=3.0)
    better, told = distill_target(plan, start, how, where="rows")
    assert told["kl_after"] > told["kl_before"]
    assert better is start
    assert told["kept"] is False


def test_better_is_a_difference_beyond_chance() -> None:
    found = compare_divergences([(2.0, 4), (1.0, 2), (3.0, 6)], [(1.0, 4), (0.5, 2), (1.5, 6)])
    assert (found["kl_before"], found["kl_after"]) == (0.5, 0.25)
    assert (found["change_low"], found["change"], found["change_high"]) == (-0.25, -0.25, -0.25)
    assert found["kept"]
    mixed = compare_divergences([(2.0, 4), (2.0, 4), (2.0, 4)], [(0.5, 4), (2.4, 4), (1.0, 4)])
    assert mixed["change"] < 0 < mixed["change_high"]
    assert not mixed["kept"]
    assert not compare_divergences([(2.0, 4)], [(1.0, 4)])["kept"]  # one row says nothing


def test_rows_that_judge_are_not_learnt_from() -> None:
    rows = build_rows(100)
    rest, held_out = hold_out_rows(rows, 20)
    assert (len(rest), len(held_out)) == (88, 12)
    assert not {row.row_id for row in rest} & {row.row_id for row in held_out}
    assert len(hold_out_rows(build_rows(1000), 20)[1]) == 64
    with pytest.raises(DataError, match="15 rows are no longer than 20 tokens; expected 16"):
        hold_out_rows(rows[:15], 20)


def test_what_cannot_be_distilled_is_told(target: TargetFacts, tmp_path: Path) -> None:
    plan = plan_all(target, method="rtn", head=choose_scheme("fp8"))
    with pytest.raises(PlanError, match="fp8 has none"):
        require_distillable(plan)
    folder = save_hybrid(tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plan = plan_all(read_target(str(folder)), method="rtn", head=None)
    start = round_target(plan, tmp_path / "out")
    how = Distillation(rows=ROWS, held_out=HELD_OUT, num_steps=2)
    with pytest.raises(RecipeError, match=r"rows r\d+.*the loss of step 1 is not a number"):
        distill_target(plan, start, how, where="rows")


@pytest.mark.parametrize(
    ("scheme", "columns", "wanted"), [("w4a16", 64, 1.0), ("w4a16", 256, 0.25), ("w8a8", 128, 8.0)]
)
def test_the_rate_is_for_the_grid_and_the_inputs(scheme: str, columns: int, wanted: float) -> None:
    layer = GridLayer(
        QuantizedWeight(
            scheme=choose_scheme(scheme),
            codes_RC=torch.zeros(2, columns),
            scale_RG=torch.ones(2, 1),
        ),
        None,
    )
    assert _scale_rate(layer) == wanted
