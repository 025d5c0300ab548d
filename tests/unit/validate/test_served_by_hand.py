"""Folders without spec.json, as vLLM serves them when family and K are given by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import (
    build_draft,
    build_shards,
    build_target_facts,
    random_bf16,
    write_safetensors,
)
from contract_cases import CASES, Case, build_tensors_of, write_folder
from envelopes import build_envelope

from paceline.draft import read_draft
from paceline.errors import DraftError
from paceline.rules import read_rules
from paceline.target import TargetFacts, read_target
from paceline.validate import Report, validate_draft

EMC2 = read_rules("emc2-2027")
# what lies in a folder of the Hub that people train in
CLUTTER: dict[str, tuple[str, bytes]] = {
    "tokenizer.json": ("fs.tokenizer", b"{}"),
    "merges.txt": ("fs.tokenizer", b"a b\n" * 300_000),
    "generation_config.json": ("fs.tokenizer", b"{}"),
    "training_args.bin": ("fs.pickle", b"PK\x03\x04"),
    "modeling_draft.py": ("fs.code", b"import torch"),
    "trainer_state.json": ("fs.allow", b"{}"),
    "quantize_config.json": ("fs.quantjson", b"{}"),
    ".cache": ("fs.flat", b""),
}


def build(case: Case, place: Path, **changes: Any) -> tuple[Path, TargetFacts]:
    folder, target = place / "d", place / "target"
    write_folder(case, folder, build_tensors_of(case))
    (folder / "spec.json").unlink()
    config = {**case.config, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    target.mkdir()
    (target / "config.json").write_text(json.dumps(case.target))
    return folder, read_target(target, require_weights=False)


def severities(report: Report, rule: str) -> list[str]:
    return [item.severity for item in report.findings if item.rule == rule]


def errors(report: Report) -> list[str]:
    return [f"{item.rule}: {item.message}" for item in report.findings if item.severity == "error"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_family_is_judged_as_with_its_spec(case: Case, tmp_path: Path) -> None:
    folder, target = build(case, tmp_path)
    given = {"family": case.family, "num_speculative_tokens": 3}
    report = validate_draft(folder, target=target, by_hand=given)
    assert errors(report) == []
    (note,) = [item for item in report.findings if item.rule == "spec.missing"]
    assert note.severity == "note"
    assert f"family {case.family}, K = 3" in note.message
    assert read_draft(folder, by_hand=given).family == case.family
    (folder / "spec.json").write_text(json.dumps(given))
    same = validate_draft(folder, target=target)
    rest = [item for item in report.findings if item.rule != "spec.missing"]
    assert [(item.rule, item.message) for item in rest] == [
        (item.rule, item.message) for item in same.findings
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_family_is_told_from_the_folder(case: Case, tmp_path: Path) -> None:
    folder, target = build(case, tmp_path)
    report = validate_draft(folder, target=target, by_hand={"num_speculative_tokens": 3})
    (found,) = [item for item in report.findings if item.rule == "spec.missing"]
    assert f"family {case.family}, K = 3" in found.message


def test_an_unknown_k_is_said(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "spec.json").unlink()
    report = validate_draft(
        folder, target=build_target_facts(tmp_path), by_hand={"family": "eagle3"}
    )
    assert errors(report) == [
        "spec.missing: this is a draft of family eagle3 and K is unknown: nothing in the folder"
        " says how many tokens to draft a step, and vLLM stops without num_speculative_tokens"
    ]
    assert [item.where for item in report.findings if item.severity == "error"] == ["--k"]


def test_k_of_an_mtp_head_is_its_number_of_layers(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == "mtp, Qwen3.5"]
    folder, target = build(case, tmp_path)
    report = validate_draft(folder, target=target, by_hand={"family": "mtp"})
    assert errors(report) == []
    assert "K = 1" in next(i.message for i in report.findings if i.rule == "spec.missing")


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen3_5ForConditionalGeneration"]}
        | {"text_config": {"mtp_num_hidden_layers": 1}},
        {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1},
        {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 2},
    ],
)
def test_heads_of_other_targets_by_both_spellings(config: dict[str, Any], tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", config=config, weights_follow_config=False)
    (folder / "spec.json").unlink()
    report = validate_draft(folder, by_hand={"family": "mtp"})
    assert (errors(report), severities(report, "cfg.contract")) == ([], ["warning"])
    layers = config.get("num_nextn_predict_layers", 1)
    assert any(f"family mtp, K = {layers}" in item.message for item in report.findings)


def test_an_unknown_family_is_said(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", config={"architectures": ["LlamaForCausalLM"]})
    (folder / "spec.json").unlink()
    (folder / "model.safetensors").unlink()
    report = validate_draft(folder, by_hand={"num_speculative_tokens": 3})
    found = [item for item in report.findings if item.rule == "spec.missing"]
    assert [(item.severity, item.where) for item in found] == [("error", "--family")]


def test_without_either_the_options_are_named(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "spec.json").unlink()
    (found,) = [i for i in validate_draft(folder).findings if i.rule == "spec.missing"]
    assert found.severity == "error"
    assert "--family and --k" in found.fix


@pytest.mark.parametrize(("k", "rule"), [(0, "k.range"), (65, "k.range"), (True, "k.range")])
def test_a_senseless_k_is_refused_without_a_file_to_blame(
    k: Any, rule: str, tmp_path: Path
) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "spec.json").unlink()
    by_hand = {"family": "eagle3", "num_speculative_tokens": k}
    report = validate_draft(folder, target=build_target_facts(tmp_path), by_hand=by_hand)
    found = [item for item in report.findings if item.severity == "error"]
    assert [(item.rule, item.file) for item in found] == [(rule, "")]


def test_beside_a_spec_it_is_refused(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    with pytest.raises(DraftError, match="which says family and K"):
        validate_draft(folder, by_hand={"family": "eagle3"})
    with pytest.raises(DraftError, match="which says family and K"):
        read_draft(folder, by_hand={"family": "eagle3"})


def test_a_whole_folder_of_the_hub_warns_and_a_contest_refuses_it(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == "draft_model, Llama"]
    folder, target = build(case, tmp_path)
    for name, (_, content) in CLUTTER.items():
        if content:
            (folder / name).write_bytes(content)
        else:
            (folder / name).mkdir()
    by_hand = {"family": "draft_model", "num_speculative_tokens": 3}
    report = validate_draft(folder, target=target, by_hand=by_hand, deep=True)
    assert errors(report) == []
    told = {(item.file, item.rule) for item in report.findings if item.severity == "warning"}
    assert told >= {(name, rule) for name, (rule, _) in CLUTTER.items()}
    contest = validate_draft(folder, rules=EMC2, by_hand=by_hand)
    refused = {(item.file, item.rule) for item in contest.findings if item.severity == "error"}
    assert refused >= {(name, rule) for name, (rule, _) in CLUTTER.items()}
    assert ("spec.json", "spec.missing") in refused


def test_what_vllm_does_open_is_as_strict_as_ever(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "spec.json").unlink()
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "extra.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    (folder / "notes.txt").symlink_to("/etc/hostname")
    report = validate_draft(folder, by_hand=by_hand)
    refused = {(item.file, item.rule) for item in report.findings if item.severity == "error"}
    assert refused >= {
        ("hf_quant_config.json", "fs.quantjson"),
        ("extra.safetensors", "fs.pickle"),
        ("notes.txt", "fs.type"),
    }


def test_a_second_name_of_a_file_only_warns(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / "spec.json").unlink()
    (tmp_path / "other").hardlink_to(folder / "model.safetensors")
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    assert severities(validate_draft(folder, by_hand=by_hand), "fs.type") == ["warning"]
    contest = validate_draft(folder, by_hand=by_hand, rules=EMC2)
    assert severities(contest, "fs.type") == ["error"]


def test_pickles_alone_are_refused(tmp_path: Path) -> None:
    """Without safetensors vLLM would unpickle them."""
    folder = build_draft(tmp_path / "d")
    (folder / "spec.json").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    assert severities(validate_draft(folder, by_hand=by_hand), "fs.pickle") == ["error"]


@pytest.mark.parametrize(("given", "verdict"), [({}, "warn"), ({"family": "dflash"}, "fail")])
def test_an_envelope_served_by_hand(given: dict[str, Any], verdict: str, tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d")
    by_hand = {**given, "num_speculative_tokens": 2}
    report = validate_draft(folder, target=build_target_facts(tmp_path), by_hand=by_hand)
    assert report.verdict == verdict, errors(report)
    assert "cfg.spec" in {item.rule for item in report.findings}, "it asks for another K"
    assert not any("spec.json names" in item.message for item in report.findings)


@pytest.mark.parametrize("method", ["eagle", "dspark"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_methods_of_vllm_that_are_no_family_here(
    method: str, by_hand: bool, tmp_path: Path
) -> None:
    folder = build_draft(tmp_path / "d", spec={"family": method})
    given = {"family": method, "num_speculative_tokens": 3}
    if by_hand:
        (folder / "spec.json").unlink()
    report = validate_draft(folder, by_hand=given if by_hand else None, deep=True)
    assert (report.verdict, severities(report, "cfg.contract")) == ("warn", ["warning"])
    with pytest.raises(DraftError, match=f"a draft of method {method}"):
        read_draft(folder, by_hand=given if by_hand else None)
    contest = validate_draft(folder, rules=EMC2, by_hand=given if by_hand else None)
    assert severities(contest, "cfg.contract") == ["error"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, "cfg.auto_map"),
        ({"auto_map": {"AutoConfig": "x.Config"}}, "cfg.auto_map"),
        ({"_name_or_path": "/root/outputs/draft"}, "cfg.auto_map"),
        ({"_attn_implementation": "flex_attention"}, "cfg.auto_map"),
        ({"attn_implementation": "sdpa"}, "cfg.auto_map"),
        ({"max_sequence_length": 1024}, "cfg.unknown"),
    ],
)
def test_keys_that_vllm_was_seen_to_pass_over_only_warn(
    change: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    """tests/flow/test_odd_drafts.py has vLLM's own loader build the same model with each."""
    folder = build_draft(tmp_path / "d", config=change)
    spec = folder / "spec.json"
    given = json.loads(spec.read_text())
    text = spec.read_bytes()
    spec.unlink()
    report = validate_draft(folder, target=build_target_facts(tmp_path), by_hand=given)
    assert (errors(report), severities(report, rule)) == ([], ["warning"])
    assert "error" in severities(validate_draft(folder, rules=EMC2, by_hand=given), rule)
    spec.write_bytes(text)
    expected = "warning" if "_name_or_path" in change else "error"
    assert severities(validate_draft(folder), rule) == [expected]


