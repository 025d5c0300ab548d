"""`paceline validate --run`: what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import REMOVE, build_draft
from command_line import run_command

NAME = "smollm2-eagle3"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--run",), "--run needs a target"),
        (("--target", "smollm2", "--run-tokens", "512"), "no effect without --run"),
        (("--target", "smollm2", "--run", "--run-tokens", "5"), "expected 64 to 8,164"),
        (("--target", "smollm2", "--run", "--run-tokens", "8165"), "expected 64 to 8,164"),
    ],
)
def test_settings_that_cannot_be(words: tuple[str, ...], said: str) -> None:
    run_command("validate", NAME, *words).require(2, said)


def test_without_vllm_the_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    monkeypatch.setenv("PACELINE_VLLM_PYTHON", str(python))
    done = run_command("validate", NAME, "--target", "smollm2", "--run")
    done.require(2, "vLLM is not installed", "pip install")


def test_a_draft_with_errors_is_not_started(tmp_path: Path) -> None:
    bad = build_draft(tmp_path / "bad", tensors={"fc.weight": REMOVE})
    done = run_command("validate", bad, "--target", "smollm2", "--run", "--json")
    assert done.code == 2
    told = [item for item in json.loads(done.out)["findings"] if item["where"] == "--run"]
    assert len(told) == 1
    assert told[0]["message"].startswith("not looked at, because it has errors: run.sandbox, run.")
