"""A strict reader of safetensors headers: no torch, no tensor loaded, bounded, no link followed.

The public library takes duplicate names (last wins), unknown fields, any name and misaligned data;
two readers can then see two different models in one file. Here each of these is a problem.
Layout: 8 bytes little-endian header length n, n bytes of JSON, then the tensor bytes.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DraftError, PacelineError
from paceline.problems import Problem, require_none, show_value
from paceline.safetensors_entries import (
    DTYPE_BYTES,
    MAX_RANK,
    Scan,
    TensorInfo,
    check_cover,
    scan_entry,
)
from paceline.strict_json import JsonLimits, scan_json

__all__ = [
    "DTYPE_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_TENSORS",
    "Header",
    "TensorInfo",
    "peek_header_bytes",
    "read_header",
    "scan_header",
]

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 20_000
MAX_METADATA_BYTES = 8 * 1024
_LIMITS = JsonLimits(
    max_bytes=MAX_HEADER_BYTES, max_depth=4, max_nodes=500_000, max_string=MAX_METADATA_BYTES
)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The table of contents of one safetensors file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int


def scan_header(
    path: str | Path, *, max_rank: int = MAX_RANK
) -> tuple[Header | None, list[Problem]]:
    """Reads one header; returns (header, problems), header None when nothing can be trusted.

    Only the length and the header are read. A link, a device or a FIFO is a problem, never opened
    for reading. Never raises on a hostile file.
    """
    path = Path(path)
    scan = Scan(show_value(path.name), max_rank)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as problem:
        if isinstance(problem, OSError) and problem.errno == errno.ELOOP:
            scan.add("fs.type", "is a symbolic link", expected="a regular file", fix="Copy it.")
        else:
            reason = getattr(problem, "strerror", None) or str(problem)
            scan.add("fs.read", f"cannot be opened: {reason}", expected="a readable file")
        return None, scan.problems
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            scan.add("fs.type", "is not a regular file", expected="a regular file")
            return None, scan.problems
        return _scan_open(handle, status.st_size, scan), scan.problems
    except OSError as problem:
        scan.add("fs.read", f"cannot be read: {problem.strerror}", expected="a readable file")
        return None, scan.problems
    finally:
        os.close(handle)


def peek_header_bytes(path: str | Path) -> int:
    """The header length that a file states, so that many can be bounded; 0 when unreadable."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return 0
    try:
        length = int.from_bytes(os.pread(handle, 8, 0), "little")
        return length if length <= MAX_HEADER_BYTES else 0  # too long: refused unread
    except OSError:
        return 0
    finally:
        os.close(handle)


def read_header(
    path: str | Path, *, error: type[PacelineError] = DraftError, max_rank: int = MAX_RANK
) -> Header:
    """The header of a sound file; raises `error` naming the first problem."""
    header, problems = scan_header(path, max_rank=max_rank)
    require_none(problems, error, folder=str(Path(path).parent))
    if header is None:  # a header without problems exists
        raise AssertionError("scan_header returned neither a header nor a problem")
    return header


def _scan_open(handle: int, file_bytes: int, scan: Scan) -> Header | None:
    length = _read_length(handle, file_bytes, scan)
    if length is None:
        return None
    raw = os.pread(handle, length, 8)
    value, problems = scan_json(raw.rstrip(b" "), file=scan.file, limits=_LIMITS)
    for problem in problems:
        _tell_header(problem, scan)
    if not isinstance(value, dict):
        if value is not None:
            scan.add("st.header", "the header is not a JSON object", expected="an object")
        return None
    if not raw.rstrip(b" ").endswith(b"}"):
        scan.add("st.header", "the header ends with more than spaces", expected="spaces only")
    metadata = _scan_metadata(value.pop("__metadata__", {}), scan)
    if not _check_count(len(value), scan):
        return None
    tensors: dict[str, TensorInfo] = {}
    for name, entry in value.items():
        tensor = scan_entry(name, entry, 8 + length, scan)
        if tensor is not None:
            tensors[name] = tensor
    if len(tensors) == len(value):
        check_cover(tensors, 8 + length, file_bytes, scan)
    return Header(tensors=tensors, metadata=metadata, file_bytes=file_bytes)


def _check_pointer(start: bytes, file_bytes: int, scan: Scan) -> bool:
    """`lfs.pointer`: whether the file is its own content."""
    if not start.startswith(b"version https://git-lfs"):
        return True
    scan.add(
        "lfs.pointer",
        f"is a Git LFS pointer of {file_bytes} bytes, not weights",
        expected="the weights themselves",
        fix="Fetch the real file (git lfs pull) and copy that.",
    )
    return False


def _tell_header(problem: Problem, scan: Scan) -> None:
    """`st.header`, and for a name that is there twice `st.dup`."""
    if problem.rule == "json.dup":
        _tell_twice(problem, scan)
    else:
        message = f"header: {problem.message}"
        scan.add("st.header", message, where=problem.where, expected=problem.expected)


def _tell_twice(problem: Problem, scan: Scan) -> None:
    """`st.dup`."""
    message = f"header: {problem.message}"
    scan.add("st.dup", message, where=problem.where, expected=problem.expected)


def _check_count(count: int, scan: Scan) -> bool:
    """`st.count`."""
    if count > MAX_TENSORS:
        scan.add(
            "st.count",
            f"holds {count:,} tensors",
            found=count,
            expected=f"at most {MAX_TENSORS:,}",
        )
    return count <= MAX_TENSORS


def _read_length(handle: int, file_bytes: int, scan: Scan) -> int | None:
    """`st.header`: bytes of the header; None where there is none."""
    start = os.pread(handle, 64, 0)
    if not _check_pointer(start, file_bytes, scan):
        return None
    if len(start) < 10:
        scan.add(
            "st.header",
            f"is cut short: {file_bytes} bytes cannot hold a safetensors header",
            found=f"{file_bytes} bytes",
            expected="8 bytes of length and a JSON header",
            fix="Copy the file again; the last copy or save did not finish.",
        )
        return None
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= MAX_HEADER_BYTES or start[8:9] != b"{":
        scan.add(
            "st.header",
            "is not a safetensors file",
            found=f"header length {length}, first byte {start[8:9]!r}",
            expected=f"a JSON header of 2 to {MAX_HEADER_BYTES:,} bytes",
        )
        return None
    if 8 + length > file_bytes:
        scan.add(
            "st.header",
            "is cut short inside its header",
            found=f"{file_bytes} bytes",
            expected=f"at least {8 + length} bytes",
            fix="Copy the file again; the last copy or save did not finish.",
        )
        return None
    return length


def _scan_metadata(value: Any, scan: Scan) -> dict[str, str]:
    where = "__metadata__"
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        scan.add("st.meta", "metadata is not an object of strings", where=where, found=value)
        return {}
    size = sum(len(key) + len(text) for key, text in value.items())
    if size > MAX_METADATA_BYTES:
        scan.add(
            "st.meta",
            f"metadata holds {size:,} characters",
            where=where,
            expected=f"at most {MAX_METADATA_BYTES:,}",
        )
    if value.get("format", "pt") != "pt":
        scan.add(
            "st.meta",
            "the tensors are not in PyTorch layout",
            where=f"{where}.format",
            found=value["format"],
            expected="pt",
        )
    return value
