"""`paceline tune` on real vLLM: killed with -9 after its first trial, it goes on with the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.records import read_json, read_jsonl
from paceline.serve import read_serve_config
from paceline.tune import Settings

pytestmark = [pytest.mark.engine, pytest.mark.alone]

OPTIONS = ["--regime", "24:24", "--requests", "6", "--texts", "4", "--rules", "pocket"]


def test_killed_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tune"
    words = ["tune", "pocket", "native", "--out", str(out), "--thinking", "off", *OPTIONS]
    command = [sys.executable, "-c", "from paceline.cli import main; main()", *words]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    trials = out / "trials.jsonl"
    deadline = time.monotonic() + 120
    while not trials.exists() or len(read_jsonl(trials)) < 2:
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    plain = read_jsonl(trials)[1]
    # time for one more trial and its gate
    monkeypatch.setattr(sys, "argv", ["paceline", *words, "--minutes", str(plain["seconds"] / 55)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    rows = read_jsonl(trials)
    assert rows[1] == plain  # not measured again
    record = read_json(out / "tune.json")
    found = {row["label"]: row for row in record["rows"]}
    assert found["target alone"]["verdict"] == "baseline"
    assert found["draft native"]["verdict"] in ("faster", "tie", "slower")  # its text passed
    assert found["draft native"]["k"] == 3
    assert found["draft native"]["speedup"]["mean"] > 0
    assert record["noise"] is not None
    native = next(trial for trial in record["trials"] if trial.get("label") == "draft native")
    assert native["withheld"] == []
    assert 0 < native["host"]["compute_ms"] < native["host"]["step_ms"]
    assert "dynamic_k not searched: " in said
    config = read_serve_config(out / "serve.toml")
    best = Settings(**record["best"])
    assert (config.draft or "none") == best.draft
    assert "vllm.entrypoints.openai.api_server" in (out / "command.sh").read_text()
