"""Rules about weight values (`--deep`): tensor by tensor, in pieces, with numpy alone."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.draft import canonical_name
from paceline.safetensors_header import TensorInfo, scan_header
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_values", "decode", "read_raw"]

_PIECE = 2**22  # bytes held at once, a multiple of every element size
_FP16_MAX = 65504.0
_VIEW = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
# Small matrices of a target are searched by shape and dtype; a draft's own copies by content.
_SHARED = {"embed_tokens.weight", "lm_head.weight"}


@dataclass(frozen=True, kw_only=True)
class _Values:
    num_bad: int
    num_over_fp16: int
    largest: float
    rms: float
    is_constant: bool
    sha256: str


def read_raw(path: Path, tensor: TensorInfo, *, piece_bytes: int = _PIECE) -> Iterator[bytes]:
    """The bytes of one tensor in pieces. Plain reads: a file cut meanwhile cannot kill us."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for begin in range(tensor.start, tensor.end, piece_bytes):
            size = min(piece_bytes, tensor.end - begin)
            piece = os.pread(handle, size, begin)
            if len(piece) != size:
                raise OSError(errno.EIO, f"{path.name} changed while it was read")
            yield piece
    finally:
        os.close(handle)


def decode(piece: bytes, dtype: str) -> NDArray[np.float32]:
    """float32 values of raw bytes. bfloat16 is the upper half of a float32."""
    values: NDArray[Any] = np.frombuffer(piece, dtype=_VIEW[dtype])
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _measure(path: Path, tensor: TensorInfo) -> _Values:
    digest = hashlib.sha256()
    bad = over = 0
    square = largest = 0.0
    low, high = np.inf, -np.inf
    for raw in read_raw(path, tensor):
        digest.update(raw)
        values = decode(raw, tensor.dtype)
        finite = np.isfinite(values)
        bad += int(values.size - np.count_nonzero(finite))
        sound = values[finite].astype(np.float64)
        if sound.size:
            size = np.abs(sound)
            over += int(np.count_nonzero(size > _FP16_MAX))
            largest = max(largest, float(size.max()))
            square += float(np.square(sound).sum())
            low, high = min(low, float(sound.min())), max(high, float(sound.max()))
    return _Values(
        num_bad=bad,
        num_over_fp16=over,
        largest=largest,
        rms=float(np.sqrt(square / max(1, tensor.num_elements - bad))),
        is_constant=bad == 0 and low == high,
        sha256=digest.hexdigest(),
    )


def check_values(case: Case) -> Iterator[Finding]:
    """Reads every float tensor once. Headers must be sound: callers check that first."""
    seen: dict[str, str] = {}
    target_tensors = _index_target(case)
    for file, tensors in case.scan.tensors_by_file.items():
        for name, tensor in tensors.items():
            if tensor.dtype not in _VIEW:
                continue
            values = _measure(case.scan.path / file, tensor)
            yield from _check_one(file, name, tensor, values)
            if len(tensor.shape) < 2:
                continue  # norms are often all ones: equal by nature
            other = seen.setdefault(values.sha256, name)
            if other != name:
                yield finding(
                    "ten.dupcontent",
                    file,
                    f"tensors '{other}' and '{name}' have the same content",
                    where=name,
                    found="the same bytes",
                    expected="different weights",
                    fix="Check the export: one of the two is probably a copy by mistake.",
                )
            yield from _check_copy(case, file, name, tensor, values, target_tensors)


def _check_one(file: str, name: str, tensor: TensorInfo, values: _Values) -> Iterator[Finding]:
    if values.num_bad:
        yield finding(
            "ten.finite",
            file,
            f"tensor '{name}' holds {values.num_bad} values that are NaN or infinite",
            where=name,
            found=values.num_bad,
            expected="finite values",
            fix="The training run diverged: export an earlier checkpoint.",
        )
        return
    if values.num_over_fp16:
        many = values.num_over_fp16
        yield finding(
            "ten.fp16",
            file,
            f"{many} value{'s' if many > 1 else ''} exceed{'' if many > 1 else 's'} the fp16 range"
            f" 65504 (largest {values.largest:g})",
            where=name,
            found=f"{values.largest:g}",
            expected="at most 65504 in size",
            fix="Serve in bfloat16 only. Activations can overflow even where weights fit.",
        )
    if len(tensor.shape) >= 2 and tensor.num_elements > 1 and values.is_constant:
        yield finding(
            "ten.const",
            file,
            f"every value of '{name}' is the same",
            where=name,
            found=f"{values.largest:g}" if values.largest else "0",
            expected="trained weights",
            fix="The tensor was probably never trained or never filled.",
        )
    elif values.rms > 100.0 or 0.0 < values.rms < 1e-6:
        yield finding(
            "ten.norm",
            file,
            f"the values of '{name}' have an unusual size (root mean square {values.rms:.3g})",
            where=name,
            found=f"{values.rms:.3g}",
            expected="between 1e-6 and 100",
            fix="Check the export's dtype and scale.",
        )


