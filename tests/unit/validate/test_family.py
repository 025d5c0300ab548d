"""Which family a folder really holds, what only one family has, and names of files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from builders import build_config, build_draft, build_target_facts, build_tensors
from contract_cases import CASES, build_tensors_of, write_folder

from paceline.draft import infer_family
from paceline.methods import MAX_NUM_SPECULATIVE_TOKENS
from paceline.rules import read_rules
from paceline.target import TargetFacts, read_target
from paceline.validate import validate_draft

CASE = {case.name: case for case in CASES}
MTP = CASE["mtp, Qwen3.5"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensor_names_tell_the_family_or_nothing(case: Any) -> None:
    inferred = infer_family(build_tensors_of(case))
    assert inferred is None or inferred[0] == case.family


def test_names_that_say_nothing() -> None:
    assert infer_family([]) is None
    assert infer_family(["fc.weight", "norm.weight", "x"]) is None
    both = infer_family(build_tensors(build_config(), "layers.0"))
    assert both is not None
    assert both[0] == "eagle3"


@pytest.mark.parametrize("declared", ["mtp", "medusa", "draft_model", "dflash"])
def test_a_wrong_word_in_spec_is_said_as_that(declared: str, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d", spec={"family": declared})
    report = validate_draft(folder, target=build_target_facts(tmp_path))
    found = [item for item in report.findings if item.rule == "cfg.family"]
    assert [(item.found, item.expected) for item in found] == [(declared, "eagle3")]
    assert f"family is {declared}, but the tensors are those of eagle3" in found[0].message


@pytest.mark.parametrize(
    ("k", "layers", "severity"),
    [
        (1, 2, None),
        (2, 2, None),
        (3, 2, "error"),
        (4, 2, "warning"),
        (7, 1, None),
        (6, 3, "warning"),
    ],
)
def test_k_and_mtp_layers(k: int, layers: int, severity: str | None, tmp_path: Path) -> None:
    folder = build_draft(
        tmp_path / "d",
        spec={"family": "mtp", "num_speculative_tokens": k},
        config={"mtp_num_hidden_layers": layers},
    )
    found = [f.severity for f in validate_draft(folder).findings if f.rule == "cfg.mtp_div"]
    assert found == ([severity] if severity else [])


def test_two_keys_for_one_number_of_medusa(tmp_path: Path) -> None:
    case = CASE["medusa, one output layer"]
    folder = tmp_path / "d"
    write_folder(case, folder, build_tensors_of(case))
    config = {**case.config, "medusa_num_heads": 5, "num_extra_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    found = [item.message for item in validate_draft(folder).findings if item.rule == "cfg.medusa"]
    assert len(found) == 2
    assert "num_heads, medusa_num_heads" in found[0]
    assert "num_hidden_layers, num_extra_layers" in found[1]


@pytest.mark.parametrize("k", [MAX_NUM_SPECULATIVE_TOKENS, MAX_NUM_SPECULATIVE_TOKENS + 1])
def test_what_is_checked_is_what_is_served(k: int, tmp_path: Path) -> None:
    """A K that passes here is one that a plan takes; and the other way round."""
    from paceline.draft import read_draft
    from paceline.errors import DraftError, PlanError
    from paceline.serve import build_plan, check_plan

    folder = build_draft(tmp_path / "d", spec={"num_speculative_tokens": k})
    target = build_target_facts(tmp_path)
    report = validate_draft(folder, target=target)
    refused = any(f.rule == "k.range" and f.severity == "error" for f in report.findings)
    assert refused == (k > MAX_NUM_SPECULATIVE_TOKENS)
    sound = read_draft(build_draft(tmp_path / "e"))
    try:
        check_plan(build_plan(target, sound, num_speculative_tokens=k, device="cpu"))
        planned = True
    except (PlanError, DraftError) as error:
        planned = "out of range" not in str(error)
    except ImportError:
        planned = True  # no engine here: every setting was accepted before it was looked for
    assert planned == (not refused)


def of_target(tmp_path: Path, quantization: dict[str, Any] | None) -> TargetFacts:
    place = tmp_path / "target"
    place.mkdir()
    nested = {"text_config": {**MTP.target}, "architectures": ["Qwen3_5ForConditionalGeneration"]}
    if quantization is not None:
        nested["quantization_config"] = quantization
    (place / "config.json").write_text(json.dumps({**MTP.target, **nested}))
    return read_target(place, require_weights=False)


@pytest.mark.parametrize(
    ("quantization", "severity"),
    [
        (None, None),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mtp.*": {}}}, None),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mtp\\.layers.*": {}}}, "error"),
        ({"quant_method": "gptq", "bits": 4}, "error"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}, None),
        ({"quant_method": "fp8", "modules_to_not_convert": ["visual"]}, "error"),
        ({"quant_method": "modelopt_fp4", "exclude_modules": ["mtp.layers"]}, None),
        ({"quant_method": "compressed-tensors", "ignore": ["mtp"]}, "error"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:mtp.*"]}, None),
        ({"quant_method": "compressed-tensors", "ignore": ["re:(mtp|x).*"]}, "warning"),
    ],
)
def test_a_plain_head_in_a_quantized_target(
    quantization: dict[str, Any] | None, severity: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    write_folder(MTP, folder, build_tensors_of(MTP))
    report = validate_draft(folder, target=of_target(tmp_path, quantization))
    found = [item.severity for item in report.findings if item.rule == "q.target"]
    assert found == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cafe\u0301.md", "not in the composed Unicode form"),
        ("caf\u00e9.md", "a file name that is not allowed"),
        (".env", "a hidden file"),
        ("x" * 140 + ".md", "a name of 143 characters"),
        ("a b.md", "a file name that is not allowed"),
    ],
)
def test_names_of_files(name: str, words: str, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / name).write_text("x")
    (found,) = [item for item in validate_draft(folder).findings if item.rule == "fs.flat"]
    assert words in found.message


def test_two_spellings_of_one_name_collide(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    for name in ("cafe\u0301.md", "caf\u00e9.md"):
        (folder / name).write_text("x")
    messages = [item.message for item in validate_draft(folder).findings if item.rule == "fs.flat"]
    assert any("only in the Unicode form of its letters" in message for message in messages)


def test_the_contests_target_is_known_by_its_last_name(tmp_path: Path) -> None:
    folder, emc2 = build_draft(tmp_path / "d"), read_rules("emc2-2027")
    for name, told in (("Qwen3.8-27B", 0), ("Qwen/qwen3.8-27b@" + "a" * 40, 0), ("toy", 1)):
        target = dataclasses.replace(build_target_facts(tmp_path), name=name)
        report = validate_draft(folder, target=target, rules=emc2)
        assert sum(item.rule == "rules.target" for item in report.findings) == told
    assert not any(f.rule == "rules.target" for f in validate_draft(folder, rules=emc2).findings)
