"""Every user case that a folder can express: its verdict, and a message an author can act on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from builders import build_target_facts, random_bf16, write_safetensors
from case_folders import UserCase
from contract_cases import CASES, Case, build_tensors_of, write_folder
from odd_drafts import ODD_DRAFTS
from user_cases import USER_CASES

from paceline.draft import read_draft
from paceline.rules import read_rules
from paceline.target import TargetFacts, read_target
from paceline.validate import validate_draft

EMC2 = read_rules("emc2-2027")


def make_target(place: Path, changes: dict[str, Any], embeddings: int | None) -> TargetFacts:
    place.mkdir()
    if "from_config" in changes:
        (place / "config.json").write_text(json.dumps(changes["from_config"]))
        if "tensors" in changes:
            write_safetensors(place / "model.safetensors", changes["tensors"])
        facts = read_target(place, require_weights=False)
        return dataclasses.replace(facts, tokenizer_sha256="a" * 64)
    if embeddings is not None:
        own = {"model.embed_tokens.weight": random_bf16(64, 16, seed=embeddings)}
        write_safetensors(place / "model.safetensors", own)
    return build_target_facts(place, **changes)


@pytest.mark.parametrize("case", USER_CASES, ids=lambda case: case.case)
def test_user_case(case: UserCase, tmp_path: Path) -> None:
    limits = None
    if case.context_tokens is not None:
        limits = dataclasses.replace(EMC2.limits, context_tokens=case.context_tokens)
    report = validate_draft(
        case.make(tmp_path / "d"),
        target=make_target(tmp_path / "target", dict(case.target), case.embeddings),
        limits=limits,
        deep=case.deep,
    )
    told = [f"{item.severity} {item.rule}: {item.message}" for item in report.findings]
    assert report.verdict == case.verdict, told
    if not case.rule:
        return
    found = [item for item in report.findings if item.rule == case.rule]
    texts = [f"{item.where} {item.message} {item.expected} {item.fix}" for item in found]
    assert any(all(word in text for word in case.words) for text in texts), texts or told
    for item in found:
        assert item.fix, item
        assert item.expected or item.severity == "note", item


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_folder_that_vllm_loads_is_not_refused(case: Case, tmp_path: Path) -> None:
    """The same folders that tests/flow/test_draft_contract.py has vLLM's own loader read."""
    folder = tmp_path / "d"
    write_folder(case, folder, build_tensors_of(case))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(case.target))
    target = read_target(tmp_path / "target", require_weights=False)
    report = validate_draft(folder, target=target)
    assert [item for item in report.findings if item.severity == "error"] == []


@pytest.mark.parametrize("name", ODD_DRAFTS)
def test_an_odd_draft_is_not_refused(name: str, tmp_path: Path) -> None:
    make, verdict = ODD_DRAFTS[name]
    report = validate_draft(make(tmp_path / "d"), target=build_target_facts(tmp_path), deep=True)
    assert report.verdict == verdict, [f for f in report.findings if f.severity != "note"]
    if not any(item.rule == "cfg.contract" for item in report.findings):
        read_draft(tmp_path / "d")
