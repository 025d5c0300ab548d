"""Folders that are within every limit and still meant to cost time, memory or a screen."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    build_config,
    build_draft,
    build_target_facts,
    build_tensors,
    random_bf16,
    write_safetensors,
)
from contract_cases import CASES, build_tensors_of, write_folder
from envelopes import build_envelope

from paceline.validate import validate_draft
from paceline.validate.report import build_report, finding


def test_many_small_tensors_are_not_held_against_every_layer_of_the_target(tmp_path: Path) -> None:
    """Each shares one dimension with each of 60 matrices; all pairs would take minutes."""
    target = tmp_path / "target"
    target.mkdir()
    layers = {
        f"model.layers.{i}.mlp.up_proj.weight": random_bf16(256, 64, seed=i) for i in range(60)
    }
    write_safetensors(target / "model.safetensors", layers)
    folder = build_draft(tmp_path / "d")
    tensors = build_tensors(build_config())
    values = random_bf16(256, 16, seed=1)
    for number in range(1200):
        tensors[f"t{number}"] = values
    write_safetensors(folder / "model.safetensors", tensors)
    begin = time.process_time()
    report = validate_draft(folder, target=build_target_facts(target), deep=True)
    assert report.verdict == "fail"
    assert time.process_time() - begin < 8, "all pairs: 15 s and more"
    assert len(report.findings) < 500, "one screen, not twelve hundred lines"


def test_many_patterns_of_ignored_modules_cost_seconds_at_most(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == "draft_model, int4 weights by rows"]
    settings = case.config["quantization_config"]
    for number, entries in enumerate(
        (
            [f"re:.*{'a' * 20}.*{i}.*b.*" for i in range(32)],
            [f"re:.*{'a' * 20}.*{i}.*b.*" for i in range(256)],
            [f"model.layers.{i}.mlp.down_projection" for i in range(256)],
            [f"model.layers.{i}.mlp.down_projection" for i in range(5000)],
        )
    ):
        folder = tmp_path / str(number)
        config = {
            **case.config,
            "num_hidden_layers": 64,
            "quantization_config": {**settings, "ignore": entries},
        }
        write_folder(case, folder, build_tensors_of(case))
        (folder / "config.json").write_text(json.dumps(config))
        begin = time.process_time()
        assert validate_draft(folder, deep=True).verdict == "fail"
        assert time.process_time() - begin < 5


def test_a_report_says_how_much_it_leaves_out() -> None:
    many = [
        finding("ten.extra", "f", f"tensor 'a{i}' has no place in this eagle3 draft")
        for i in range(250)
    ]
    one = finding("ten.const", "f", "every value of 'x' is the same")
    report = build_report([*many, one])
    assert len(report.findings) == 101
    assert report.findings[99].message.endswith("(150 more)")
    assert report.findings[100] == one
    assert build_report(report.findings).findings == report.findings


@pytest.mark.parametrize(
    "value", [None, True, 7, 2**60, 0.5, "x", "\x1b[2J", [], ["a"], [[1]], {}, {"a": {"b": 1}}]
)
def test_any_value_of_any_key_of_an_envelope_ends_in_a_verdict(
    value: object, tmp_path: Path
) -> None:
    outer = (
        "speculators_model_type",
        "transformer_layer_config",
        "speculators_config",
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "eagle_aux_hidden_state_layer_ids",
        "aux_hidden_state_layer_ids",
        "mask_token_id",
        "model_type",
        "auto_map",
        "architectures",
    )
    inner = ("model_type", "layer_types", "hidden_size", "num_attention_heads", "rope_parameters")
    for kind in ("eagle3", "dflash", "peagle"):
        more = {"mask_token_id": 63, "aux_hidden_state_layer_ids": [1, 2, 3]}
        for number, key in enumerate(outer):
            changes = {"speculators_model_type": kind, **more, key: value}
            folder = build_envelope(tmp_path / f"{kind}-{number}", **changes)
            validate_draft(folder, target=build_target_facts(tmp_path), deep=True)
        for key in inner:
            folder = build_envelope(
                tmp_path / f"{kind}-{key}",
                layer={key: value},
                **{"speculators_model_type": kind, **more},
            )
            validate_draft(folder, target=build_target_facts(tmp_path), deep=True)


def test_a_file_that_shrinks_after_its_header_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the header and the values someone cuts the file: a message, no wrong verdict."""
    from paceline.errors import DraftError
    from paceline.validate import run

    folder = build_draft(tmp_path / "d")
    path = folder / "model.safetensors"
    scan = run.scan_folder

    def scan_then_cut(place: Path, **more: Any) -> object:
        found = scan(place, **more)
        path.write_bytes(path.read_bytes()[:-640])
        return found

    monkeypatch.setattr(run, "scan_folder", scan_then_cut)
    with pytest.raises(DraftError, match=r"changed while it was read|cannot be read"):
        validate_draft(folder, target=build_target_facts(tmp_path), deep=True)


def test_a_zero_norm_is_told(tmp_path: Path) -> None:
    zeros = ("BF16", (16,), np.zeros(16, "<u2").tobytes())
    folder = build_draft(tmp_path / "d", tensors={"norm.weight": zeros})
    found = validate_draft(folder, deep=True).findings
    assert any(i.rule == "ten.const" and i.where == "norm.weight" for i in found)