@pytest.mark.parametrize(
    "change",
    [
        {"trust_remote_code": True},
        {"_attn_implementation": "someone/kernel"},
        {"_attn_implementation_internal": "sdpa"},
        {"rope_parameters": {"rope_type": "default", "auto_map": {"AutoModel": "x.Y"}}},
        {"kernels": True},
    ],
)
def test_other_keys_that_load_code_are_refused_by_hand_too(
    change: dict[str, Any], tmp_path: Path
) -> None:
    folder = build_draft(tmp_path / "d", config=change, weights_follow_config=False)
    (folder / "spec.json").unlink()
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    assert "error" in severities(validate_draft(folder, by_hand=by_hand), "cfg.auto_map")


def test_an_early_end_is_refused_beside_a_hybrid(tmp_path: Path) -> None:
    """There vLLM reads a stale state once it drafts no more."""
    folder = build_draft(tmp_path / "d", config={"max_seq_len": 512})
    (folder / "spec.json").unlink()
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    kinds = ("linear_attention", "full_attention") * 2
    target = build_target_facts(tmp_path, layer_types=kinds)
    assert severities(validate_draft(folder, target=target, by_hand=by_hand), "cfg.unknown") == [
        "error"
    ]


@pytest.mark.parametrize("value", [[], {}, "1024", 0, True, 1.5])
def test_what_is_no_length_is_refused(value: Any, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", config={"max_seq_len": value})
    (folder / "spec.json").unlink()
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    report = validate_draft(folder, target=build_target_facts(tmp_path), by_hand=by_hand)
    assert severities(report, "cfg.unknown") == ["error"]


def test_metadata_of_another_writer_only_warns(tmp_path: Path) -> None:
    """vLLM reads the tensors and no metadata."""
    folder = build_draft(tmp_path / "d")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'{"format": "pt"}', b'{"format":"mlx"}'))
    assert severities(validate_draft(folder), "st.meta") == ["error"]
    (folder / "spec.json").unlink()
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    assert severities(validate_draft(folder, by_hand=by_hand), "st.meta") == ["warning"]


