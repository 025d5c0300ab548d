"""A draft watched at work: every matrix that can be quantised is seen, in every family that can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_dflash_training import MASK, build
from tiny import make_data, make_recipe, make_target

from paceline.data import read_rows
from paceline.draft import dequantize_tensors, read_tensors
from paceline.errors import DataError
from paceline.quantize import Moments, choose_scheme, plan_draft, quantize_draft
from paceline.target import TargetFacts, read_target
from paceline.train import open_draft_run, train_draft
from paceline.train.replay import load_draft_module

RECIPES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3-cut": {"draft__draft_vocab_size": 40},
    "draft_model": {
        "family": "draft_model",
        "draft": {"num_speculative_tokens": 3, "num_layers": 2},
    },
    "dflash": {},
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory, target: TargetFacts) -> Path:
    return make_data(tmp_path_factory.mktemp("rows") / "data", target, num_rows=6, top=MASK)


@pytest.mark.parametrize("kind", RECIPES)
def test_every_matrix_is_seen_and_quantised(
    kind: str, target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    changes = {**RECIPES[kind], "optim__num_steps": 2}
    recipe = build("dflash", optim__num_steps=2) if kind == "dflash" else make_recipe(**changes)
    draft = train_draft(
        recipe, target=target, data_dir=data_dir, out_dir=tmp_path / "draft", device="cpu"
    )
    rows = read_rows(data_dir)
    run = open_draft_run(draft, target, rows, where="rows", dtype="float32")
    plan = plan_draft(draft, choose_scheme("w4a16", 16))
    moments = Moments([*plan.modules, "lm_head"], where="rows")
    run.observe(moments.seen, {})
    for module in (*plan.modules, "lm_head"):
        assert moments.num_inputs(module) > 0, module
        assert bool((moments.hessian(module).diagonal() > 0).any()), module
    done = quantize_draft(plan, tmp_path / "small", calibration=run, where="rows")
    plain = dequantize_tensors(read_tensors(done))
    loaded = dict(load_draft_module(done).state_dict())
    for module in plan.modules:
        name = f"{module}.weight"
        assert torch.equal(loaded[name].to(plain[name].dtype), plain[name])


def test_given_weights_stand_in(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    draft = train_draft(
        make_recipe(optim__num_steps=2),
        target=target,
        data_dir=data_dir,
        out_dir=tmp_path / "draft",
        device="cpu",
    )
    rows = read_rows(data_dir)[:2]
    run = open_draft_run(draft, target, rows, where="rows", dtype="float32")
    before, after = (Moments(["fc", "midlayer.self_attn.o_proj"], where="rows") for _ in "ab")
    run.observe(before.seen, {})
    doubled = {"fc.weight": read_tensors(draft)["fc.weight"].float() * 2}
    run.observe(after.seen, doubled)
    assert torch.equal(before.hessian("fc"), after.hessian("fc"))
    name = "midlayer.self_attn.o_proj"
    assert not torch.allclose(before.hessian(name), after.hessian(name))


def test_a_row_that_gives_nan_is_named_before_the_draft_runs(
    data_dir: Path, target: TargetFacts, tmp_path: Path
) -> None:
    draft = train_draft(
        make_recipe(optim__num_steps=2),
        target=target,
        data_dir=data_dir,
        out_dir=tmp_path / "draft",
        device="cpu",
    )
    rows = read_rows(data_dir)
    folder = make_target(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    only_here = set(rows[4].input_ids) - {t for row in rows[:4] for t in row.input_ids}
    assert only_here
    tensors["model.embed_tokens.weight"][min(only_here)] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"d/rows\.jsonl: the target's states of row 'row-4'"):
        open_draft_run(draft, read_target(str(folder)), rows, where="d/rows.jsonl")
