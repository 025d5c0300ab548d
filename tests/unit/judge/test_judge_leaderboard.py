"""From the judge's public folder to the leaderboard, through the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer.main
from command_line import run_command
from judge_process import CANARY, RULES, add_draft, build_court

from paceline.cli.app import app
from paceline.errors import DataError, DraftError, EngineError, ResultError
from paceline.judge import Task, run_worker


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six drafts of three teams; some are twice as good as the baseline, some are its equals."""
    folder = tmp_path_factory.mktemp("contest")
    court = build_court(folder / "judge")
    for number in range(6):
        add_draft(
            court, folder / f"d{number}", team=f"team {number % 3}", name=f"d{number}", seed=number
        )
    (folder / "rules.toml").write_text(RULES.text)
    run_worker(court)
    return folder


def test_publish_verify_and_rank(home: Path) -> None:
    judge, public, site = home / "judge", home / "public", home / "site"
    status = run_command("judge", "status", "--home", judge)
    status.require(0)
    assert status.out.splitlines()[-1] == f"{judge}: 6 done"
    run_command("judge", "publish", "--home", judge, "--out", public).require(0)
    checked = run_command("judge", "verify", public, "--key", judge / "judge.key")
    checked.require(0)
    assert "6 lines in one chain, 6 results as signed; signatures checked" in checked.out
    rules = ("--rules", home / "rules.toml")
    made = run_command("leaderboard", public, *rules, "--out", site)
    made.require(0)
    record = json.loads((site / "leaderboard.json").read_text())
    states = [entry["state"] for entry in record["entries"]]
    assert sorted(states) == ["ranked"] * 3 + ["superseded"] * 3  # the latest of each team
    for entry in record["entries"]:
        if entry["rank"] is not None:
            # equal scores share their places, and nobody else's
            equals = [
                other
                for other in record["entries"]
                if other["rank"] and other["score"]["value"] == entry["score"]["value"]
            ]
            assert entry["rank_worst"] - entry["rank"] + 1 == len(equals)
    page = (site / "index.html").read_text()
    assert "paired by prompt" in page
    for path in [*site.rglob("*.html"), *public.rglob("*.json*")]:
        assert CANARY.lower() not in path.read_text().lower()
    again = run_command("leaderboard", public, "--out", site)
    again.require(2, "measured under other rules")
    assert "paired by prompt" in (site / "index.html").read_text()  # the old site stands


def test_a_changed_line_is_found_by_the_command(home: Path, tmp_path: Path) -> None:
    call("judge", "publish", "--home", home / "judge", "--out", tmp_path / "p")
    ledger = tmp_path / "p" / "results.jsonl"
    ledger.write_text(ledger.read_text().replace("team 1", "team 2", 1))
    with pytest.raises(ResultError, match=r"results\.jsonl:2"):
        call("judge", "verify", ledger, "--key", home / "judge" / "judge.key")
    with pytest.raises(ResultError, match="there is no ledger"):
        call("judge", "verify", tmp_path / "nothing")


def test_run_folders_are_recomputed_and_paired_where_they_can_be(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("judge", "publish", "--home", home / "judge", "--out", tmp_path / "p")
    runs = tmp_path / "p" / "entries"
    words = ("leaderboard", runs, "--rules", home / "rules.toml", "--out", tmp_path / "site")
    call(*words)
    assert "6 entries, 6 ranked" in capsys.readouterr().out
    assert "paired by prompt" in (tmp_path / "site" / "index.html").read_text()
    path = next(runs.glob("*/result.json"))
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "provenance": {"machine": "another"}}))
    call(*words)
    assert "ties follow from each entry's own interval" in capsys.readouterr().out
    assert "whose intervals overlap" in (tmp_path / "site" / "index.html").read_text()
    result["score"]["value"] += 1
    path.write_text(json.dumps(result))
    with pytest.raises(ResultError, match="but the run's own data give"):
        call(*words)


def test_what_cannot_be_used_of_the_hidden_prompts_is_not_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("judge", "run", "--target", "smollm2", "--baseline", "ngram", "--home", tmp_path / "j")
    for name, text in (
        ("broken", f'{{"prompt": "{CANARY}", "prompt": "{CANARY}"}}\n'),
        ("empty", f'{{"text": "{CANARY}"}}\n'),
        ("half", f'{{"prompt": "fine"}}\n{{"{CANARY}": 1}}\n'),
        ("binary", f"\xff{CANARY}\n"),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(text, encoding="latin-1")
        with pytest.raises(DataError, match="hidden prompts") as caught:
            call(*words, "--prompts", path)
        assert str(path) in str(caught.value)
        assert CANARY not in str(caught.value)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert CANARY not in "".join(capsys.readouterr())
    with pytest.raises(DataError, match="there is no such prompt file"):
        call(*words, "--prompts", tmp_path / "none")
    with pytest.raises(ResultError, match="there is no judge"):
        call("judge", "status", "--home", tmp_path / "x")
    with pytest.raises(DraftError):
        call("judge", "add", "nothing", "--team", "a", "--home", tmp_path / "y")


def call(*words: object) -> None:
    """`paceline WORDS` in this process."""
    typer.main.get_command(app).main([str(word) for word in words], standalone_mode=False)


def test_a_failed_entry_is_shown_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(task: Task) -> None:
        raise EngineError(f"the engine died on {CANARY}")

    court = build_court(tmp_path / "judge")
    add_draft(court, tmp_path / "bad", team="unlucky", name="bad", seed=3)
    run_worker(replace(court, measure=fail))
    (tmp_path / "rules.toml").write_text(RULES.text)
    call("judge", "publish", "--home", tmp_path / "judge", "--out", tmp_path / "p")
    rules = ("--rules", tmp_path / "rules.toml")
    call("leaderboard", tmp_path / "p", *rules, "--out", tmp_path / "site")
    assert "failed: the engine died on [withheld]" in capsys.readouterr().out
    assert "[withheld]" in (tmp_path / "site" / "index.html").read_text()
