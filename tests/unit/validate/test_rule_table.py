"""Every rule of the table fires on a folder made for it, and no finding names another rule."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
from bad_folders import BAD_FOLDERS
from builders import build_draft, build_target_facts

import paceline
from paceline.rules import Rules, read_rules
from paceline.validate import RULES, validate_draft

EMC2 = read_rules("emc2-2027")
SMALL = dataclasses.replace(
    EMC2,
    limits=dataclasses.replace(EMC2.limits, max_parameters=100),
)
TINY = dataclasses.replace(EMC2, limits=dataclasses.replace(EMC2.limits, max_files_bytes=100))
QUANTIZED = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}}
CONTESTS: dict[str, Rules] = {"ten.params": SMALL, "mem.load": TINY, "rules.target": EMC2}
SOURCES = Path(paceline.__file__).parent


def test_every_rule_has_a_bad_folder() -> None:
    """Rules of a served draft have theirs in the flow tests, of a fetched one in those of hub."""
    static = {rule.rule_id for rule in RULES.values() if not {"run", "fetch"} & {*rule.needs}}
    assert set(BAD_FOLDERS) == static


@pytest.mark.parametrize("rule", sorted(BAD_FOLDERS))
def test_rule_fires_with_its_severity_and_an_actionable_message(rule: str, tmp_path: Path) -> None:
    folder = BAD_FOLDERS[rule](tmp_path / "draft")
    report = validate_draft(
        folder,
        target=build_target_facts(
            tmp_path / "target", config=QUANTIZED if rule == "q.target" else {}
        ),
        rules=CONTESTS.get(rule),
        deep=True,
    )
    found = [item for item in report.findings if item.rule == rule]
    assert found, [item.rule for item in report.findings]
    assert RULES[rule].severity in {item.severity for item in found}
    for item in report.findings:
        assert item.message
        if item.severity == "error":
            assert item.expected, item
            assert item.fix, item
            assert item.file or item.rule.startswith(("fs.", "mem.")), item
    assert any(has_form(item.message, RULES[rule].message) for item in found), [
        item.message for item in found
    ]
    if RULES[rule].severity == "error":
        assert report.verdict == "fail"
    elif RULES[rule].severity == "warning":
        assert report.verdict in {"warn", "fail"}


def has_form(message: str, form: str) -> bool:
    """The words of the table's form, anything for its {words}."""
    parts = re.split(r"\{\w+\}", form)
    return re.fullmatch(".*".join(map(re.escape, parts)), message) is not None


@pytest.mark.parametrize("rule", RULES)
def test_the_function_that_a_row_names_exists_and_tells_the_rule(rule: str) -> None:
    module_name, _, function_name = RULES[rule].by.rpartition(".")
    module = importlib.import_module(f"paceline.{module_name}")
    function = getattr(module, function_name)
    assert callable(function)
    assert rule in inspect.getsource(module)
    assert len(inspect.getsource(function).splitlines()) <= 75


def test_each_rule_has_a_function_of_its_own() -> None:
    by = collections.Counter(rule.by for rule in RULES.values())
    assert [name for name, number in by.items() if number > 1] == []


def test_every_rule_id_in_the_source_is_in_the_table() -> None:
    quoted = re.compile(
        r'"((?:rev|repo|fs|json|cfg|st|idx|ten|k|meta|rules|spec|q|lfs|mem|not)\.[a-z_0-9]+)"'
    )
    files = {"spec.json", "fc.weight", "rules.toml"}
    used = set()
    for path in [
        *SOURCES.glob("validate/*.py"),
        *SOURCES.glob("draft/*.py"),
        *SOURCES.glob("hub/*.py"),
        *SOURCES.glob("*.py"),
    ]:
        used |= set(quoted.findall(path.read_text()))
    assert used - files - {"st."} == {name for name in RULES if not name.startswith("run.")}


def test_a_sound_draft_passes_without_errors_or_warnings(tmp_path: Path) -> None:
    report = validate_draft(
        build_draft(tmp_path / "draft"), target=build_target_facts(tmp_path), deep=True
    )
    assert report.verdict == "pass"
    assert {item.severity for item in report.findings} == {"note"}
