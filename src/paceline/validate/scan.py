"""One pass over the values of a weight file: bit tests in pieces, with numpy alone.

Bytes are read once, into one buffer of a few megabytes, by plain reads: a file that is cut
meanwhile is an error and not a signal. A float is judged by its bits, so nothing is converted.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.safetensors_header import TensorInfo

__all__ = [
    "FLOAT_BITS",
    "Measured",
    "decode",
    "has_same_bytes",
    "measure_tensor",
    "open_plain",
    "read_pieces",
]

PIECE_BYTES = 2**22  # a multiple of every element size
_SAMPLE = 2**14  # values of a piece that the root mean square looks at
_FP16_MAX = 65504.0


@dataclass(frozen=True, kw_only=True)
class FloatBits:
    """How one dtype spells its values: magnitude mask, the first pattern that is not finite, and
    the first that float16 cannot hold (None: all fit)."""

    view: str
    mask: int
    infinite: int
    over_fp16: int | None


FLOAT_BITS: dict[str, FloatBits] = {
    "BF16": FloatBits(view="<u2", mask=0x7FFF, infinite=0x7F80, over_fp16=0x4780),
    "F16": FloatBits(view="<u2", mask=0x7FFF, infinite=0x7C00, over_fp16=None),
    "F32": FloatBits(view="<u4", mask=0x7FFFFFFF, infinite=0x7F800000, over_fp16=0x477FE001),
    # E4M3 of the "fn" kind has no infinity, one NaN, and ends at 448
    "F8_E4M3": FloatBits(view="<u1", mask=0x7F, infinite=0x7F, over_fp16=None),
    "F8_E5M2": FloatBits(view="<u1", mask=0x7F, infinite=0x7C, over_fp16=None),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one pass found. rms: of all values of a small tensor, of a regular sample of a large.

    fingerprint: of the same sample; equal for equal tensors, and nearly never for others.
    picked: values at the flat indices that the caller asked for, by the caller's key.
    """

    num_bad: int
    num_over_fp16: int
    largest: float
    rms: float
    is_constant: bool
    fingerprint: str
    picked: Mapping[Any, NDArray[np.float32]] = field(default_factory=dict)


def _fp8_table(exponent_bits: int) -> NDArray[np.float32]:
    """All 256 values of an 8-bit float: E4M3 (bias 7) or E5M2 (bias 15)."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(128)
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    part = mantissa / 2.0**mantissa_bits
    size = np.where(
        exponent == 0, part * 2.0 ** (1 - bias), (1 + part) * 2.0 ** (exponent - float(bias))
    )
    if exponent_bits == 5:
        size[0x7C] = np.inf
        size[0x7D:] = np.nan
    else:
        size[0x7F] = np.nan
    table: NDArray[np.float32] = np.concatenate([size, -size]).astype(np.float32)
    return table


_FP8 = {"F8_E4M3": _fp8_table(4), "F8_E5M2": _fp8_table(5)}


def decode(raw: bytes | memoryview | NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """float32 values of raw bytes. bfloat16 is the upper half of a float32."""
    bits = np.frombuffer(raw, dtype=FLOAT_BITS[dtype].view)
    return _decode_bits(bits, dtype)


def _decode_bits(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        with np.errstate(invalid="ignore"):  # a NaN that signals is a NaN
            return bits.view("<f2").astype(np.float32)
    if dtype == "F32":
        return bits.view("<f4").astype(np.float32)
    values: NDArray[np.float32] = _FP8[dtype][bits]
    return values


def open_plain(path: Path) -> int:
    """A read-only descriptor; never follows a link, never waits for a FIFO. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_pieces(
    handle: int, tensor: TensorInfo, *, piece_bytes: int = PIECE_BYTES
) -> Iterator[memoryview]:
    """The bytes of one tensor, piece by piece in one buffer: each is valid until the next."""
    buffer = memoryview(bytearray(min(piece_bytes, max(1, tensor.num_bytes))))
    for begin in range(tensor.start, tensor.end, piece_bytes):
        piece = buffer[: min(piece_bytes, tensor.end - begin)]
        filled = 0
        while filled < len(piece):  # a signal may end a read early
            count = os.preadv(handle, [piece[filled:]], begin + filled)
            if count == 0:
                raise OSError(errno.EIO, "the file changed while it was read")
            filled += count
        yield piece


def has_same_bytes(path: Path, tensor: TensorInfo, other_path: Path, other: TensorInfo) -> bool:
    """Compares piece by piece and stops at the first difference."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    mine, theirs = open_plain(path), open_plain(other_path)
    try:
        pairs = zip(read_pieces(mine, tensor), read_pieces(theirs, other), strict=True)
        return all(left == right for left, right in pairs)
    finally:
        os.close(mine)
        os.close(theirs)


def measure_tensor(
    handle: int,
    tensor: TensorInfo,
    wanted: Mapping[Any, NDArray[np.int64]] | None = None,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> Measured:
    """One pass over a float tensor. wanted: flat indices, ascending, by key of the caller."""
    form = FLOAT_BITS[tensor.dtype]
    digest = hashlib.sha256()
    work = np.empty(piece_bytes // np.dtype(form.view).itemsize, dtype=form.view)
    bad = over = position = num_sampled = 0
    top, first = 0, -1
    is_constant = True
    square = 0.0
    picked: dict[Any, list[NDArray[np.float32]]] = {key: [] for key in wanted or {}}
    for piece in read_pieces(handle, tensor, piece_bytes=piece_bytes):
        bits = np.frombuffer(piece, dtype=form.view)
        size = work[: len(bits)]
        np.bitwise_and(bits, form.mask, out=size)
        largest = int(size.max())
        if form.over_fp16 is not None and largest >= form.over_fp16:
            over += int(np.count_nonzero((size >= form.over_fp16) & (size < form.infinite)))
        if largest >= form.infinite:
            bad += int(np.count_nonzero(size >= form.infinite))
            finite = size[size < form.infinite]
            largest = int(finite.max()) if len(finite) else 0
        top = max(top, largest)
        if is_constant:
            first = int(bits[0]) if first < 0 else first
            is_constant = bool(bits[-1] == first) and bool(np.all(bits == first))
        sample = np.ascontiguousarray(bits[:: max(1, len(bits) // _SAMPLE)])
        digest.update(sample.tobytes())
        values = _decode_bits(sample, tensor.dtype)
        values = values[np.isfinite(values)]
        if len(values):
            square += float(np.square(values, dtype=np.float64).sum())
            num_sampled += len(values)
        for key, indices in (wanted or {}).items():
            low, high = np.searchsorted(indices, (position, position + len(bits)))
            if high > low:
                picked[key].append(_decode_bits(bits[indices[low:high] - position], tensor.dtype))
        position += len(bits)
    return Measured(
        num_bad=bad,
        num_over_fp16=over,
        largest=float(_decode_bits(np.array([top], dtype=form.view), tensor.dtype)[0]),
        rms=float(np.sqrt(square / max(1, num_sampled))),
        is_constant=is_constant and bad == 0,
        fingerprint=digest.hexdigest(),
        picked={
            key: np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)
            for key, parts in picked.items()
        },
    )
