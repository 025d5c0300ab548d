"""The judge's folder, and the locks that the kernel frees when their holder dies.

judge.key            the signing key, 0600
queue.sqlite         the queue, unless it is a PostgreSQL database
drafts/<sha256>/     drafts as entered
work/<sha256>/       raw runs of an entry that is being measured, 0700; gone afterwards
private/<sha256>/    the sealed transcripts, 0600: for the organiser
results/<sha256>/    result.json, report.html: for everybody
results.jsonl        the ledger
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import PlanError
from paceline.judge.ledger import KEY_NAME, LEDGER_NAME
from paceline.records import storage_errors

__all__ = ["Home", "clear_old_copies", "hold_device", "try_lock"]

_COPY_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where a judge keeps what it has; several workers may share one."""

    path: Path

    @property
    def key_path(self) -> Path:
        return self.path / KEY_NAME

    @property
    def ledger_path(self) -> Path:
        return self.path / LEDGER_NAME

    @property
    def drafts_dir(self) -> Path:
        return self.path / "drafts"

    def work_dir(self, content_sha256: str) -> Path:
        return self.path / "work" / content_sha256

    def private_dir(self, content_sha256: str) -> Path:
        return self.path / "private" / content_sha256

    def result_dir(self, content_sha256: str) -> Path:
        return self.path / "results" / content_sha256

    def make_work_dir(self, content_sha256: str) -> Path:
        """The entry's folder for raw runs; nobody else can look into it."""
        path = self.work_dir(content_sha256)
        with storage_errors(path):
            for part in (path.parent, path):
                part.mkdir(parents=True, exist_ok=True, mode=0o700)
                part.chmod(0o700)
        return path

    def clear_work_dir(self, content_sha256: str) -> None:
        """Removes the raw runs, and what a killed worker had half written of the sealed ones.

        The caller holds the entry's lock, or the entry has come to its end.
        """
        with storage_errors(self.path):
            shutil.rmtree(self.work_dir(content_sha256), ignore_errors=True)
            for half in self.result_dir("").glob(f".{content_sha256}.*"):
                shutil.rmtree(half, ignore_errors=True)
            for half in self.private_dir(content_sha256).glob(".*"):
                half.unlink(missing_ok=True)


def clear_old_copies(home: Home) -> None:
    """Removes copies of drafts that were killed on their way in, once they are a day old."""
    with storage_errors(home.path):
        for half in home.drafts_dir.glob(".incoming-*"):
            with contextlib.suppress(FileNotFoundError):  # it came to its end meanwhile
                if time.time() - half.stat().st_mtime > _COPY_S:
                    shutil.rmtree(half, ignore_errors=True)


def try_lock(home: Home, name: str) -> IO[str] | None:
    """An exclusive lock, held until it is closed or its process dies; None when another has it."""
    path = home.path / "locks" / f"{name}.lock"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def hold_device(home: Home, device: str) -> IO[str]:
    """This host's device for this worker alone. Raises PlanError when another worker has it."""
    safe = "".join(letter if letter.isalnum() else "-" for letter in device)
    lock = try_lock(home, f"device-{socket.gethostname()}-{safe}")
    if lock is None:
        raise PlanError(
            f"another worker of this judge measures on device '{device}'",
            expected="one draft at a time on a device",
            fix="Name another device with --device, or wait for that worker.",
        )
    return lock
