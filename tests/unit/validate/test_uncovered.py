"""Forms that vLLM serves and no contract describes: said, not vouched for; a contest refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import build_draft, build_target_facts
from contract_cases import quantize
from envelopes import build_envelope

from paceline.draft import find_uncovered, read_draft
from paceline.errors import DraftError
from paceline.rules import read_rules
from paceline.validate import Report, validate_draft

EMC2 = read_rules("emc2-2027")
INT4 = quantize("int", 4, 8)


def asymmetric() -> dict[str, Any]:
    weights = {**INT4["config_groups"]["group_0"]["weights"], "symmetric": False}
    return {**INT4, "config_groups": {"0": {"targets": ["Linear"], "weights": weights}}}


def of(family: str, name: str) -> dict[str, Any]:
    return {"spec": {"family": family}, "config": {"architectures": [name]}}


FORMS: dict[str, dict[str, Any]] = {
    "a draft_model of architecture GemmaForCausalLM": of("draft_model", "GemmaForCausalLM"),
    "a mtp of architecture DeepseekV3ForCausalLM": of("mtp", "DeepseekV3ForCausalLM"),
    "a dflash of architecture DFlash2DraftModel": of("dflash", "DFlash2DraftModel"),
    "quantisation by awq": {"config": {"quantization_config": {"quant_method": "awq"}}},
    "asymmetric quantisation": {"config": {"quantization_config": asymmetric()}},
}


def severities(report: Report, rule: str) -> list[str]:
    return [item.severity for item in report.findings if item.rule == rule]


@pytest.mark.parametrize("form", FORMS)
def test_it_is_said_and_a_contest_refuses_it(form: str, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", **FORMS[form])
    target = build_target_facts(tmp_path)
    report = validate_draft(folder, target=target, deep=True)
    (told,) = [item for item in report.findings if item.rule == "cfg.contract"]
    assert form in told.message
    assert report.verdict == "warn"
    contest = validate_draft(folder, target=target, rules=EMC2)
    assert severities(contest, "cfg.contract") == ["error"]
    with pytest.raises(DraftError, match="no contract here"):
        read_draft(folder)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_envelopes(kind: str, tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d", speculators_model_type=kind)
    report = validate_draft(folder, target=build_target_facts(tmp_path))
    assert report.verdict == "warn"
    assert severities(report, "cfg.contract") == ["warning"]
    assert severities(report, "spec.missing") == []
    with pytest.raises(DraftError, match=f"type {kind}"):
        read_draft(folder)


def test_an_envelope_around_a_layer_that_is_quantised_another_way(tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d", layer={"quantization_config": {"quant_method": "gptq"}})
    report = validate_draft(folder, target=build_target_facts(tmp_path))
    assert severities(report, "cfg.contract") == ["warning"]
    assert report.verdict == "warn"
    with pytest.raises(DraftError, match="quantisation by gptq"):
        read_draft(folder)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "cfg.auto_map"),
        ({"transformer_layer_config": {"trust_remote_code": True}}, "cfg.auto_map"),
        (
            {"transformer_layer_config": {"quantization_config": {"ignore": ["re:(a+)+$"]}}},
            "q.regex",
        ),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "q.nokv"),
        ({"quantization_config": {"load_in_4bit": True}}, "q.online"),
    ],
)
def test_what_holds_of_any_config_still_holds(
    change: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    folder = build_envelope(tmp_path / "d", speculators_model_type="dspark", **change)
    report = validate_draft(folder)
    assert rule in {item.rule for item in report.findings if item.severity == "error"}


def test_files_and_headers_are_checked_as_ever(tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d", speculators_model_type="dspark")
    (folder / "run.py").write_text("")
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}x")
    found = {item.rule for item in validate_draft(folder).findings if item.severity == "error"}
    assert found >= {"fs.code", "st.cover"}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("eagle3", {"architectures": ["GemmaForCausalLM"]}),
        ("draft_model", {"architectures": ["Qwen3_5ForCausalLM"]}),
        ("draft_model", {"architectures": ["GemmaForCausalLM", "LlamaForCausalLM"]}),
        ("eagle3", {"quantization_config": {"quant_method": "bitsandbytes"}}),
        ("medusa", {"quantization_config": {"quant_method": "awq"}}),
        ("eagle3", {"quantization_config": {**asymmetric(), "sparsity_config": {"a": 1}}}),
        ("eagle3", {"quantization_config": INT4}),
        ("eagle3", {"speculators_model_type": "dspark", "model_type": "llama"}),
        (None, {"speculators_model_type": ["dspark"]}),
        (None, {"architectures": [["GemmaForCausalLM"]]}),
    ],
)
def test_what_vllm_stops_at_or_a_contract_describes(
    family: str | None, config: dict[str, Any]
) -> None:
    assert find_uncovered(family, config) is None


@pytest.mark.parametrize(
    ("names", "severity"),
    [
        (None, ["error"]),
        (["self_attn.q_proj", "mlp.gate_proj"], ["error"]),
        ([["qkv_proj"], ["gate_up_proj"]], []),
        (["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], []),
    ],
)
def test_layers_of_a_gptq_draft_go_by_vllms_names(
    names: Any, severity: list[str], tmp_path: Path
) -> None:
    """tests/flow/test_odd_drafts.py has vLLM's own loader stop at the one and load the other."""
    settings = {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": names}
    folder = build_draft(tmp_path / "d", config={"quantization_config": settings})
    assert severities(validate_draft(folder), "q.method") == severity
    whole = build_draft(
        tmp_path / "whole",
        spec={"family": "draft_model"},
        config={"quantization_config": settings, "architectures": ["LlamaForCausalLM"]},
    )
    assert severities(validate_draft(whole), "q.method") == []
