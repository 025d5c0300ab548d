"""The judge on real vLLM: killed while it measures, it goes on; no word of a prompt gets out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from command_line import PACELINE, run_command, write_jsonl
from process_tree import descendants_of

from paceline.records import read_json, read_jsonl
from paceline.rules import read_rules

pytestmark = pytest.mark.engine

CANARY = "CANARY7f3a"
PROMPTS = (
    ("explain", f"Explain to {CANARY}bob why the sky is blue."),
    ("chat", f"Say hello to {CANARY}eve, who moved in today."),
    ("code", f"Write a Python function named {CANARY}loop that adds two numbers."),
)
ARMS = ("baseline", "plain")  # the entry is the baseline itself, and is served once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge-flow")
    rows = [{"prompt": text, "category": name} for name, text in PROMPTS]
    write_jsonl(folder / "hidden.jsonl", [*rows])
    text = read_rules("demo").text
    for old, new in (("max_tokens = 48", "max_tokens = 20"), ("for_tpot = 16", "for_tpot = 4")):
        assert old in text
        text = text.replace(old, new)
    (folder / "rules.toml").write_text(text)
    return folder


def words(folder: Path) -> list[str]:
    return [
        *("judge", "run", "--target", "smollm2", "--prompts", str(folder / "hidden.jsonl")),
        *("--baseline", "smollm2-eagle3", "--rules", str(folder / "rules.toml")),
        *("--home", str(folder / "judge"), "--device", "cpu", "--lease", "1"),
    ]


def count_answers(path: Path) -> Counter[tuple[str, str]]:
    rows = read_jsonl(path) if path.exists() else []
    return Counter((row["arm"], row["id"]) for row in rows if row["kind"] == "answer")


def test_killed_while_it_measures_it_goes_on(folder: Path) -> None:
    home = folder / "judge"
    added = run_command(
        *("judge", "add", "smollm2-eagle3", "--team", "team", "--final"),
        *("--rules", folder / "rules.toml", "--home", home),
    )
    added.require(0)
    with open(folder / "first.log", "w") as log:
        first = subprocess.Popen([PACELINE, *words(folder)], stdout=log, stderr=log)
    deadline = time.monotonic() + 150
    raw: list[Path] = []
    while not raw or not count_answers(raw[0]):
        assert first.poll() is None, (folder / "first.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
        raw = list((home / "work").glob("*/hidden/requests.jsonl"))
    children = descendants_of(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    kept = count_answers(raw[0])
    assert kept
    assert children  # engines, which end with the worker
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    second = run_command(*words(folder), timeout_s=170.0)
    second.require(0)
    assert second.out.splitlines()[-1] == "1 entry came to an end"
    (entry,) = json.loads(run_command("judge", "status", "--home", home, "--json").out)["entries"]
    assert (entry["state"], entry["takeovers"], entry["is_final"]) == ("done", 1, True)
    (transcript,) = (home / "private").glob("*/hidden.jsonl")
    assert set(count_answers(transcript).values()) == {1}
    assert len(count_answers(transcript)) == len(ARMS) * len(PROMPTS)

    (own,) = (home / "results").glob("*")
    result = read_json(own / "result.json")
    assert result["score"]["value"] == 100.0
    assert all(record["kept"] for record in read_json(own / "verdict.json")["conduct"])
    run_command("score", own).require(0)
    run_command("judge", "publish", "--home", home, "--out", folder / "public").require(0)
    rules = ("--rules", folder / "rules.toml")
    run_command("leaderboard", folder / "public", *rules, "--out", folder / "site").require(0)
    texts = [second.out, second.err, (folder / "first.log").read_text()]
    for place in (home, folder / "public", folder / "site"):
        files = [path for path in place.rglob("*") if path.is_file()]
        texts += [path.read_bytes().decode("latin-1") for path in files]
    assert not any(CANARY.lower() in text.lower() for text in texts)
    assert not (home / "work").exists() or not list((home / "work").iterdir())
