"""Folders in the speculators format: read as vLLM reads them, refused where it reads otherwise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from builders import REMOVE, build_draft, build_target_facts
from envelopes import build_envelope

from paceline.draft import read_draft
from paceline.errors import DraftError
from paceline.rules import read_rules
from paceline.validate import Report, validate_draft

SETTINGS: dict[str, Any] = {
    "algorithm": "eagle3",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    "verifier": {"name_or_path": "org/toy"},
}


def check(folder: Path, **more: Any) -> Report:
    return validate_draft(folder, target=build_target_facts(folder.parent), deep=True, **more)


def loud(report: Report) -> list[tuple[str, str, str]]:
    return [(i.severity, i.rule, i.where) for i in report.findings if i.severity != "note"]


def test_a_folder_as_speculators_saves_it_is_served_as_it_is(tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d")
    assert loud(check(folder)) == [
        ("warning", "fs.missing", ""),  # no metadata.json: a contest's wish
        ("warning", "cfg.auto_map", "auto_map"),
    ]
    draft = read_draft(folder)
    plain = read_draft(build_draft(tmp_path / "plain"))
    assert (draft.family, draft.num_speculative_tokens) == ("eagle3", 3)
    assert set(draft.tensors) == set(plain.tensors)
    assert draft.config["norm_before_residual"] is False
    assert draft.config["architectures"] == ["Eagle3LlamaForCausalLM"]


def test_the_default_of_the_residual_is_the_envelopes(tmp_path: Path) -> None:
    draft = read_draft(build_envelope(tmp_path / "d", norm_before_residual=REMOVE))
    assert draft.config["norm_before_residual"] is True


def test_a_contest_asks_for_spec_json_and_its_own_target(tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d")
    (folder / "metadata.json").write_text('{"name": "d"}')
    found = check(folder, rules=read_rules("emc2-2027"))
    errors = {item.rule: item for item in found.findings if item.severity == "error"}
    assert {"spec.missing", "cfg.spec"} <= set(errors)
    assert "contest emc2-2027" in errors["cfg.spec"].message
    assert "org/toy" in errors["cfg.spec"].message


def test_with_spec_json_the_two_must_agree(tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d")
    spec = folder / "spec.json"
    spec.write_text('{"family": "eagle3", "num_speculative_tokens": 5}')
    (found,) = [i for i in check(folder).findings if i.rule == "cfg.spec"]
    assert (found.severity, found.found, found.expected) == ("warning", "3", "5")
    assert read_draft(folder).num_speculative_tokens == 5
    spec.write_text('{"family": "dflash", "num_speculative_tokens": 3}')
    assert any(
        (i.rule, i.severity) == ("cfg.spec", "error") and "names family dflash" in i.message
        for i in check(folder).findings
    )
    with pytest.raises(DraftError):
        read_draft(folder)


@pytest.mark.parametrize("verifier", ["/models/x/TOY/", "org/toy@0123", "toy"])
def test_the_target_by_another_spelling(verifier: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "verifier": {"name_or_path": verifier}}
    report = check(build_envelope(tmp_path / "d", speculators_config=settings))
    assert not [i for i in report.findings if i.rule == "cfg.spec"]


def test_another_target_only_warns_without_a_contest(tmp_path: Path) -> None:
    settings = {**SETTINGS, "verifier": {"name_or_path": "org/other"}}
    folder = build_envelope(tmp_path / "d", speculators_config=settings)
    (found,) = [i for i in check(folder).findings if i.rule == "cfg.spec"]
    assert (found.severity, found.found) == ("warning", "org/other")
    read_draft(folder)


# What vLLM 0.31.0 stops at, or reads otherwise than it says; each was tried with it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"speculators_model_type": REMOVE}, "speculators_model_type"),
    "unknown kind": ({"speculators_model_type": "hydra"}, "speculators_model_type"),
    "no layer": ({"transformer_layer_config": REMOVE}, "transformer_layer_config"),
    "layer of a strange kind": (
        {"layer": {"model_type": "gemma2"}},
        "transformer_layer_config.model_type",
    ),
    "no epsilon": ({"layer": {"rms_norm_eps": REMOVE}}, "transformer_layer_config.rms_norm_eps"),
    "no activation": ({"layer": {"hidden_act": REMOVE}}, "transformer_layer_config.hidden_act"),
    "heads null": (
        {"layer": {"num_key_value_heads": None}},
        "transformer_layer_config.num_key_value_heads",
    ),
    "two rotary settings": (
        {"layer": {"rope_scaling": None}},
        "transformer_layer_config.rope_scaling",
    ),
    "parallel without a mask": ({"kind": "peagle"}, "mask_token_id"),
    "dflash without layers": (
        {"kind": "dflash", "mask_token_id": 63},
        "aux_hidden_state_layer_ids",
    ),
    "two algorithms": (
        {"speculators_config": {**SETTINGS, "algorithm": "dflash"}},
        "speculators_config.algorithm",
    ),
    "a tree": (
        {
            "speculators_config": {
                **SETTINGS,
                "proposal_methods": [{"proposal_type": "tree", "speculative_tokens": 3}],
            }
        },
        "speculators_config.proposal_methods[0].proposal_type",
    ),
    "quantized beside the layer": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_envelope_cannot_say(name: str, tmp_path: Path) -> None:
    changes, where = REFUSED[name]
    folder = build_envelope(tmp_path / "d", **changes)
    found = {i.where: i for i in check(folder).findings if i.rule == "cfg.spec"}
    assert found[where].severity == "error"
    assert found[where].fix
    with pytest.raises(DraftError):
        read_draft(folder)


def test_findings_point_into_the_file(tmp_path: Path) -> None:
    report = check(build_envelope(tmp_path / "d", layer={"hidden_act": "gelu"}))
    (found,) = [i for i in report.findings if i.rule == "cfg.act"]
    assert found.where == "transformer_layer_config.hidden_act"
    report = check(build_envelope(tmp_path / "e", eagle_aux_hidden_state_layer_ids=[3, 2, 1]))
    assert {i.where for i in report.findings if i.rule == "cfg.aux"} == {
        "eagle_aux_hidden_state_layer_ids"
    }


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoModel": "eagle3.Eagle3SpeculatorConfig"},
        {"": "org/repo--eagle3.Eagle3SpeculatorConfig"},
        {"": "../x.Config"},
        {"": ["a.Config"]},
        "a.Config",
        {},
    ],
)
def test_any_other_auto_map_is_refused(auto_map: Any, tmp_path: Path) -> None:
    report = check(build_envelope(tmp_path / "d", auto_map=auto_map))
    assert ("error", "cfg.auto_map", "auto_map") in loud(report)


def test_code_keys_are_found_outside_the_layer_too(tmp_path: Path) -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"trust_remote_code": True},
        {"layer": {"auto_map": {"AutoModel": "x.Y"}}},
        {"speculators_config": {**SETTINGS, "kernels": "x"}},
    )
    for number, changes in enumerate(cases):
        report = check(build_envelope(tmp_path / str(number), **changes))
        assert any(i.rule == "cfg.auto_map" and i.severity == "error" for i in report.findings)


def test_a_plain_config_with_the_settings_of_an_envelope_is_plain(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", config={"speculators_config": SETTINGS})
    found = [i for i in check(folder).findings if i.rule == "cfg.spec"]
    assert [item.severity for item in found] == ["warning"]
    assert "verifier org/toy" in found[0].message


@pytest.mark.parametrize("value", [None, [], 7, "x", {"verifier": 3, "proposal_methods": {}}])
def test_settings_of_any_kind_end_in_a_verdict(value: Any, tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d", speculators_config=value)
    report = check(folder)
    json.dumps(report.to_json_dict())
    if not any(item.severity == "error" for item in report.findings):
        read_draft(folder)


def test_the_reader_and_validate_agree_on_the_limits_of_a_contest(tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d")
    limits = dataclasses.replace(read_rules("emc2-2027").limits, families=("mtp",))
    report = validate_draft(folder, limits=limits)
    assert any(i.rule == "cfg.family" and i.severity == "error" for i in report.findings)


def test_the_rotary_setting_of_older_exporters(tmp_path: Path) -> None:
    """rope_theta and rope_scaling null, as transformers 4 saved them: read as they are meant."""
    layer = {"rope_parameters": REMOVE, "rope_theta": 10000.0, "rope_scaling": None}
    assert not any(
        i.severity == "error" for i in check(build_envelope(tmp_path / "d", layer=layer)).findings
    )


def test_an_envelope_without_k_is_told_once(tmp_path: Path) -> None:
    """No family can be told then; nothing about masked slots, which it never spoke of."""
    settings = {**SETTINGS, "proposal_methods": [{"proposal_type": "greedy"}]}
    folder = build_envelope(tmp_path / "d", speculators_config=settings)
    rules = {i.rule for i in check(folder).findings if i.severity == "error"}
    assert rules == {"spec.missing"}


@pytest.mark.parametrize("settings", [None, {}, {"verifier": {"name_or_path": "org/toy"}}])
def test_settings_of_an_envelope_in_a_plain_config(
    settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Two doors, one table: what validate only warns of, the reader reads."""
    folder = build_draft(tmp_path / "d", config={"speculators_config": settings})
    report = validate_draft(folder, target=build_target_facts(tmp_path))
    assert {item.rule for item in report.findings if item.severity != "note"} == {"cfg.spec"}
    assert report.verdict == "warn"
    assert read_draft(folder).family == "eagle3"