def test_shards_of_any_name_without_an_index_are_loaded(tmp_path: Path) -> None:
    folder = build_shards(tmp_path / "d")
    (folder / "spec.json").unlink()
    (folder / "model.safetensors.index.json").unlink()
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        path.rename(folder / f"part{number}.safetensors")
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    target = build_target_facts(tmp_path)
    report = validate_draft(folder, target=target, by_hand=by_hand, deep=True)
    assert errors(report) == []
    assert severities(report, "fs.allow") == ["warning"] * 2
    assert severities(report, "idx.complete") == ["warning"]
    refused = {i.rule for i in validate_draft(folder, by_hand=by_hand, rules=EMC2).findings
               if i.severity == "error"}  # fmt: skip
    assert refused >= {"fs.allow", "idx.complete"}


def test_half_of_the_shards_is_refused_by_hand_too(tmp_path: Path) -> None:
    folder = build_shards(tmp_path / "d")
    (folder / "spec.json").unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    by_hand = {"family": "eagle3", "num_speculative_tokens": 3}
    report = validate_draft(folder, target=build_target_facts(tmp_path), by_hand=by_hand)
    assert severities(report, "idx.naming") == ["error"]
    assert "error" in severities(report, "ten.missing")


def build_model_with_head(place: Path, *, without: str = "") -> tuple[Path, TargetFacts]:
    """A whole target as the draft: layers of its own beside the head, more than a rule tells."""
    (case,) = [case for case in CASES if case.name == "mtp, Qwen3.5"]
    folder, target = build(case, place)
    tensors = build_tensors_of(case)
    tensors |= {
        f"model.layers.{layer}.{name}.weight": random_bf16(4, 4, seed=layer)
        for layer in range(40)
        for name in ("mlp.up_proj", "mlp.down_proj")
    }
    tensors.pop(without, None)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder, target


def test_a_target_named_for_its_head(tmp_path: Path) -> None:
    folder, target = build_model_with_head(tmp_path)
    report = validate_draft(folder, target=target, by_hand={"family": "mtp"})
    assert errors(report) == []
    told = [item.message for item in report.findings if item.rule == "ten.unread"]
    assert told == ["80 tensors beside the head have no effect: vLLM 0.31.0 skips them"]
    contest = validate_draft(folder, target=target, by_hand={"family": "mtp"}, rules=EMC2)
    assert "error" in severities(contest, "ten.extra")


def test_what_the_head_lacks_is_not_lost_among_them(tmp_path: Path) -> None:
    folder, target = build_model_with_head(tmp_path, without="mtp.fc.weight")
    report = validate_draft(folder, target=target, by_hand={"family": "mtp"})
    assert severities(report, "ten.missing") == ["error"]
