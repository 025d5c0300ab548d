"""The `paceline` command as a user runs it, and a small disk to fill."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "PACELINE",
    "Outcome",
    "every_core",
    "fill_disk",
    "mounted_disk",
    "run_command",
    "write_jsonl",
]

PACELINE = str(Path(sys.executable).parent / "paceline")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    def require(self, code: int, *words: str) -> None:
        """One message on standard error with these words, this exit code, no traceback."""
        text = f"{self.code}\n{self.out}\n{self.err}"
        assert self.code == code, text
        assert "Traceback" not in self.out + self.err, text
        assert self.err.count("paceline: ") == (1 if code else 0), text
        for word in words:
            assert word in self.err, f"{word!r} is not in {self.err!r}"


def run_command(*words: object, timeout_s: float = 120.0, cwd: Path | None = None) -> Outcome:
    """Runs `paceline WORDS` in a process of its own, 80 columns wide."""
    done = subprocess.run(
        [PACELINE, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )
    return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)


@contextlib.contextmanager
def every_core() -> Iterator[None]:
    """All cores of the machine for what is started here, in a lane of tests that has some."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def write_jsonl(path: Path, rows: list[dict[str, Any] | str]) -> Path:
    """One row a line; text goes in as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


@contextlib.contextmanager
def mounted_disk(folder: Path, *, size: str) -> Iterator[Path]:
    """A file system of `size` (such as "64k") at `folder`; skips where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(folder: Path) -> Path:
    """Takes all that is left of a small disk; returns the file to delete."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path
