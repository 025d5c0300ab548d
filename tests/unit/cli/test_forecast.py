"""`paceline forecast` as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_MAIN = [sys.executable, "-c", "from paceline.cli import main; main()", "forecast"]


def _run(folder: Path, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "draft.toml").write_text(text)
    command = [*_MAIN, str(folder / "draft.toml"), "--target", "qwen3.8-27b", *more]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_design_is_printed_with_what_it_needs(tmp_path: Path) -> None:
    done = _run(tmp_path, 'family = "eagle3"\nnum_speculative_tokens = 3\nwindow = 2048\n')
    assert done.returncode == 0, done.stderr
    for words in ("recurrent states", "acceptance length", "terms.memory.cap", "assumption"):
        assert words in done.stdout


def test_json_is_one_object(tmp_path: Path) -> None:
    done = _run(tmp_path, 'family = "mtp"\nnum_speculative_tokens = 3\n', "--json")
    found = json.loads(done.stdout)
    assert found["memory"]["total_bytes"] == found["baseline_memory"]["total_bytes"]
    assert [goal["score"] for goal in found["goals"]] == [100, 125, 150]


def test_an_impossible_design_is_one_message(tmp_path: Path) -> None:
    done = _run(tmp_path, 'family = "mtp"\nnum_speculative_tokens = 3\nweights = "fp8"\n')
    assert done.returncode == 2
    assert "cannot be expressed" in done.stderr
    assert "Traceback" not in done.stderr
