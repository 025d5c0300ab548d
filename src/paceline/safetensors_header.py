"""A strict reader of safetensors headers: no torch, no tensor loaded, bounded, no link followed.

The public library takes duplicate names (last wins), unknown fields, any name and misaligned data;
two readers can then see two different models in one file. Here each of these is a problem.
Layout: 8 bytes little-endian header length n, n bytes of JSON, then the tensor bytes.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DraftError, PacelineError
from paceline.problems import Problem, require_none, show_value
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

DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 20_000
MAX_RANK = 4
MAX_DIM = 2**26
MAX_METADATA_BYTES = 8 * 1024
_MAX_PROBLEMS = 40
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_LIMITS = JsonLimits(
    max_bytes=MAX_HEADER_BYTES, max_depth=4, max_nodes=500_000, max_string=MAX_METADATA_BYTES
)
_REWRITE = "Write the file again with safetensors.torch.save_file."


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file. start, end: absolute byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Header:
    """The table of contents of one safetensors file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int


class _Scan:
    def __init__(self, file: str, max_rank: int) -> None:
        self.file = file
        self.max_rank = max_rank
        self.problems: list[Problem] = []

    def add(
        self,
        rule: str,
        message: str,
        *,
        where: str = "",
        found: Any = "",
        expected: str = "",
        fix: str = _REWRITE,
    ) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(
                Problem(
                    rule=rule,
                    file=self.file,
                    where=where,
                    found=show_value(found),
                    expected=expected or "a sound safetensors file",
                    message=message,
                    fix=fix,
                )
            )


def scan_header(
    path: str | Path, *, max_rank: int = MAX_RANK
) -> tuple[Header | None, list[Problem]]:
    """Reads one header; returns (header, problems), header None when nothing can be trusted.

    Only the length and the header are read. A link, a device or a FIFO is a problem, never opened
    for reading. Never raises on a hostile file.
    """
    path = Path(path)
    scan = _Scan(show_value(path.name), max_rank)
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


def _scan_open(handle: int, file_bytes: int, scan: _Scan) -> Header | None:
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
        tensor = _scan_entry(name, entry, 8 + length, scan)
        if tensor is not None:
            tensors[name] = tensor
    if len(tensors) == len(value):
        _check_cover(tensors, 8 + length, file_bytes, scan)
    return Header(tensors=tensors, metadata=metadata, file_bytes=file_bytes)


def _check_pointer(start: bytes, file_bytes: int, scan: _Scan) -> bool:
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


def _tell_header(problem: Problem, scan: _Scan) -> None:
    """`st.header`, and for a name that is there twice `st.dup`."""
    if problem.rule == "json.dup":
        _tell_twice(problem, scan)
    else:
        message = f"header: {problem.message}"
        scan.add("st.header", message, where=problem.where, expected=problem.expected)


def _tell_twice(problem: Problem, scan: _Scan) -> None:
    """`st.dup`."""
    message = f"header: {problem.message}"
    scan.add("st.dup", message, where=problem.where, expected=problem.expected)


def _check_count(count: int, scan: _Scan) -> bool:
    """`st.count`."""
    if count > MAX_TENSORS:
        scan.add(
            "st.count",
            f"holds {count:,} tensors",
            found=count,
            expected=f"at most {MAX_TENSORS:,}",
        )
    return count <= MAX_TENSORS


def _read_length(handle: int, file_bytes: int, scan: _Scan) -> int | None:
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


def _scan_metadata(value: Any, scan: _Scan) -> dict[str, str]:
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _scan_entry(name: str, entry: Any, data_start: int, scan: _Scan) -> TensorInfo | None:
    shown = show_value(name)
    if not (_check_name(name, scan) and _check_fields(shown, entry, scan)):
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _check_dtype(shown, dtype, scan):
        return None
    if not _check_shape(shown, dtype, shape, offsets, scan):
        return None
    start = data_start + offsets[0]
    _check_alignment(shown, dtype, start, scan)
    return TensorInfo(
        name=name, dtype=dtype, shape=tuple(shape), start=start, end=data_start + offsets[1]
    )


