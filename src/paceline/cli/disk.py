"""Room on the disk, asked for before long work starts, and told of when an engine dies of it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import EngineError, StorageError
from paceline.records import storage_errors

__all__ = ["require_room", "told_when_full"]

_MIN_FREE_BYTES = 2**20  # an engine's log and the records
_NOTHING_BYTES = 2**14


def require_room(out: Path) -> None:
    """Raises StorageError where a folder `out` cannot be made, or the disk is full.

    Asked before hours of work whose result would be written there. Makes the folder above `out`.
    """
    probe = out.with_name(f".{out.name}.probe-{os.getpid()}")
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    if shutil.disk_usage(out.parent).free < _MIN_FREE_BYTES:
        raise _full(out)


@contextlib.contextmanager
def told_when_full(out: Path) -> Iterator[None]:
    """An engine that cannot write its log dies; the disk is then named as the cause."""
    require_room(out)
    try:
        yield
    except EngineError as error:
        if shutil.disk_usage(out.parent).free < _NOTHING_BYTES:
            raise _full(out) from error
        raise


def _full(out: Path) -> StorageError:
    return StorageError(
        "the disk is full",
        where=str(out),
        fix="Free some space and run the same command again; what was finished is kept.",
    )
