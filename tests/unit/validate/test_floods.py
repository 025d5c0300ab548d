"""What only tells never crowds out what refuses, however much of it there is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from builders import build_config, build_draft, build_tensors, random_bf16, write_safetensors
from contract_cases import CASES, build_tensors_of, write_folder
from envelopes import build_envelope

from paceline.draft import read_draft
from paceline.errors import DraftError
from paceline.problems import Problem, keep_worst
from paceline.validate import validate_draft


def errors(folder: Path) -> set[str]:
    found = validate_draft(folder).findings
    assert len(found) < 1000
    return {item.rule for item in found if item.severity == "error"}


def test_the_refusing_ones_come_first_and_in_order() -> None:
    told = [Problem(rule="ten.unread", file="f", message=str(i)) for i in range(9)]
    bad = [Problem(rule="ten.shape", file="f", message=str(i)) for i in range(2)]
    assert keep_worst([*told, *bad], 4) == [*bad, *told[:2]]
    assert keep_worst([*told, *bad], 20) == [*told, *bad]


def test_tensors_without_effect_hide_no_missing_one(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == "draft_model, Llama"]
    folder = tmp_path / "d"
    many = {**case.config, "num_hidden_layers": 16}
    tensors = build_tensors_of(case)
    layer = {name: value for name, value in tensors.items() if ".layers.0." in name}
    for number in range(2, 16):
        for name, value in layer.items():
            tensors[name.replace(".layers.0.", f".layers.{number}.")] = value
    for number in range(64):
        tensors[f"model.layers.{number}.self_attn.rotary_emb.inv_freq"] = random_bf16(16, seed=1)
    del tensors["model.layers.9.mlp.down_proj.weight"]
    write_folder(case, folder, tensors)
    (folder / "config.json").write_text(json.dumps(many))
    assert "ten.missing" in errors(folder)
    with pytest.raises(DraftError):
        read_draft(folder)


@pytest.mark.parametrize("count", [60, 61, 400, 600, 10_000])
def test_keys_without_effect_hide_no_wrong_one(count: int, tmp_path: Path) -> None:
    strange: dict[str, Any] = {f"nobody_{i}": i for i in range(count)}
    wrongs: tuple[dict[str, Any], ...] = (
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"model_max_length": 64},
    )
    for number, wrong in enumerate(wrongs):
        folder = build_draft(tmp_path / str(number), config={**strange, **wrong})
        begin = time.process_time()
        assert errors(folder)
        assert time.process_time() - begin < 5
        with pytest.raises(DraftError):
            read_draft(folder)


def test_keys_without_effect_of_an_envelope(tmp_path: Path) -> None:
    strange: dict[str, Any] = {f"nobody_{i}": i for i in range(5000)}
    folder = build_envelope(tmp_path / "d", layer={"hidden_act": "gelu"}, **strange)
    assert "cfg.act" in errors(folder)


def test_long_keys_cost_nothing(tmp_path: Path) -> None:
    strange = {"k" * 4000 + str(i): 1 for i in range(60)}
    folder = build_draft(tmp_path / "d", config=strange)
    begin = time.process_time()
    assert not errors(folder)
    assert time.process_time() - begin < 2


def test_a_tensor_more_is_told_beside_many(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    tensors = build_tensors(build_config())
    for number in range(100):
        tensors[f"layers.0.self_attn.rotary_emb.inv_freq{number}"] = random_bf16(2, seed=1)
    write_safetensors(folder / "model.safetensors", tensors)
    assert "ten.extra" in errors(folder)