def _check_name(name: str, scan: _Scan) -> bool:
    """`st.name`."""
    if _NAME.fullmatch(name):
        return True
    shown = show_value(name)
    scan.add(
        "st.name",
        f"tensor name '{shown}' is not allowed",
        where=shown,
        expected="letters, digits, '_', '-' and '.', at most 256",
    )
    return False


def _check_fields(shown: str, entry: Any, scan: _Scan) -> bool:
    """`st.fields`."""
    if isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}:
        return True
    scan.add(
        "st.fields",
        f"the entry of tensor '{shown}' has the wrong fields",
        where=shown,
        found=sorted(entry) if isinstance(entry, dict) else entry,
        expected="exactly dtype, shape and data_offsets",
    )
    return False


def _check_dtype(shown: str, dtype: Any, scan: _Scan) -> bool:
    """`st.dtype`."""
    if isinstance(dtype, str) and dtype in DTYPE_BYTES:
        return True
    scan.add(
        "st.dtype",
        f"tensor '{shown}' has an unknown dtype",
        where=shown,
        found=dtype,
        expected=", ".join(DTYPE_BYTES),
    )
    return False


def _check_shape(shown: str, dtype: str, shape: Any, offsets: Any, scan: _Scan) -> bool:
    """`st.shape`: sizes within bounds, and as many bytes as they need."""
    if (
        not isinstance(shape, list)
        or len(shape) > scan.max_rank
        or not all(_is_int(size) and 1 <= size <= MAX_DIM for size in shape)
    ):
        scan.add(
            "st.shape",
            f"tensor '{shown}' has a shape that is not allowed",
            where=shown,
            found=shape,
            expected=f"at most {scan.max_rank} sizes from 1 to {MAX_DIM:,}",
        )
        return False
    if not _check_offsets(shown, offsets, scan):
        return False
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != needed:
        scan.add(
            "st.shape",
            f"tensor '{shown}' has {offsets[1] - offsets[0]} bytes but its shape needs {needed}",
            where=shown,
            found=f"{offsets[1] - offsets[0]} bytes",
            expected=f"{needed} bytes for {dtype} {shape}",
        )
        return False
    return True


def _check_offsets(shown: str, offsets: Any, scan: _Scan) -> bool:
    if (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(_is_int(offset) and offset >= 0 for offset in offsets)
    ):
        return True
    scan.add("st.cover", f"tensor '{shown}' has malformed offsets", where=shown, found=offsets)
    return False


def _check_alignment(shown: str, dtype: str, start: int, scan: _Scan) -> None:
    """`st.align`."""
    if start % DTYPE_BYTES[dtype]:
        scan.add(
            "st.align",
            f"tensor '{shown}' starts at byte {start}, which is not aligned for {dtype}",
            where=shown,
            found=start,
            expected=f"a multiple of {DTYPE_BYTES[dtype]}",
        )


def _check_cover(
    tensors: dict[str, TensorInfo], data_start: int, file_bytes: int, scan: _Scan
) -> None:
    """Tensors must follow one another without gap or overlap, to the very end of the file."""
    expected = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != expected:
            kind = "overlaps the one before" if tensor.start < expected else "leaves a gap before"
            scan.add(
                "st.cover",
                f"tensor '{tensor.name}' {kind}",
                where=tensor.name,
                found=f"starts at byte {tensor.start}",
                expected=f"byte {expected}",
            )
            return
        expected = tensor.end
    if expected > file_bytes:
        scan.add(
            "st.cover",
            f"is cut short: its header promises {expected} bytes, the file has {file_bytes}",
            found=f"{file_bytes} bytes",
            expected=f"{expected} bytes",
            fix="Copy the file again; the last copy or save did not finish.",
        )
    elif expected < file_bytes:
        scan.add(
            "st.cover",
            f"has {file_bytes - expected} bytes after its last tensor",
            found=f"{file_bytes} bytes",
            expected=f"{expected} bytes",
        )
