"""Folders of medusa, draft_model and dflash: sound ones pass, one thing wrong at a time is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import build_target_facts
from contract_cases import CASES, Case, build_tensors_of, write_folder

from paceline.draft import read_draft
from paceline.rules import read_rules
from paceline.target import TargetFacts
from paceline.validate import validate_draft

EMC2 = read_rules("emc2-2027")
BY_NAME = {case.name: case for case in CASES}


def target_of(tmp_path: Path, **changes: Any) -> TargetFacts:
    sizes = {
        "hidden_size": 64,
        "vocab_size": 256,
        "num_tokenizer_tokens": 250,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "eos_token_ids": (2,),
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    return build_target_facts(tmp_path / "target", **{**sizes, **changes})


def changed(case: Case, folder: Path, **changes: Any) -> Path:
    write_folder(case, folder, build_tensors_of(case))
    config = {**case.config, **changes}
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def told(folder: Path, target: TargetFacts | None, **more: Any) -> dict[str, str]:
    """Rule -> its worst severity, notes left out."""
    found = validate_draft(folder, target=target, **more).findings  # the worst come first
    return {f.rule: f.severity for f in reversed(found) if f.severity != "note"}


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.family in ("medusa", "draft_model", "dflash")],
    ids=lambda c: c.name,
)
def test_sound_folders_pass(case: Case, tmp_path: Path) -> None:
    folder = changed(case, tmp_path / "d")
    found = told(folder, target_of(tmp_path))
    assert {rule for rule, severity in found.items() if severity == "error"} == set()


@pytest.mark.parametrize(
    ("name", "change", "rule", "severity"),
    [
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "cfg.mask", "error"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 256, "target_layer_ids": [0, 1, 2]}},
            "cfg.mask",
            "error",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1, 2]}},
            "cfg.mask",
            "warning",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 255, "target_layer_ids": [2, 1, 0]}},
            "cfg.aux",
            "error",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 1, 4]}},
            "cfg.aux",
            "error",
        ),
        ("dflash", {"dflash_config": {"mask_token_id": 255}}, "cfg.aux", "error"),
        ("dflash", {"block_size": 3}, "k.range", "warning"),  # K is 3, a block of 3 drafts 2
        ("dflash", {"max_position_embeddings": 10**9}, "cfg.pos", "error"),
        ("dflash", {"max_position_embeddings": 4096}, "cfg.pos", "warning"),
        ("dflash", {"rope_parameters": {"rope_type": "default"}}, "cfg.rope", "warning"),
        ("dflash", {"rope_parameters": {"rope_type": "yarn"}}, "cfg.rope", "error"),
        ("dflash", {"rms_norm_eps": ...}, "cfg.default", "warning"),
        ("dflash", {"auto_map": {"AutoModel": "x.Y"}}, "cfg.auto_map", "error"),
        ("draft_model, Llama", {"rope_parameters": ...}, "cfg.rope", "warning"),
        ("draft_model, Llama", {"max_position_embeddings": 10**9}, "cfg.pos", "error"),
        ("draft_model, Llama", {"vocab_size": ...}, "cfg.missing", "error"),
        ("draft_model, Llama", {"architectures": ["MambaForCausalLM"]}, "cfg.arch", "error"),
        ("draft_model, Llama", {"hidden_act": "gelu"}, "cfg.act", "error"),
        ("draft_model, Qwen2", {"head_dim": 16}, "cfg.unread", "warning"),
        ("medusa, one output layer", {"num_attention_heads": 4}, "cfg.unknown", "error"),
        ("medusa, one output layer", {"truncated_vocab_size": 100}, "cfg.missing", "error"),
    ],
)
def test_one_thing_wrong(
    name: str, change: dict[str, Any], rule: str, severity: str, tmp_path: Path
) -> None:
    folder = changed(BY_NAME[name], tmp_path / "d", **change)
    assert told(folder, target_of(tmp_path)).get(rule) == severity


def test_padded_vocabularies_of_one_tokenizer(tmp_path: Path) -> None:
    """U04: both facts are said, and the ways out; editing the number is not one of them."""
    folder = changed(BY_NAME["draft_model, Llama"], tmp_path / "d")
    report = validate_draft(folder, target=target_of(tmp_path, vocab_size=272))
    finding = next(f for f in report.findings if f.rule == "cfg.vocab")
    assert finding.severity == "error"
    assert "250 tokens, the rest is padding" in finding.message
    assert "Pad or cut the draft's embeddings" in finding.fix
    assert "Editing the number alone breaks" in finding.fix


def test_another_width(tmp_path: Path) -> None:
    target = target_of(tmp_path, hidden_size=128)
    for name, is_told in (("dflash", True), ("draft_model, Llama", False)):
        folder = changed(BY_NAME[name], tmp_path / name[:5])
        assert ("cfg.hidden" in told(folder, target)) == is_told


def test_dflash_is_not_of_the_contest(tmp_path: Path) -> None:
    folder = changed(BY_NAME["dflash"], tmp_path / "d")
    assert told(folder, target_of(tmp_path), rules=EMC2)["cfg.family"] == "error"


def test_equal_scales_of_quantised_layers_are_no_mistake(tmp_path: Path) -> None:
    case = BY_NAME["dflash, FP8"]
    write_folder(case, tmp_path / "d", build_tensors_of(case))  # every scale is 1
    found = validate_draft(tmp_path / "d", deep=True).findings
    about = {f.rule for f in found if "weight_scale" in f.message}
    assert about == set()


def test_deep_reads_every_family(tmp_path: Path) -> None:
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        write_folder(case, folder, build_tensors_of(case))
        found = validate_draft(folder, deep=True).findings
        rules = {f.rule for f in found if f.severity == "error" and f.rule.startswith("ten.")}
        assert rules == set(), (case.name, rules)


def test_a_medusa_folder_that_does_not_count_its_heads(tmp_path: Path) -> None:
    """vLLM builds K heads whatever the config says, so those in the files are meant."""
    (case,) = [case for case in CASES if case.name == "medusa, one output layer"]
    config = {key: value for key, value in case.config.items() if key != "num_heads"}
    folder = tmp_path / "d"
    write_folder(case, folder, build_tensors_of(case))
    (folder / "config.json").write_text(json.dumps(config))
    for k, rules in ((3, set()), (2, set()), (4, {"cfg.medusa"})):
        spec = {"family": "medusa", "num_speculative_tokens": k}
        (folder / "spec.json").write_text(json.dumps(spec))
        found = validate_draft(folder).findings
        assert {item.rule for item in found if item.severity == "error"} == rules
    assert read_draft(folder).config["num_heads"] == 3


OF_EVERY_LAYER: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"dtype": "torch.bfloat16"}, "cfg.dtype", "error"),
    ({"dtype": "banana"}, "cfg.dtype", "error"),
    ({"dtype": "float32"}, "cfg.dtype", "warning"),
    ({"rms_norm_eps": 1.5}, "cfg.eps", "error"),
    ({"dtype": "float8_e4m3fn"}, "cfg.dtype", "warning"),
    ({"rms_norm_eps": -1.0}, "cfg.eps", "error"),
    ({"layer_types": ["full_attention"] * 9}, "cfg.layers", "error"),
    ({"layer_types": ["linear_attention"] * 2}, "cfg.layers", "error"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "cfg.layers", "error"),
    # what transformers' config classes stop at, of keys that mean nothing to a draft
    ({"id2label": {"a": 1}}, "json.type", "error"),
    ({"problem_type": "x"}, "cfg.value", "error"),
    ({"is_encoder_decoder": None}, "json.type", "error"),
    ({"chunk_size_feed_forward": None}, "json.type", "error"),
    ({"attention_dropout": None}, "json.type", "error"),
)


@pytest.mark.parametrize("name", ["dflash", "draft_model, Llama", "draft_model, Qwen2"])
@pytest.mark.parametrize(("change", "rule", "severity"), OF_EVERY_LAYER)
def test_what_holds_for_every_layer_holds_for_every_family(
    name: str, change: dict[str, Any], rule: str, severity: str, tmp_path: Path
) -> None:
    """Once told for EAGLE-3 alone, whose rules are older than the table."""
    folder = changed(BY_NAME[name], tmp_path / "d", **change)
    found = {(i.rule, i.severity) for i in validate_draft(folder).findings}
    assert (rule, severity) in found


def test_a_logit_scale_that_makes_nothing_or_the_opposite(tmp_path: Path) -> None:
    for name in ("dflash", "draft_model, Llama", "medusa, one output layer"):
        for number, scale in enumerate((0, -1.0, 1e9)):
            folder = changed(BY_NAME[name], tmp_path / f"{name}-{number}", logit_scale=scale)
            assert any(
                (i.rule, i.severity) == ("cfg.value", "error")
                for i in validate_draft(folder).findings
            )


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({"layer_types": ["sliding_attention"]}, True),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, True),
        ({"layer_types": ["sliding_attention"], "use_sliding_window": True}, True),
        (
            {
                "layer_types": ["sliding_attention"],
                "use_sliding_window": True,
                "sliding_window": 64,
            },
            False,
        ),
        ({"use_swa": True}, True),
        ({"use_swa": True, "swa_window_size": 64}, False),
    ],
)
def test_a_window_of_dflash(change: dict[str, Any], is_refused: bool, tmp_path: Path) -> None:
    """As vLLM's own loader answers: it stops where no window is found."""
    case = BY_NAME["dflash"]
    inner = {key: change.pop(key) for key in list(change) if "swa" in key}
    own = {**case.config["dflash_config"], **inner}
    folder = changed(case, tmp_path / "d", dflash_config=own, **change)
    found = {(i.rule, i.severity) for i in validate_draft(folder).findings}
    assert (("cfg.layers", "error") in found) == is_refused


def test_tapping_nothing_by_null(tmp_path: Path) -> None:
    """null is false to vLLM: it would build a draft that never sees the target."""
    case = BY_NAME["eagle3, Llama layer, cut vocabulary"]
    folder = changed(case, tmp_path / "d", eagle_config={"use_aux_hidden_state": None})
    assert any(
        i.severity == "error" and "use_aux_hidden_state" in i.where
        for i in validate_draft(folder).findings
    )
