"""A submission as owner/name@commit, over the Hub's own HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from builders import build_draft
from hub_server import HubServer, Repo
from judge_process import RULES

from paceline.cli.app import app
from paceline.errors import DraftError, HubError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_judge")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def call(*words: object) -> None:
    """`paceline WORDS` in this process: seven starts of Python would take longer than the test."""
    typer.main.get_command(app).main([str(word) for word in words], standalone_mode=False)


def enter(tmp_path: Path, ref: str, team: str, *, rules: str = RULES.text) -> None:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "rules.toml").write_text(rules)
    words = ("--rules", tmp_path / "rules.toml", "--home", tmp_path / "judge")
    call("judge", "add", ref, "--team", team, *words)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_commit_of_a_gated_repository(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = read_files(build_draft(tmp_path / "draft", metadata={"name": "of the Hub"}))
    repo: Repo = hub.add_repo("ann/draft", files, gated="manual", readers={"judge"})
    ref = f"ann/draft@{repo.head}"
    enter(tmp_path, ref, "ann")
    assert "entry 1: entered" in capsys.readouterr().out
    assert not (tmp_path / "judge" / "fetched").exists()
    call("judge", "status", "--home", tmp_path / "judge", "--json")
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert (entry["source"], entry["name"], entry["state"]) == (ref, "of the Hub", "queued")

    # another commit with another README and name is the same draft, and nobody else's
    files["metadata.json"] = json.dumps({"name": "renamed"}).encode()
    repo.add(files)
    enter(tmp_path, f"ann/draft@{repo.head}", "ann")
    assert "entry 1: known already" in capsys.readouterr().out
    with pytest.raises(DraftError, match="under another team's name"):
        enter(tmp_path, ref, "bob")


def test_what_the_hub_does_not_give(hub: HubServer, tmp_path: Path) -> None:
    files = read_files(build_draft(tmp_path / "draft"))
    hub.add_repo("ann/closed", files, gated="manual", readers=set())
    closed = hub.repos["ann/closed"].head
    for ref, words in (
        (f"ann/closed@{closed}", "ann/closed"),
        (f"ann/none@{'a' * 40}", "ann/none"),
        ("ann/closed@main", "40 hex digits"),
    ):
        with pytest.raises(HubError, match=words):
            enter(tmp_path, ref, "ann")
    hub.add_repo("ann/large", files, gated="manual", readers={"judge"})
    small = RULES.text.replace("max_files_bytes = 200_000_000", "max_files_bytes = 100")
    with pytest.raises(HubError, match="bytes long together"):
        enter(tmp_path / "other", f"ann/large@{hub.repos['ann/large'].head}", "ann", rules=small)
    assert hub.count("ann/large/resolve") == 0