def _index_target(case: Case) -> dict[tuple[str, tuple[int, ...]], list[tuple[Path, TensorInfo]]]:
    """The target's matrices by dtype and shape; unreadable files are left out."""
    found: dict[tuple[str, tuple[int, ...]], list[tuple[Path, TensorInfo]]] = {}
    if case.target is None:
        return found
    for path in sorted(case.target.path.glob("*.safetensors"))[:64]:
        header, _ = scan_header(path.resolve())
        for tensor in (header.tensors if header else {}).values():
            if len(tensor.shape) >= 2:
                found.setdefault((tensor.dtype, tensor.shape), []).append((path.resolve(), tensor))
    return found


def _check_copy(
    case: Case,
    file: str,
    name: str,
    tensor: TensorInfo,
    values: _Values,
    target_tensors: dict[tuple[str, tuple[int, ...]], list[tuple[Path, TensorInfo]]],
) -> Iterator[Finding]:
    shared = canonical_name(name) in _SHARED
    for path, other in target_tensors.get((tensor.dtype, tensor.shape), []):
        if _equal(case.scan.path / file, tensor, path, other):
            yield finding(
                "ten.copy",
                file,
                f"tensor '{name}' is a bit-identical copy of the target's '{other.name}'"
                + ("; vLLM drops it and uses the target's" if shared else ""),
                where=name,
                found=f"sha256 {values.sha256[:12]}…",
                expected="no copy of a target layer",
                fix="Leave it out: it is shared anyway."
                if shared
                else "Copying target layers is not a draft; train the layer.",
                severity="note" if shared else None,
            )
            return
    if canonical_name(name) == "embed_tokens.weight" and case.target is not None:
        yield from _check_own_embeddings(case, file, name, tensor, target_tensors)


def _equal(path: Path, tensor: TensorInfo, other_path: Path, other: TensorInfo) -> bool:
    """Compares piece by piece and stops at the first difference."""
    pairs = zip(read_raw(path, tensor), read_raw(other_path, other), strict=True)
    return all(mine == theirs for mine, theirs in pairs)


def _check_own_embeddings(
    case: Case,
    file: str,
    name: str,
    tensor: TensorInfo,
    target_tensors: dict[tuple[str, tuple[int, ...]], list[tuple[Path, TensorInfo]]],
) -> Iterator[Finding]:
    """U07: the record says shared, but the values are others."""
    trained = (case.scan.metadata or {}).get("trained")
    record = trained.get("embeddings") if isinstance(trained, dict) else None
    if not isinstance(record, str) or "shared" not in record:
        return
    for path, other in target_tensors.get((tensor.dtype, tensor.shape), []):
        if not other.name.endswith("embed_tokens.weight"):
            continue
        row = tensor.num_bytes // tensor.shape[0]
        rows = row * max(1, _PIECE // row)
        pieces = zip(
            read_raw(case.scan.path / file, tensor, piece_bytes=rows),
            read_raw(path, other, piece_bytes=rows),
            strict=True,
        )
        differ = sum(_count_rows(mine, theirs, row) for mine, theirs in pieces)
        yield finding(
            "ten.embed",
            file,
            f"the record says the embeddings are shared with the target, but values differ in"
            f" {differ} of {tensor.shape[0]} rows",
            where=name,
            found=f"{differ} rows differ",
            expected="no tensor, or the target's own values",
            fix="Leave embed_tokens.weight out of the export.",
            severity="error",
        )
        return


def _count_rows(mine: bytes, theirs: bytes, row_bytes: int) -> int:
    """Rows that differ anywhere."""
    left = np.frombuffer(mine, dtype="<u1").reshape(-1, row_bytes)
    right = np.frombuffer(theirs, dtype="<u1").reshape(-1, row_bytes)
    return int(np.count_nonzero((left != right).any(axis=1)))
