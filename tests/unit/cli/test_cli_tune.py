"""paceline tune and serve --config without an engine: mistakes are told before anything starts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome

from paceline.errors import EngineError

Run = Callable[..., Outcome]
SMALL = ("--regime", "32:4", "--requests", "2", "--texts", "2", "--thinking", "off")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("native", "native"), "a draft is named twice"),
        (("nowhere",), "there is no draft 'nowhere'"),
        (("ngram", "--regime", "20000:4"), "a regime needs"),
        (("ngram", "--rules", "none-such"), "none-such"),
        (("ngram", "--thinking", "none"), "expected thinking on or off"),
    ],
)
def test_mistakes_are_told(run: Run, tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    out = tmp_path / "out"
    done = run("tune", "pocket", *SMALL, *words, "--out", out, "--device", "cpu")
    assert done.code == 2
    assert expected in done.err
    assert not out.exists()


def test_a_server_outlives_whoever_read_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.cli.serve import _tell

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Gone())
    _tell("the draft stopped helping")


def test_a_search_is_resumed_shown_and_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials of a journal alone: nothing has to start to show and write what was found."""
    from paceline.cli.tune_run import EngineBench

    def measure(bench: EngineBench, settings: Any) -> dict[str, Any]:
        if settings.compiled:
            raise EngineError("the engine failed")
        latency = 50.0 if settings.draft == "native" else 100.0
        latency *= 1.0 + 0.1 * abs((settings.k or 3) - 3)
        rows = [{"latency_ms": latency + number} for number in range(8)]
        k = None if settings.draft == "none" else settings.k or 3
        record = {"requests": rows, "tpot_ms": {"median": latency / 10}, "tau": 2.0}
        host = {"step_ms": 10.0, "compute_ms": 7.5, "host_ms": 2.5, "num_steps": 3}
        regimes = [{**record, "other_cpu_share": 0.4}]
        return {"k": k, "method": "m", "regimes": regimes, "texts": [], "host": host}

    def judge(bench: EngineBench, plain: Any, trials: Any, *, again: bool) -> Any:
        return [[] for _ in trials], (plain["regimes"] if again else None)

    monkeypatch.setattr(EngineBench, "measure", measure)
    monkeypatch.setattr(EngineBench, "judge", judge)
    out = tmp_path / "out"
    words = ("tune", "pocket", "native", *SMALL, "--out", out, "--device", "cpu")
    done = run(*words)
    assert done.code == 0, done.err
    table = next(line for line in done.out.splitlines() if line.startswith("draft native"))
    assert "1.93" in table
    assert "faster" in table
    assert "compiled on: failed: the engine failed" in done.out
    assert "other work took up to 40% of the machine" in done.out
    assert "host's part of a decode step, best: 2.50 of 10.00 ms" in done.out
    assert "2.50" in table  # a column of its own
    assert "drafter_window not searched: vLLM 0.31.0 builds an MTP layer" in done.out
    config = (out / "serve.toml").read_text()
    assert 'draft = "native"' in config
    assert "min_acceptance = 1.0" in config  # 2.0 tokens a step, each in half the time
    assert all(len(line) <= 80 for line in done.out.splitlines() if "  " in line)

    monkeypatch.setattr(EngineBench, "measure", None)
    assert run(*words).out.endswith(done.out[done.out.index("pocket on cpu") :])
    assert "differs in requests" in run(*words, "--requests", "3").err

    planned = run("serve", "pocket", "--config", out / "serve.toml", "--plan", "--device", "cpu")
    assert planned.code == 0, planned.err
    assert '"num_speculative_tokens": 3' in planned.out
    (out / "serve.toml").write_text("[engine]\nasync_scheduling = true\n")
    refused = run("serve", "pocket", "--config", out / "serve.toml", "--plan", "--device", "cpu")
    assert (refused.code, "async_scheduling has no effect" in refused.err) == (2, True)
    refused = run("serve", "pocket", "--min-acceptance", "2", "--plan", "--device", "cpu")
    assert (refused.code, "--min-acceptance has no effect" in refused.err) == (2, True)
    assert json.loads((out / "tune.json").read_text())["best"]["draft"] == "native"
