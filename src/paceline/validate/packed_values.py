"""Quantised matrices as numbers, at the places that are asked for: numpy alone, read in place.

The compressed-tensors format: integers of 4 or 8 bits in ascending places of little-endian 32-bit
words along the inputs, or one a byte, times the scale of their row and group.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.safetensors_header import TensorInfo
from paceline.validate.scan import FLOAT_BITS, decode

__all__ = ["PackedMatrix", "PackedSample", "list_packed", "read_packed"]

_WORD_BITS = 32


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """codes: integers as stored, words or bytes; scale: rows x groups; shape: of the weight."""

    name: str
    codes: TensorInfo
    scale: TensorInfo
    shape: tuple[int, int]
    num_bits: int

    @property
    def tensor(self) -> TensorInfo:
        """As one tensor of the matrix's own shape; its bytes are the codes alone."""
        return TensorInfo(
            name=self.name,
            dtype=f"I{self.num_bits}",
            shape=self.shape,
            start=self.codes.start,
            end=self.codes.end,
        )


@dataclass(frozen=True, kw_only=True)
class PackedSample:
    """values: as the engine multiplies by them. noise: what rounding to the grid adds to a value on
    average, squared, as a share of the values' own mean square (0 to 1)."""

    values: NDArray[np.float32]
    noise: float


def list_packed(held: Mapping[str, TensorInfo], handle: int) -> dict[str, PackedMatrix]:
    """Every quantised matrix of one file whose parts fit each other, by the name of its weight."""
    found = {}
    for name, tensor in held.items():
        stem, _, part = name.rpartition("weight")
        scale = held.get(f"{stem}weight_scale")
        if scale is None or scale.dtype not in FLOAT_BITS or len(tensor.shape) != 2:
            continue
        shape: tuple[int, ...] = tensor.shape
        num_bits = 8
        if part == "_packed" and tensor.dtype == "I32":
            shape = _read_shape(held.get(f"{stem}weight_shape"), handle)
            width = tensor.shape[1] * _WORD_BITS
            num_bits = width // shape[1] if len(shape) == 2 and shape[1] > 0 else 0
            if num_bits not in (4, 8) or (tensor.shape[0], width) != (
                shape[0],
                num_bits * shape[1],
            ):
                continue
        elif part != "" or tensor.dtype != "I8":
            continue
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        if not scale.num_elements or scale.shape[0] != shape[0] or shape[1] % groups:
            continue
        found[f"{stem}weight"] = PackedMatrix(
            name=f"{stem}weight",
            codes=tensor,
            scale=scale,
            shape=(shape[0], shape[1]),
            num_bits=num_bits,
        )
    return found


def _read_shape(tensor: TensorInfo | None, handle: int) -> tuple[int, ...]:
    if tensor is None or tensor.dtype != "I64" or tensor.num_elements != 2:
        return ()
    raw = os.pread(handle, 16, tensor.start)
    return tuple(np.frombuffer(raw, dtype="<i8").tolist()) if len(raw) == 16 else ()


def read_packed(handle: int, matrix: PackedMatrix, flat: NDArray[np.int64]) -> PackedSample:
    """Values at flat indices of the matrix, in the order and shape of `flat`."""
    row, column = np.divmod(flat, matrix.shape[1])
    groups = matrix.scale.num_elements // matrix.shape[0]
    at = row * groups + column // (matrix.shape[1] // groups)
    scale = _read_elements(handle, matrix.scale, at, FLOAT_BITS[matrix.scale.dtype].view)
    step = decode(np.ascontiguousarray(scale).ravel(), matrix.scale.dtype).reshape(flat.shape)
    if matrix.codes.dtype == "I8":
        codes = _read_elements(handle, matrix.codes, flat, "<i1").astype(np.int64)
    else:
        each = _WORD_BITS // matrix.num_bits
        words = row * matrix.codes.shape[1] + column // each
        place = (column % each) * matrix.num_bits
        raw = _read_elements(handle, matrix.codes, words, "<u4").astype(np.int64)
        half = 2 ** (matrix.num_bits - 1)
        codes = ((raw >> place) & (2 * half - 1)) - half
    values = (codes * step).astype(np.float32)
    power = float(np.mean(np.square(values, dtype=np.float64)))
    error = float(np.mean(np.square(step, dtype=np.float64))) / 12.0  # of rounding to a grid
    noise = min(1.0, error / power) if power > 0 and np.isfinite(power + error) else 1.0
    return PackedSample(values=values, noise=noise)


def _read_elements(
    handle: int, tensor: TensorInfo, flat: NDArray[np.int64], view: str
) -> NDArray[Any]:
    """Stored elements at flat indices: one short read for each run of neighbours."""
    size = np.dtype(view).itemsize
    unique, back = np.unique(flat, return_inverse=True)
    edges = np.flatnonzero(np.diff(unique) != 1) + 1
    parts = []
    for run in np.split(unique, edges):
        num_bytes = len(run) * size
        raw = os.pread(handle, num_bytes, tensor.start + int(run[0]) * size)
        if len(raw) != num_bytes:
            raise OSError(errno.EIO, "the file changed while it was read")
        parts.append(np.frombuffer(raw, dtype=view))
    values: NDArray[Any] = np.concatenate(parts)[back].reshape(flat.shape)
    return values
