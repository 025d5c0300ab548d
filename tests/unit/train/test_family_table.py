"""recipes/families: cells, their figures and the page; what stops is gone on with."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import make_data, make_recipe

from paceline.draft import read_draft
from paceline.rules import read_rules
from paceline.target import TargetFacts
from paceline.train import read_recipe, train_draft

TERMS = {
    name: {"ratio": ratio, "capped_ratio": min(ratio, 2.0), "weight": weight, "points": points}
    for name, ratio, weight, points in (
        ("tau", 0.9, 0.5, 45.0),
        ("memory", 2.5, 0.25, 50.0),
        ("tpot", 1.0, 0.25, 25.0),
    )
}
RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(scope="module")
def cells() -> Any:
    sys.path.insert(0, str(RECIPES / "families"))
    import cells

    return cells


@pytest.fixture(scope="module")
def table(cells: Any) -> Any:
    import table

    return table


@pytest.fixture(scope="module")
def page(cells: Any) -> Any:
    import page

    return page


def test_length_and_interval_by_hand(cells: Any) -> None:
    """Two prompts: 30/10 and 10/10; ratio 2, cells +1 and -1, s^2 / n = 1."""
    pairs = [(30, 10), (10, 10), (8, 4), (8, 4), (8, 4), (8, 4), (8, 4)]
    names = ["a"] * 2 + ["b"] * 5
    requests = [
        {"category": name, "delivered": d, "steps": s}
        for name, (d, s) in zip(names, pairs, strict=True)
    ]
    found = cells.length_by_category(requests)
    assert found["a"]["value"] == found["b"]["value"] == found["all"]["value"] == 2.0
    assert found["a"]["half_width"] is None  # two prompts say nothing of their spread
    assert found["b"]["half_width"] == 0.0
    # seven cells: +10, -10 and 0 over the mean of 40/7 steps
    variance = (2 * (10 * 7 / 40) ** 2 / 6) / 7
    assert found["all"]["half_width"] == pytest.approx(2.4469 * variance**0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, {"num_taps": 3, "intermediate_size": 48}),
        (
            {"family": "dflash", "draft__mask_token_id": 63, "draft__num_layers": 2},
            {"num_layers": 2, "num_taps": 3},
        ),
        ({"draft__parallel": True, "draft__mask_token_id": 63}, {"parallel": True}),
        ({"family": "medusa", "draft__aux_layer_ids": None}, {"one_head": True}),
        (
            {"family": "draft_model", "draft__aux_layer_ids": None, "draft__hidden_size": 16},
            {"hidden_size": 16, "own_head": False},
        ),
    ],
    ids=["eagle3", "dflash", "p-eagle", "medusa", "draft_model"],
)
def test_a_draft_as_a_design_has_its_sizes(
    changes: dict[str, Any], sizes: dict[str, Any], target: TargetFacts, tmp_path: Path
) -> None:
    """Of each family as `train` writes it; the numbers of parameters are then the same."""
    from paceline.forecast import design_of_draft, read_shape

    data_dir = make_data(tmp_path / "data", target, top=63)
    recipe = make_recipe(optim__num_steps=1, **changes)
    train_draft(recipe, target=target, data_dir=data_dir, out_dir=tmp_path / "d", device="cpu")
    design = design_of_draft(read_draft(tmp_path / "d"), read_shape(str(target.path)))
    assert {name: getattr(design, name) for name in sizes} == sizes


def test_every_family_has_a_recipe_of_its_own(table: Any) -> None:
    from budget import CPU_SIZES, TINY_SIZES, shorten

    for goal in table.GOALS.values():
        for family, name in goal.recipes.items():
            recipe = read_recipe(RECIPES / name)
            parallel = recipe.family == "eagle3" and recipe.draft.parallel
            assert ("p-eagle" if parallel else recipe.family) == family
            for sizes in (TINY_SIZES, CPU_SIZES):
                cut = shorten(recipe, sizes)
                assert cut.optim.tokens_per_batch == sizes["tokens_per_batch"]
                assert (cut.optim.anchors_per_row is None) == (recipe.optim.anchors_per_row is None)
            assert shorten(recipe, None) == recipe


def test_records_of_two_machines_make_one_page(page: Any, tmp_path: Path) -> None:
    folder = tmp_path / "families"
    folder.mkdir()
    draft = {"num_parameters": 5, "files_bytes": 10, "tokens_seen": 7, "minutes": 2.0}
    length = {"all": {"value": 2.5, "half_width": 0.25, "num_prompts": 3}}
    length["chat"] = {"value": 2.0, "half_width": None, "num_prompts": 1}
    measured = {
        "length": length,
        "memory_bytes": 2_000_000,
        "tpot_ms": 1.5,
        "score": {"value": 120.0, "low": 110.0, "high": 130.0, "terms": TERMS},
        "baseline_tau": 2.9,
        "replay": {"num_agree": 9, "num_steps": 10, "num_near_tie": 1, "num_real": 0},
    }
    full = {"draft": draft, "foreseen_bytes": 2_000_000, "measured": measured}
    refused = {"draft": draft, "reason": "this engine has no kernel for it"}
    for machine, cell in (("one-h200", full), ("4-cores", refused)):
        small = {**full, "measured": {**measured, "score": {**measured["score"], "value": 99.0}}}
        quantised = {"pocket/eagle3/w4a16": full, "pocket/eagle3/w8a8": small}
        record = {"machine": machine, "cells": {"pocket/mtp/bf16": cell, **quantised}}
        (folder / f"{machine}.json").write_text(json.dumps(record))
    speed = {
        "target": "pocket",
        "device": "cpu",
        "peaks": {"operations_per_s": 4e11, "bytes_per_s": 2e10},
        "provenance": {"machine": "two cores"},
        "families": {
            "mtp": {
                "tokens_per_s": 1234.4,
                "memory_bytes": 2**30,
                "operations_per_token": 5_000_000,
                "an_epoch": {"bytes": 4000, "tokens": 2},
                "roofline": {"share": 0.415},
            }
        },
    }
    (tmp_path / "train_families-cpu.json").write_text(json.dumps(speed))
    page.render_table(folder, tmp_path / "families.md", tmp_path)
    text = (tmp_path / "families.md").read_text()
    assert text.count("| mtp | 0.00 M | 0.00 MB |  |  | 7 | 2.0 |  |") == 1
    row = next(line for line in text.splitlines() if line.startswith("| mtp | 2.00"))
    assert row == (
        "| mtp | 2.00 (2.00) | 2.50 ± 0.25 | 2.00 | 1.500 | 120.0 (110.0 to 130.0) "
        "| 9 of 10, 1 near tie |"
    )
    assert "| mtp | not served here |" in text
    assert "- mtp: this engine has no kernel for it.\n" in text
    assert "| **eagle3, w4a16** | 2.00" in text
    assert "| eagle3, w8a8 | 2.00" in text
    assert "On 2-cores: not measured." in text
    assert text.count("150 points, the interval above 140") == 1  # of pocket alone
    assert "## `smollm2`\n\nNot measured on any machine yet.\n" in text
    assert "| mtp | 1,234 | 1.00 | 5 | 2 | 42 % |" in text
    assert "On one-h200: not measured." not in text
    assert "Not reached: the best draft here is" in text
    assert "| memory | 0.25 | 2.500 | 2.000 | 50.0 |" in text
    widths = {}  # a table has as many cells in each row as in its head
    for line in text.splitlines():
        if line.startswith("|"):
            widths.setdefault(line.count("|"), []).append(line)
    assert all(len(lines) >= 3 for lines in widths.values()), widths


def test_the_minutes_end_a_stage_by_ctrl_c(table: Any, tmp_path: Path) -> None:
    script = tmp_path / "stage.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(sys.argv[1]).touch()\n"
    )
    began = time.monotonic()
    runner = table.Runner(0.01)
    with pytest.raises(table.TimeUpError):
        runner.run(sys.executable, script, tmp_path / "kept")
    assert (tmp_path / "kept").exists()
    assert time.monotonic() - began < 20
    with pytest.raises(table.TimeUpError):
        table.Runner(0.0).run(sys.executable, "-c", "")
    assert table.Runner(None).run(sys.executable, "-c", "print(5); exit(3)") == (3, "5\n")


def test_cells_of_a_target_begin_with_all_plain_ones(table: Any) -> None:
    args = argparse.Namespace(target=["pocket"], only=["mtp", "dflash"], scheme=["w4a16"])
    assert list(table.list_cells(args)) == [
        ("pocket", "mtp", "bf16"),
        ("pocket", "dflash", "bf16"),
        ("pocket", "mtp", "w4a16"),
        ("pocket", "dflash", "w4a16"),
    ]


def test_what_a_score_needs_by_hand(page: Any) -> None:
    """0.5 a + 0.25 * 2 + 0.25 a s = 1.5 gives a = 1 / (0.5 + 0.25 s); past the cap of a s, not."""
    import needed

    rules = read_rules("pocket")
    for s in (0.8, 1.0, 1.25):
        found = needed.find_needed(rules, 150.0, step_ratio=s, memory_ratio=2.0)
        assert found == pytest.approx(1 / (0.5 + 0.25 * s), rel=1e-9)
    # time counts for 2 at most: 0.5 a + 0.5 + 0.5 = 1.5
    assert needed.find_needed(rules, 150.0, step_ratio=9.0, memory_ratio=5.0) == pytest.approx(1.0)
    rows = needed.needed_lines(rules, [150.0], baseline_length=3.0)
    assert "| 1 | 1.333 (4.00) |" in rows
    assert "| 0.9 | 1.379 (4.14: cannot be) |" in rows


def test_a_draft_given_is_a_draft_not_trained(table: Any) -> None:
    args = argparse.Namespace(draft={"pocket/eagle3": "pocket-eagle3"})
    assert table.train(args, None, "pocket", "eagle3").name == "pocket-eagle3"
