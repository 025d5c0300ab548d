"""One entry of a safetensors header, and all of them together: names, shapes, offsets, cover.

`safetensors_header` reads the file and its JSON; here each rule about what the JSON says.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from paceline.problems import Problem, show_value

__all__ = ["DTYPE_BYTES", "MAX_RANK", "Scan", "TensorInfo", "check_cover", "scan_entry"]

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

MAX_RANK = 4
MAX_DIM = 2**26
_MAX_PROBLEMS = 40
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
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


class Scan:
    """The problems of one file, so many at most. max_rank: sizes that a tensor may have."""

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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def scan_entry(name: str, entry: Any, data_start: int, scan: Scan) -> TensorInfo | None:
    """One tensor, or None where nothing of its entry can be trusted. data_start: in the file."""
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


def _check_name(name: str, scan: Scan) -> bool:
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


def _check_fields(shown: str, entry: Any, scan: Scan) -> bool:
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


def _check_dtype(shown: str, dtype: Any, scan: Scan) -> bool:
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


def _check_shape(shown: str, dtype: str, shape: Any, offsets: Any, scan: Scan) -> bool:
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


def _check_offsets(shown: str, offsets: Any, scan: Scan) -> bool:
    if (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(_is_int(offset) and offset >= 0 for offset in offsets)
    ):
        return True
    scan.add("st.cover", f"tensor '{shown}' has malformed offsets", where=shown, found=offsets)
    return False


def _check_alignment(shown: str, dtype: str, start: int, scan: Scan) -> None:
    """`st.align`."""
    if start % DTYPE_BYTES[dtype]:
        scan.add(
            "st.align",
            f"tensor '{shown}' starts at byte {start}, which is not aligned for {dtype}",
            where=shown,
            found=start,
            expected=f"a multiple of {DTYPE_BYTES[dtype]}",
        )


def check_cover(
    tensors: dict[str, TensorInfo], data_start: int, file_bytes: int, scan: Scan
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
