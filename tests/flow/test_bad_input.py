"""A stop, a kill and a full disk in the middle of real work: nothing finished is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import PACELINE, Outcome, fill_disk, mounted_disk, run_command
from process_tree import children_of, descendants_of

from paceline.records import read_json, read_jsonl
from paceline.serve.process import session_members

pytestmark = pytest.mark.engine

SMOLLM2 = ("--target", "smollm2")
NUM_PROMPTS = 8
RECIPE = """
family = "eagle3"
[draft]
num_speculative_tokens = 3
draft_vocab_size = 1024
[optim]
lr = 1e-3
num_steps = 8
tokens_per_batch = 512
max_length = 128
"""


class Command:
    """A running `paceline WORDS`."""

    def __init__(self, *words: object, log: Path) -> None:
        self.log = log
        with open(log, "w") as file:
            self._process = subprocess.Popen(
                [PACELINE, *map(str, words)], stdout=file, stderr=subprocess.PIPE, text=True
            )
        self.pid = self._process.pid
        self._started: list[int] = []

    def wait_until(self, holds: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.02)
        self._started = descendants_of(self.pid)

    def engines(self) -> list[int]:
        """Forked by the command's one child."""
        (server,) = children_of(self.pid)
        return [pid for pid in children_of(server) if session_members(pid)]

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def finish(self) -> Outcome:
        """Waits for the end; no engine process and no staging folder may be left."""
        err = self._process.communicate(timeout=60.0)[1]
        assert not any(session_members(pid) for pid in self._started)
        assert not list(Path("/tmp").glob(f"paceline-{self.pid}-*"))
        return Outcome(code=self._process.returncode, out=self.log.read_text(), err=err)


def num_rows(data: Path) -> int:
    path = data / "rows.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def answer(out: Path) -> tuple[object, ...]:
    words = ("data", "answer", "--prompts", f"train:{NUM_PROMPTS}", *SMOLLM2, "--out", out)
    return (*words, "--max-tokens", 32, "--concurrency", 2)


def require_whole(data: Path, kept: bytes) -> None:
    """All rows, each once, the earlier ones untouched and first."""
    assert (data / "rows.jsonl").read_bytes().startswith(kept)
    ids = [row["id"] for row in read_jsonl(data / "rows.jsonl")]
    assert len(ids) == len(set(ids)) == NUM_PROMPTS
    assert read_json(data / "data.json")["complete"]


@pytest.fixture(scope="module")
def stopped_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped") / "data"


def test_stopped_and_killed_answers_go_on(stopped_data: Path, tmp_path: Path) -> None:
    data = stopped_data
    command = Command(*answer(data), log=tmp_path / "log")
    command.wait_until(lambda: num_rows(data) >= 1)
    command.send(signal.SIGINT)
    command.finish().require(130, "what was finished is kept, run the same command again")
    kept = (data / "rows.jsonl").read_bytes()
    assert not read_json(data / "data.json")["complete"]

    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = (tmp_path / "recipe.toml", *SMOLLM2, "--data", data, "--out", tmp_path / "draft")
    run_command("train", *words).require(2, "this data folder is unfinished", "goes on where")

    before = num_rows(data)
    command = Command(*answer(data), log=tmp_path / "log")
    command.wait_until(lambda: num_rows(data) >= before + 1)
    (engine,) = command.engines()
    os.kill(engine, signal.SIGKILL)
    outcome = command.finish()
    outcome.require(4, "the engine died while generating", "SIGKILL", "Its last lines:")
    assert str(data.with_name("data.engine.log")) in outcome.err
    assert (data / "rows.jsonl").read_bytes().startswith(kept)
    kept = (data / "rows.jsonl").read_bytes()

    run_command(*answer(data)).require(0)
    require_whole(data, kept)


def test_answers_on_a_disk_that_fills_up(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", size="4m") as disk:
        data = disk / "data"
        command = Command(*answer(data), log=tmp_path / "log")
        command.wait_until(lambda: num_rows(data) >= 1)
        fill_disk(disk)
        command.finish().require(5, "the disk is full", str(disk), "run the same command again")
        kept = (data / "rows.jsonl").read_bytes()
        kept = kept[: kept.rfind(b"\n") + 1]
        assert kept.count(b"\n") >= 1
        (disk / "filler").unlink()
        run_command(*answer(data)).require(0)
        require_whole(data, kept)


def test_stopped_training_goes_on(stopped_data: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    out = tmp_path / "draft"
    words = ("train", tmp_path / "recipe.toml", *SMOLLM2, "--data", stopped_data, "--out", out)
    command = Command(*words, log=tmp_path / "log")
    command.wait_until(lambda: "training: 1/8" in command.log.read_text())
    command.send(signal.SIGINT)
    command.finish().require(130, "draft.checkpoint", "--resume")
    assert not out.exists()
    checkpoint = out.with_name("draft.checkpoint")
    step = read_json(checkpoint / "meta.json")["step"]
    assert 1 <= step < 8

    run_command(*words).require(2, "an unfinished training lies beside --out", "--resume")
    finished = run_command(*words, "--resume")
    finished.require(0)
    assert f"training: {step + 1}/8" in finished.out
    assert not checkpoint.exists()
    run_command("validate", out, *SMOLLM2).require(0)
    run_command(*words).require(5, "already exists")
