"""What a draft and its target must agree on: one folder at a time, and the words of the message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    REMOVE,
    build_config,
    build_draft,
    build_target_facts,
    build_tensors,
    encode_bf16,
    encode_d2t,
    random_bf16,
    write_safetensors,
)

from paceline.rules import read_rules
from paceline.validate import Finding, Report, validate_draft


def check(folder: Path, **options: Any) -> Report:
    target = options.pop("target", build_target_facts(folder.parent / "target"))
    return validate_draft(folder, target=target, **options)


def of(report: Report, rule: str) -> Finding:
    (found,) = [item for item in report.findings if item.rule == rule]
    return found


def test_d2t_beside_the_full_vocabulary_fails(tmp_path: Path) -> None:
    tensors = {"d2t": encode_d2t([0] * 64)}
    report = check(build_draft(tmp_path / "d", config={"draft_vocab_size": 64}, tensors=tensors))
    assert report.verdict == "fail"
    assert "no place" in of(report, "ten.extra").message


# vocabulary maps


def test_u02a_without_t2d_is_a_warning_with_the_hint(tmp_path: Path) -> None:
    tensors = {"d2t": encode_d2t(list(range(16))), "t2d": REMOVE}
    report = check(build_draft(tmp_path / "d", tensors=tensors))
    assert report.verdict == "warn"
    assert "looks like absolute ids" in of(report, "ten.d2t").message


def test_u02c_out_of_range_names_the_id(tmp_path: Path) -> None:
    tensors = {"d2t": encode_d2t([0] * 15 + [60]), "t2d": REMOVE}
    report = check(build_draft(tmp_path / "d", tensors=tensors))
    assert report.verdict == "fail"
    found = of(report, "ten.d2t")
    assert "draft id 15 to target id 75" in found.message
    assert "64 tokens" in found.message
    assert (found.where, found.expected) == ("d2t[15]", "-15 to 48")


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63), -1])
def test_u02_extreme_offsets_do_not_wrap_around(offset: int, tmp_path: Path) -> None:
    tensors = {"d2t": encode_d2t([offset] + [0] * 15), "t2d": REMOVE}
    found = of(check(build_draft(tmp_path / "d", tensors=tensors)), "ten.d2t")
    assert f"draft id 0 to target id {offset}" in found.message


def test_two_draft_ids_for_one_target_id_fail(tmp_path: Path) -> None:
    tensors = {"d2t": encode_d2t([0, -1] + [0] * 14), "t2d": REMOVE}
    report = check(build_draft(tmp_path / "d", tensors=tensors))
    assert report.verdict == "fail"
    assert "draft ids 0 and 1 to the same target id 0" in of(report, "ten.d2t").message


# the output layer


def test_u08c_head_of_the_full_vocabulary_fails(tmp_path: Path) -> None:
    head = {"lm_head.weight": random_bf16(64, 16, seed=1)}
    report = check(build_draft(tmp_path / "d", tensors=head))
    assert report.verdict == "fail"
    found = of(report, "ten.shape")
    assert (found.found, found.expected) == ("[64, 16]", "[16, 16]")
    assert "draft_vocab_size 16" in found.message


def test_u09_without_head_dim_the_same_weights_fail(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", config={"head_dim": 8})
    (folder / "config.json").write_text(json.dumps(build_config(head_dim=REMOVE)))
    report = check(folder)
    assert report.verdict == "fail"
    messages = [item.message for item in report.findings if item.rule == "ten.shape"]
    assert any("rows 32, config implies 16" in text and "q_proj" in text for text in messages)
    assert not any("columns" in text and "q_proj" in text for text in messages)  # 2 x hidden: fine


# tapped layers of a 4-layer target

AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("stated", [2, 3, REMOVE])
def test_u11b_two_layers_for_three_inputs_fail(stated: Any, tmp_path: Path) -> None:
    config = {AUX: [1, 2], "num_aux_hidden_states": stated}
    report = check(build_draft(tmp_path / "d", config=config, weights_follow_config=False))
    assert report.verdict == "fail"
    assert "fc expects 3 x 16 inputs, got 2 ids" in of(report, "ten.shape").message


def test_u11_two_layers_need_num_aux_hidden_states(tmp_path: Path) -> None:
    config: dict[str, Any] = {AUX: [1, 2], "num_aux_hidden_states": REMOVE}
    report = check(build_draft(tmp_path / "a", config=config))
    assert report.verdict == "fail"
    assert "vLLM builds fc for 3" in of(report, "cfg.aux").message
    config["num_aux_hidden_states"] = 2
    assert check(build_draft(tmp_path / "b", config=config)).verdict == "pass"


def test_u11_ids_inside_eagle_config_count_by_themselves(tmp_path: Path) -> None:
    config = {AUX: REMOVE, "num_aux_hidden_states": REMOVE, "eagle_config": {AUX: [1, 2, 3]}}
    assert check(build_draft(tmp_path / "d", config=config)).verdict == "pass"


@pytest.mark.parametrize("ids", [[1, 1, 2], [3, 2, 1], [-1, 1, 2]])
def test_u11_repeated_unsorted_or_negative_layers_fail(ids: list[int], tmp_path: Path) -> None:
    report = check(build_draft(tmp_path / "d", config={AUX: ids}))
    assert report.verdict == "fail"


def test_u11e_no_record_warns_and_prints_the_default(tmp_path: Path) -> None:
    config = {AUX: REMOVE, "num_aux_hidden_states": REMOVE}
    target = build_target_facts(tmp_path, num_hidden_layers=30, layer_types=())
    report = check(build_draft(tmp_path / "d", config=config), target=target)
    assert report.verdict == "warn"
    assert "vLLM would take [2, 15, 27]" in of(report, "cfg.aux").message


def test_u11e_a_default_that_collides_fails(tmp_path: Path) -> None:
    """vLLM's default for 4 layers is 2, 2, 1: two layers for three inputs, a crash at step one."""
    config = {AUX: REMOVE, "num_aux_hidden_states": REMOVE}
    report = check(build_draft(tmp_path / "d", config=config))
    assert report.verdict == "fail"
    assert any("would tap [1, 2], but build fc for 3" in item.message for item in report.findings)


