"""A draft folder as a design: its files' bytes, whatever the family and quantisation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from builders import build_draft
from contract_cases import CASES, Case, build_tensors_of, write_folder

from paceline.draft import read_draft, resolve_draft
from paceline.errors import PlanError
from paceline.forecast import (
    CachePlan,
    build_draft_config,
    build_forecast,
    describe_forecast,
    design_of_draft,
    measure_memory,
    read_design_or_draft,
    read_shape,
)
from paceline.forecast.sizes import measure_design
from paceline.rules import read_rules

# What a design has no key for, and the folders of it.
NO_DESIGN = {
    "parameters, a design of": (
        "eagle3, two layers, biases, norms before fc",
        "eagle3, Qwen3 layer",
        "medusa, an output layer each, biases, two layers",
        "draft_model, Qwen3, tied",
        "draft_model, Qwen2",
        "dflash",
        "odd: eagle3, plain Qwen3 architecture, default head_dim of 128",
        "odd: eagle3, Qwen3 layer, four taps told once",
        "odd: eagle3, rotary tables in the file",
        "odd: mtp with the target's embeddings and head",
        "odd: draft_model, tied, and a head in the file",
    ),
    "no key for this quantisation": (
        "draft_model, int4 weights by rows",
        "eagle3, int8 weights and inputs",
        "draft_model, Qwen3, int8 weights and inputs",
        "eagle3, int4 weights, the output layer too",
        "odd: eagle3, FP8, one layer left plain by vLLM's own number for it",
    ),
}
REASONS = {name: reason for reason, names in NO_DESIGN.items() for name in names}


def read_case(case: Case, folder: Path) -> tuple[Any, Any]:
    (folder / "target").mkdir(parents=True)
    (folder / "target/config.json").write_text(json.dumps(case.target))
    write_folder(case, folder / "draft", build_tensors_of(case))
    return read_draft(folder / "draft"), read_shape(folder / "target")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contract_is_described_to_the_byte_or_refused(case: Case, tmp_path: Path) -> None:
    draft, shape = read_case(case, tmp_path)
    if case.name in REASONS:
        with pytest.raises(PlanError, match=REASONS[case.name]):
            design_of_draft(draft, shape)
        return
    design = design_of_draft(draft, shape)
    stored = sum(t.end - t.start for name, t in draft.tensors.items() if name != "t2d")
    scales = sum(t.end - t.start for name, t in draft.tensors.items() if "weight_scale" in name)
    found = measure_design(design, shape, context_tokens=64).weights_bytes
    # of FP8 the design counts float32 scales, which vLLM makes of 16-bit ones too
    assert found == stored + (scales if design.weights == "fp8" else 0)


@pytest.mark.parametrize(("name", "target", "held"), [("pocket-eagle3", "pocket", 6_163_472)])
def test_a_bundled_draft_by_name(name: str, target: str, held: int) -> None:
    """What a started engine holds on a CPU (docs/results/pocket.md)."""
    shape = read_shape(target)
    design = read_design_or_draft(name, shape)
    found = measure_memory(design, shape, context_tokens=16_384, plan=CachePlan(device="cpu"))
    assert found.total_bytes == held


def test_the_config_of_a_design_leads_back_to_it() -> None:
    """Through the folder's config alone: every size comes back."""
    shape = read_shape("pocket")
    draft = read_draft(resolve_draft("pocket-eagle3"))
    design = design_of_draft(draft, shape)
    written = build_draft_config(design, shape)
    again = design_of_draft(dataclasses.replace(draft, config={**draft.config, **written}), shape)
    assert again == design


def test_a_draft_of_another_target(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="another target than pocket"):
        design_of_draft(read_draft(build_draft(tmp_path / "draft")), read_shape("pocket"))


def test_small_drafts_are_told_in_small_units() -> None:
    """M of 6 MB is not "0.006 GB", and steps of a small target are not all 0.01 ms."""
    shape = read_shape("pocket")
    found = build_forecast(
        read_design_or_draft("pocket-eagle3", shape),
        shape,
        read_rules("emc2-2027"),
        plan=CachePlan(device="cpu"),
    )
    text = "\n".join(
        f"{label} {value}" for _, lines in describe_forecast(found) for label, value in lines
    )
    assert "M 6,163,472 bytes (6.16 MB)" in text
    assert "target alone 0.0073 ms" in text


def test_an_unknown_device() -> None:
    with pytest.raises(PlanError, match="'tpu' is unknown"):
        CachePlan(device="tpu")
