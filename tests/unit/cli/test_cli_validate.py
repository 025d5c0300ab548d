"""What `paceline validate` prints and writes: explanations, groups, JUnit, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from builders import REMOVE, build_draft
from command_line import PACELINE, run_command
from envelopes import build_envelope

from paceline.validate import RULES, render_junit, validate_draft
from paceline.validate.rules import name_input


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An error in the weights, a warning in config.json, a note in metadata.json."""
    return build_draft(
        tmp_path_factory.mktemp("cli") / "draft",
        tensors={"fc.weight": REMOVE},
        config={"max_position_embeddings": 4096},
        metadata={"name": REMOVE},
    )


def test_one_rule_is_explained() -> None:
    done = run_command("validate", "--explain", "ten.d2t")
    done.require(0)
    assert done.out.startswith("ten.d2t: d2t holds offsets to unique ids of the target")
    for word in ("severity", "why", "message", "fix", "vocabulary: _check_offsets"):
        assert word in done.out
    assert "--target" in run_command("validate", "--explain", "cfg.hidden").out


def test_all_rules_are_listed_in_groups() -> None:
    lines = run_command("validate", "--explain", "all").out.splitlines()
    listed = [line.split()[0] for line in lines if re.match(r"  \S", line)]
    assert listed == list(RULES)
    assert max(map(len, lines)) <= 80
    assert {rule.group for rule in RULES.values()} <= set(lines)


def test_explanations_for_tools() -> None:
    (row,) = json.loads(run_command("validate", "--explain", "cfg.hidden", "--json").out)
    assert row["rule_id"] == "cfg.hidden"
    assert row["needs"] == ["target"]
    assert len(json.loads(run_command("validate", "--explain", "all", "--json").out)) == len(RULES)


def test_a_report_that_cannot_be_written_is_said(bad: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    run_command("validate", bad, "--junit", tmp_path / "file" / "r.xml").require(5, "file")


@pytest.mark.parametrize(
    ("word", "near"),
    [("cfg.rop", "cfg.rope"), ("d2t", "ten.d2t"), ("CFG.ROPE", "cfg.rope"), ("st", "st.header")],
)
def test_an_unknown_rule_names_its_neighbours(word: str, near: str) -> None:
    run_command("validate", "--explain", word).require(2, f"no rule '{word}'", near, "all` lists")


def test_explain_beside_a_draft_is_refused(bad: Path) -> None:
    run_command("validate", bad, "--explain", "cfg.rope").require(2, "checks no draft")
    run_command("validate", "--explain", "cfg.rope", "--strict").require(2, "checks no draft")
    run_command("validate").require(2, "no draft was named")


def test_the_file_with_the_worst_finding_comes_first(bad: Path) -> None:
    done = run_command("validate", bad)
    assert done.code == 2
    lines = done.out.splitlines()
    heads = [line for line in lines if line and not line.startswith((" ", "verdict", "`"))]
    assert heads[:2] == ["model.safetensors", "config.json"]
    first = lines.index("config.json")
    severities = [
        match[1] for line in lines[first:] if (match := re.match(r"  (error|warning|note) ", line))
    ]
    assert severities[0] == "warning"
    assert "`paceline validate --explain ten.missing`" in done.out
    assert lines[-1].startswith("verdict: fail (1 error, ")
    assert "\x1b" not in done.out


def test_a_terminal_gets_colour(bad: Path) -> None:
    master, slave = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    done = subprocess.run(
        [PACELINE, "validate", str(bad)],
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "80"},
        check=False,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        shown += piece
        if not piece:
            break
    os.close(master)
    assert done.returncode == 2
    assert b"\x1b[1;31m  error" in shown
    assert b"\x1b[33m  warning" in shown


def test_junit_has_a_case_for_every_rule(bad: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.xml"
    done = run_command("validate", bad, "--junit", out)
    assert done.code == 2
    root = ElementTree.parse(out).getroot()
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert list(cases) == list(RULES)
    assert root.get("tests") == str(len(RULES))
    assert root.get("failures") == "1"
    failure = cases["ten.missing"].find("failure")
    assert failure is not None
    assert "fc.weight" in (failure.text or "")
    assert cases["cfg.pos"].find("failure") is None
    assert "warning: config.json" in (cases["cfg.pos"].findtext("system-out") or "")
    skipped = cases["cfg.hidden"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "needs --target"
    assert sum(case.find("skipped") is not None for case in cases.values()) == int(
        root.get("skipped") or 0
    )


def test_strict_makes_warnings_failures_in_junit_too(bad: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.xml"
    run_command("validate", bad, "--strict", "--junit", out)
    root = ElementTree.parse(out).getroot()
    (case,) = [case for case in root.iter("testcase") if case.get("name") == "cfg.pos"]
    failure = case.find("failure")
    assert failure is not None
    assert failure.get("type") == "warning"


def test_hostile_names_stay_text_in_junit(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    (folder / '<&"\x1b\uffff]]>').write_text("x")
    report = validate_draft(folder)
    root = ElementTree.fromstring(render_junit(report, name='<&"\x00>'))
    texts = [failure.text or "" for failure in root.iter("failure")]
    assert any('<&"' in text for text in texts)


def test_what_was_not_checked_is_named_rule_by_rule(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    found = json.loads(run_command("validate", folder, "--json").out)["findings"]
    told = {item["where"]: item["message"] for item in found if item["rule"] == "not.checked"}
    assert set(told) == {"--target", "--rules", "--deep", "--run", "paceline fetch"}
    for rule in RULES.values():
        for name in (*rule.needs, *rule.partly):
            assert rule.rule_id in told[name_input(name)]


def test_rules_of_another_target_are_said(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "d")
    done = run_command("validate", folder, "--target", "smollm2", "--rules", "emc2-2027")
    assert "rules emc2-2027 are for target Qwen3.8-27B" in " ".join(done.out.split())
    same = run_command("validate", folder, "--target", "smollm2", "--rules", "demo")
    assert "rules.target" not in same.out


def test_what_has_no_contract_is_not_started(tmp_path: Path) -> None:
    folder = build_envelope(tmp_path / "d", speculators_model_type="dspark")
    done = run_command("validate", folder, "--target", "smollm2", "--run", "--json")
    done.require(0)
    found = json.loads(done.out)["findings"]
    assert any(
        "not looked at, because it has no contract here" in item["message"] for item in found
    )


def test_a_folder_served_by_hand(tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "draft")
    beside = run_command("validate", folder, "--family", "eagle3", "--k", 3)
    beside.require(2, "has a spec.json", "no --family and no --k")
    (folder / "spec.json").unlink()
    alone = run_command("validate", folder)
    assert alone.code == 2
    assert "--family and --k" in " ".join(alone.out.split())
    done = run_command("validate", folder, "--k", 3, "--json")
    done.require(0)
    (found,) = [i for i in json.loads(done.out)["findings"] if i["rule"] == "spec.missing"]
    assert found["severity"] == "note"
    assert "family eagle3, K = 3" in found["message"]
    run_command("validate", "--explain", "fs.pickle", "--k", 3).require(2, "checks no draft")
