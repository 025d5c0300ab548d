"""Neutral folders for the engine: vLLM takes a draft's method from words in its path.

A folder such as runs/eagle3-vs-medusa/a would change the method of what lies in it. So the engine
only ever sees PREFIX/target-<hash> and PREFIX/draft-<hash>.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from paceline.errors import DraftError, PlanError, StorageError, TargetError
from paceline.records import storage_errors
from paceline.serve.plan import Plan

__all__ = ["METHOD_WORDS", "make_staging", "remove_staging"]

# vLLM 0.31.0, config/speculative.py: any of these in the draft's path overrides the method
METHOD_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
_STALE_S = 3600.0
_TARGET_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken"}
_DRAFT_FILES = {"config.json"}


def _neutral_root() -> Path:
    candidates = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")]
    for root in candidates:
        clean = not any(word in str(root.resolve()).lower() for word in METHOD_WORDS)
        if clean and os.access(root, os.W_OK):
            return root.resolve()
    raise PlanError(
        "no temporary folder has a neutral path",
        where=tempfile.gettempdir(),
        expected=f"a path without {', '.join(METHOD_WORDS)}: vLLM reads the method from it",
        fix="Set TMPDIR to another folder.",
    )


def make_staging(plan: Plan) -> Path:
    """Makes the folder that the engine reads: the target's files linked, the draft's copied.

    Only regular files of known kinds come in. Remove it with `remove_staging`.
    """
    root = _neutral_root()
    _sweep(root)
    with storage_errors(root):
        staging = Path(tempfile.mkdtemp(prefix=f"paceline-{os.getpid()}-", dir=root))
        try:
            _stage_target(plan.target.path, staging / str(plan.engine_args["model"]))
            if plan.draft is not None and plan.draft_name is not None:
                _stage_draft(plan.draft.path, staging / plan.draft_name)
        except BaseException:
            remove_staging(staging)
            raise
    return staging


def _sweep(root: Path) -> None:
    """Removes what killed processes left: own folders, their process gone, older than an hour."""
    for folder in root.glob("paceline-*-*"):
        pid = folder.name.split("-")[1]
        try:
            status = folder.lstat()
        except OSError:
            continue
        old = time.time() - status.st_mtime > _STALE_S and status.st_uid == os.getuid()
        if pid.isdigit() and stat.S_ISDIR(status.st_mode) and old and not _is_alive(int(pid)):
            remove_staging(folder)


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def remove_staging(staging: Path) -> None:
    shutil.rmtree(staging, ignore_errors=True)


def _stage_target(source: Path, folder: Path) -> None:
    folder.mkdir()
    try:
        files = sorted(source.iterdir())
    except OSError as problem:
        raise TargetError(f"cannot be read: {problem.strerror}", where=str(source)) from None
    for file in files:
        real = file.resolve()  # a Hub snapshot holds links to its blobs
        if file.suffix in _TARGET_SUFFIXES and real.is_file():
            try:
                os.link(real, folder / file.name)
            except OSError:  # another file system, or links not allowed: never copy gigabytes
                (folder / file.name).symlink_to(real)


def _stage_draft(source: Path, folder: Path) -> None:
    folder.mkdir()
    try:
        files = sorted(source.iterdir())
    except OSError as problem:
        raise DraftError(f"cannot be read: {problem.strerror}", where=str(source)) from None
    for file in files:
        wanted = file.name in _DRAFT_FILES or file.name.endswith(
            (".safetensors", ".safetensors.index.json")
        )
        if wanted:
            _copy_regular(file, folder / file.name)


def _copy_regular(source: Path, destination: Path) -> None:
    try:
        handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as problem:
        raise DraftError(f"cannot be opened: {problem.strerror}", where=str(source)) from None
    with open(handle, "rb") as reader:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DraftError("is not a regular file", where=str(source))
        with open(destination, "xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
    if destination.stat().st_size != source.stat().st_size:
        raise StorageError("was cut while it was copied", where=str(source))
