"""Without its extra the judge says which one, and nothing else of the package minds."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "sqlalchemy" else find(name, *rest)
sys.argv = ["paceline", *sys.argv[1:]]
from paceline.cli import main
main()
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False
    )


def test_the_missing_extra_is_named() -> None:
    done = run("judge", "status", "--home", "/nowhere")
    assert done.returncode == 2
    assert "pip install 'paceline[judge]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("judge", "--help").returncode == 0
