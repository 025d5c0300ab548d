"""A submission as owner/name@commit, over the Hub's own HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import build_draft
from command_line import Outcome, run_command
from hub_server import HubServer, Repo
from judge_process import RULES


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_judge")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def enter(tmp_path: Path, ref: str, team: str, *, rules: str = "rules.toml") -> Outcome:
    if not (tmp_path / rules).exists():
        (tmp_path / rules).write_text(RULES.text)
    words = ("--rules", tmp_path / rules, "--home", tmp_path / "judge")
    return run_command("judge", "add", ref, "--team", team, *words)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_commit_of_a_gated_repository(hub: HubServer, tmp_path: Path) -> None:
    files = read_files(build_draft(tmp_path / "draft", metadata={"name": "of the Hub"}))
    repo: Repo = hub.add_repo("ann/draft", files, gated="manual", readers={"judge"})
    ref = f"ann/draft@{repo.head}"
    added = enter(tmp_path, ref, "ann")
    added.require(0)
    assert "entry 1: entered" in added.out
    assert not (tmp_path / "judge" / "fetched").exists()
    status = run_command("judge", "status", "--home", tmp_path / "judge", "--json")
    (entry,) = json.loads(status.out)["entries"]
    assert (entry["source"], entry["name"], entry["state"]) == (ref, "of the Hub", "queued")

    # another commit with another README and name is the same draft, and nobody else's
    files["metadata.json"] = json.dumps({"name": "renamed"}).encode()
    repo.add(files)
    again = enter(tmp_path, f"ann/draft@{repo.head}", "ann")
    again.require(0)
    assert "entry 1: known already" in again.out
    enter(tmp_path, ref, "bob").require(2, "under another team's name")


def test_what_the_hub_does_not_give(hub: HubServer, tmp_path: Path) -> None:
    files = read_files(build_draft(tmp_path / "draft"))
    hub.add_repo("ann/closed", files, gated="manual", readers=set())
    enter(tmp_path, f"ann/closed@{hub.repos['ann/closed'].head}", "ann").require(2)
    enter(tmp_path, f"ann/none@{'a' * 40}", "ann").require(2)
    enter(tmp_path, "ann/closed@main", "ann").require(2, "40 hex digits")
    small = RULES.text.replace("max_files_bytes = 200_000_000", "max_files_bytes = 100")
    assert small != RULES.text
    (tmp_path / "small.toml").write_text(small)
    hub.add_repo("ann/large", files, gated="manual", readers={"judge"})
    outcome = run_command(
        *("judge", "add", f"ann/large@{hub.repos['ann/large'].head}", "--team", "ann"),
        *("--rules", tmp_path / "small.toml", "--home", tmp_path / "other"),
    )
    outcome.require(2)
    assert hub.count("resolve") == 0
