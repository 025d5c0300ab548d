"""A fetched folder, its manifest beside it: what `validate` makes of the two."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
from builders import build_draft

from paceline.errors import HubError
from paceline.hub import manifest_path
from paceline.records import write_json
from paceline.validate import Report, validate_draft

COMMIT = "0123456789abcdef" * 2 + "01234567"
OF_FETCH = {"rev.sha", "repo.id", "repo.access", "repo.moved", "lfs.hash"}


def fetched(folder: Path, **changes: object) -> Path:
    """A draft folder with the manifest that `paceline fetch` would leave; changes of the latter."""
    files = {}
    for item in sorted(build_draft(folder).iterdir()):
        data = item.read_bytes()
        files[item.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {
        "format": "paceline-fetch/1",
        "repo": "ann/draft",
        "commit": COMMIT,
        "files": files,
        **changes,
    }
    write_json(manifest_path(folder), manifest)
    return folder


def told(report: Report) -> list[tuple[str, str]]:
    return [(item.rule, item.message) for item in report.findings if item.severity == "error"]


@pytest.mark.parametrize("deep", [False, True])
def test_as_it_was_fetched(deep: bool, tmp_path: Path) -> None:
    report = validate_draft(fetched(tmp_path / "d"), deep=deep)
    assert told(report) == []
    assert not OF_FETCH & {*report.unchecked}
    assert not any(item.where == "paceline fetch" for item in report.findings)


def test_a_folder_that_was_not_fetched_says_what_was_not_checked(tmp_path: Path) -> None:
    report = validate_draft(build_draft(tmp_path / "d"))
    assert {*report.unchecked} >= OF_FETCH
    (note,) = [item for item in report.findings if item.where == "paceline fetch"]
    assert "rev.sha, repo.id, repo.access, repo.moved, lfs.hash" in note.message


def test_files_that_came_went_and_grew(tmp_path: Path) -> None:
    folder = fetched(tmp_path / "d")
    (folder / "README.md").write_text("new")
    (folder / "metadata.json").write_text("{}")
    (folder / "spec.json").unlink()
    ((rule, message), *_) = [item for item in told(validate_draft(folder)) if "fetched" in item[1]]
    assert rule == "repo.moved"
    assert "README.md: was not fetched, it came later" in message
    assert "spec.json: is gone" in message
    assert "metadata.json: is 2 bytes long" in message


def test_one_byte_is_seen_by_deep(tmp_path: Path) -> None:
    folder = fetched(tmp_path / "d")
    text = (folder / "metadata.json").read_text()
    (folder / "metadata.json").write_text(text.replace("none", "nine"))
    assert told(validate_draft(folder)) == []
    assert [rule for rule, _ in told(validate_draft(folder, deep=True))] == ["repo.moved"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"commit": "main"}, "rev.sha"),
        ({"commit": None}, "rev.sha"),
        ({"repo": "../draft"}, "repo.id"),
        ({"repo": 7}, "repo.id"),
        ({"files": []}, "repo.moved"),
        ({"format": "x"}, "repo.moved"),
    ],
)
def test_a_manifest_without_sense(changes: dict[str, object], rule: str, tmp_path: Path) -> None:
    assert [name for name, _ in told(validate_draft(fetched(tmp_path / "d", **changes)))] == [rule]


def test_a_manifest_that_is_no_json(tmp_path: Path) -> None:
    folder = fetched(tmp_path / "d")
    manifest_path(folder).write_text(json.dumps([1])[:-1])
    assert [name for name, _ in told(validate_draft(folder))] == ["repo.moved"]


def test_a_refusal_of_the_hub_keeps_its_rule_between_processes() -> None:
    error = HubError("a", where="b", fix="c.", exit_code=6, rule="repo.id")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rule, copy.exit_code, str(copy)) == ("repo.id", 6, "b: a. c. (rule repo.id)")