def test_u13_one_value_beyond_fp16_warns_only_when_deep(tmp_path: Path) -> None:
    values = np.full((16, 48), 0.25, dtype=np.float32)
    values[0, :] = np.linspace(-1, 1, 48)
    values[3, 4] = 70000.0
    raw = encode_bf16(values)
    folder = build_draft(tmp_path / "d", tensors={"fc.weight": ("BF16", (16, 48), raw)})
    report = check(folder, deep=True)
    assert report.verdict == "warn"
    found = of(report, "ten.fp16")
    assert "1 value exceeds the fp16 range 65504" in found.message
    assert found.where == "fc.weight"
    assert check(folder).verdict == "pass"


# positions, other targets, contests


def test_too_few_positions_name_the_limit(tmp_path: Path) -> None:
    report = check(build_draft(tmp_path / "d", config={"max_position_embeddings": 16387}))
    assert report.verdict == "warn"
    found = of(report, "cfg.pos")
    assert "fewer than 16,388 (context 16,384 + K 3 + 1)" in found.message
    assert "stops drafting once a sequence passes 16,384 tokens" in found.message
    enough = build_draft(tmp_path / "e", config={"max_position_embeddings": 16388})
    assert check(enough).verdict == "pass"


def test_a_short_target_is_named_as_the_limit(tmp_path: Path) -> None:
    target = build_target_facts(tmp_path, max_position_embeddings=8192)
    own = build_draft(tmp_path / "a", config={"max_position_embeddings": 8192})
    report = check(own, target=target)
    assert report.verdict == "warn"
    assert "the target itself ends at 8,192" in of(report, "cfg.pos").message
    assert "Nothing the draft could do" in of(report, "cfg.pos").fix
    short = build_draft(tmp_path / "b", config={"max_position_embeddings": 4096})
    short_report = check(short, target=target)
    assert short_report.verdict == "warn"
    assert "at least 8,192 positions" in of(short_report, "cfg.pos").fix


def test_a_draft_for_another_target_is_told_apart(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    wide = check(folder, target=build_target_facts(tmp_path, name="wide", hidden_size=32))
    assert wide.verdict == "fail"
    assert "16 wide, target 'wide' makes them 32 wide" in of(wide, "cfg.hidden").message
    tuned = check(folder, target=build_target_facts(tmp_path, tokenizer_sha256="9" * 64))
    assert tuned.verdict == "warn"
    assert "trained for another target" in of(tuned, "meta.target").message


def test_u04_padded_sizes_tell_both_facts(tmp_path: Path) -> None:
    report = check(build_draft(tmp_path / "d"), target=build_target_facts(tmp_path, vocab_size=72))
    message = of(report, "cfg.vocab").message
    assert report.verdict == "fail"
    assert "vocab_size is 64" in message
    assert "72 embedding rows (its tokenizer has 60 tokens" in message


def test_contest_limits(tmp_path: Path) -> None:
    limits = read_rules("emc2-2027").limits
    folder = build_draft(tmp_path / "d")
    assert check(folder, limits=limits).verdict == "pass"
    plain = tmp_path / "ngram"
    plain.mkdir()
    (plain / "spec.json").write_text('{"family": "ngram", "num_speculative_tokens": 3}')
    assert check(plain).verdict == "pass"
    report = check(plain, limits=limits)
    assert report.verdict == "fail"
    assert "family ngram is not allowed" in of(report, "cfg.family").message


def test_layers_0_is_another_spelling_of_midlayer(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    write_safetensors(folder / "model.safetensors", build_tensors(build_config(), "layers.0"))
    assert check(folder).verdict == "pass"
    both = {**build_tensors(build_config(), "layers.0"), **build_tensors(build_config())}
    write_safetensors(folder / "model.safetensors", both)
    assert check(folder).verdict == "fail"


def test_model_prefix_gets_its_own_hint(tmp_path: Path) -> None:
    tensors = {"fc.weight": REMOVE, "model.fc.weight": random_bf16(16, 48, seed=1)}
    report = check(build_draft(tmp_path / "d", tensors=tensors))
    assert "vLLM adds 'model.' itself" in of(report, "ten.extra").fix


def test_the_estimate_counts_padded_rows_and_16_bit_weights(tmp_path: Path) -> None:
    report = check(build_draft(tmp_path / "d"))
    matrices = 16 * 48 + 16 * 32 + 2 * 8 * 32 + 16 * 16 + 3 * 32 * 16 + 4 * 16
    weights = 2 * (matrices + 64 * 16) + 8 * 16  # 16 head rows are held as 64; d2t is int64
    cache = 2 * 2 * 2 * 4 * 16384  # key and value, 2 bytes, 2 heads of 4
    assert of(report, "mem.est").found == f"{weights + cache:,} bytes"


def test_a_whole_model_in_the_drafts_place_is_said_once(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "model")
    (folder / "spec.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    (found,) = check(folder).findings
    assert found.severity == "error"
    assert "not a draft folder" in found.message
    assert "--target" in found.fix
