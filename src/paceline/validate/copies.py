"""Copies of the target's layers: bit-identical, cast, scaled, transposed, or nearly identical.

A draft's matrix is compared with every matrix of the target's layers that it could hold, by the
values at a few thousand places: runs of up to 256 columns in 16 rows, read in place. Two matrices
that were trained apart agree at such places by chance alone (correlation 0 +- 0.02); the decision
note on copies has the figures. What is not seen: rows or columns in another order, sums of layers.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from paceline.safetensors_header import TensorInfo, scan_header
from paceline.validate.packed_values import PackedMatrix, list_packed, read_packed
from paceline.validate.scan import FLOAT_BITS, decode, open_plain

__all__ = [
    "NEARLY_IDENTICAL",
    "STARTED_FROM",
    "Copy",
    "Place",
    "TargetMatrix",
    "find_copies",
    "list_places",
    "list_target_matrices",
    "list_wanted",
    "measure_similarity",
]

# A layer started from the target's still has 0.998 to 1.000 after 150,000 tokens of training, 0.92
# to 0.99 after 45 million; layers trained apart have up to 0.14. See docs/decisions, copied layers.
NEARLY_IDENTICAL = 0.995
STARTED_FROM = 0.5
_MAX_NOISE = 0.1  # of four bits with one scale a row; more says that the grid is not the matrix's
_NUM_ROWS, _NUM_COLUMNS = 16, 256
_MIN_VALUES = 64
_MAX_FILES = 1024
_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_ENDS = re.compile(r"(embed_tokens|lm_head|wte|embed_out)\.weight$")
# How closely a value comes back after it was rounded, or cut, to a dtype.
_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "input_scale")
_ROUNDING = {
    "BF16": 2.0**-8,
    "F16": 2.0**-10,
    "F32": 2.0**-20,
    "F8_E4M3": 2.0**-4,
    "F8_E5M2": 0.125,
}


@dataclass(frozen=True, kw_only=True)
class TargetMatrix:
    """kind: "layer" (what a contest may forbid to copy), "mtp" (the native head) or "ends"
    (embeddings and output layer, which a draft may share). packed: where it is quantised."""

    path: Path
    tensor: TensorInfo
    kind: str
    packed: PackedMatrix | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A region that a draft's matrix and a target's matrix of `shape` could have in common.

    region: its rows and columns in the target's orientation. mine, theirs: its corner (row, column)
    in the draft's and the target's matrix. is_transposed: the draft has rows and columns exchanged.
    is_part: it is less than the whole of one of the two.
    """

    shape: tuple[int, int]
    region: tuple[int, int]
    mine: tuple[int, int] = (0, 0)
    theirs: tuple[int, int] = (0, 0)
    is_transposed: bool = False
    is_part: bool = False


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What one matrix of a draft owes to the target. similarity: 0 to 1; how: in words."""

    matrix: TargetMatrix
    place: Place
    similarity: float
    how: str


def list_target_matrices(folder: Path) -> list[TargetMatrix]:
    """The target's matrices, plain or packed, by its headers; unreadable files are left out."""
    found = []
    for path in sorted(folder.glob("*.safetensors"))[:_MAX_FILES]:
        real = path.resolve()
        header, _ = scan_header(real)
        held = header.tensors if header else {}
        packed = _list_packed(real, held)
        plain = {
            name: tensor
            for name, tensor in held.items()
            if len(tensor.shape) == 2
            and tensor.dtype in FLOAT_BITS
            and not name.endswith(_SCALE_NAMES)
        }
        for name in {**plain, **packed}:
            kind = _tell_kind(name)
            if kind is not None:
                tensor = packed[name].tensor if name in packed else plain[name]
                found.append(
                    TargetMatrix(path=real, tensor=tensor, kind=kind, packed=packed.get(name))
                )
    return found


def _tell_kind(name: str) -> str | None:
    if name.startswith("mtp.") or ".mtp." in name:
        return "mtp"
    if _ENDS.search(name):
        return "ends"
    return "layer" if _LAYER.search(name) else None


def _list_packed(path: Path, held: Mapping[str, TensorInfo]) -> dict[str, PackedMatrix]:
    if not any(tensor.dtype in ("I32", "I8") for tensor in held.values()):
        return {}
    handle = open_plain(path)
    try:
        return list_packed(held, handle)
    finally:
        os.close(handle)


def list_places(shape: tuple[int, ...], other: tuple[int, ...]) -> list[Place]:
    """Every region that a draft's matrix `shape` could share with a target's matrix `other`.

    The whole, also transposed; and where only one dimension is the same, the first or the last part
    of the longer one: a draft that reads two inputs side by side, or one cut out of a wider layer.
    """
    height, width = other
    places = []
    for is_transposed in (False, True):
        rows, columns = (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])
        if rows != height and columns != width:
            continue
        region = (min(rows, height), min(columns, width))
        for row in sorted({0, rows - height}):
            for column in sorted({0, columns - width}):
                places.append(
                    Place(
                        shape=(height, width),
                        region=region,
                        mine=(max(0, row), max(0, column)),
                        theirs=(max(0, -row), max(0, -column)),
                        is_transposed=is_transposed,
                        is_part=(rows, columns) != (height, width),
                    )
                )
    return places


def _grid(region: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows, and for each the run of columns, where a region of this shape is looked at."""
    height, width = region
    rows = np.unique(np.linspace(0, height - 1, min(_NUM_ROWS, height)).astype(np.int64))
    run = min(_NUM_COLUMNS, width)
    # another run in each row, the same for every matrix of the shape
    starts = (np.arange(len(rows), dtype=np.int64) * 2_654_435_761) % (width - run + 1)
    return rows, starts[:, None] + np.arange(run)


def _places_in_draft(place: Place, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Flat indices in the draft's matrix of the values that the grid looks at, row by row."""
    rows, columns = _grid(place.region)
    row, column = rows[:, None] + place.mine[0], columns + place.mine[1]
    if place.is_transposed:
        row, column = column, row
    flat: NDArray[np.int64] = row * shape[1] + column
    return flat


def list_wanted(place: Place, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """The same indices in ascending order, as one pass over the file meets them."""
    return np.unique(_places_in_draft(place, shape))


def _arrange(
    values: NDArray[np.float32], place: Place, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Values in the order of `list_wanted` back on the grid."""
    flat = _places_in_draft(place, shape)
    return values[np.searchsorted(np.unique(flat), flat)]


def _read_sample(matrix: TargetMatrix, place: Place, handle: int) -> NDArray[np.float32]:
    """The target's values on the grid: one short read a row."""
    tensor = matrix.tensor
    rows, columns = _grid(place.region)
    if matrix.packed is not None:
        flat = (rows[:, None] + place.theirs[0]) * tensor.shape[1] + columns + place.theirs[1]
        return read_packed(handle, matrix.packed, flat).values
    size = tensor.num_bytes // tensor.num_elements
    parts = []
    for row, run in zip(rows.tolist(), columns, strict=True):
        first = (row + place.theirs[0]) * tensor.shape[1] + int(run[0]) + place.theirs[1]
        raw = os.pread(handle, len(run) * size, tensor.start + first * size)
        if len(raw) != len(run) * size:
            raise OSError(errno.EIO, f"{matrix.path.name} changed while it was read")
        parts.append(decode(raw, tensor.dtype))
    return np.stack(parts)


def measure_similarity(
    mine: NDArray[np.float32], theirs: NDArray[np.float32], *, noise: float = 0.0
) -> float:
    """0 for matrices that have nothing to do with each other, 1 for one and the same.

    The larger of the correlation and what the signs say: signs survive any scaling of rows and
    columns, and row by row also a change of sign. Both are given as the correlation that two
    normal variables would have. noise: what rounding to a grid added to `mine`, as a share of its
    mean square. The correlation is then the one before rounding, and row by row in place of signs,
    which small values lose.
    """
    sound = np.isfinite(mine) & np.isfinite(theirs)
    if int(np.count_nonzero(sound)) < _MIN_VALUES:
        return 0.0
    left = np.where(sound, mine, 0.0).astype(np.float64)
    right = np.where(sound, theirs, 0.0).astype(np.float64)
    linear = _correlate(left[sound], right[sound])
    if noise:
        rows = [_correlate(a, b) for a, b in zip(left, right, strict=True)]
        return min(1.0, max(linear, mean(rows)) / math.sqrt(1 - min(noise, _MAX_NOISE)))
    agreement = np.abs(np.mean(_signs(left) * _signs(right), axis=1))
    chance = np.sqrt(2 / np.pi / left.shape[1])  # of the absolute mean of random signs
    excess = max(0.0, (float(agreement.mean()) - chance) / (1 - chance))
    return max(linear, float(np.sin(np.pi / 2 * excess)))


def _correlate(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """0 to 1; of a constant 0."""
    a, b = left - left.mean(), right - right.mean()
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return abs(float(a @ b)) / norm if norm > 0 else 0.0


def _signs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Signs about zero; about its middle for a row that has nearly one sign, which would otherwise
    agree with every other such row."""
    signs = np.sign(values)
    is_one_sided = np.abs(signs.mean(axis=1)) > 0.5
    if bool(is_one_sided.any()):
        rows = values[is_one_sided]
        signs[is_one_sided] = np.sign(rows - np.median(rows, axis=1, keepdims=True))
    return signs


def _describe(
    place: Place,
    mine: NDArray[np.float32],
    theirs: NDArray[np.float32],
    dtypes: tuple[str, str],
    similarity: float,
) -> str:
    """ "cast", "scaled by 2", "nearly identical", with where and whether transposed."""
    where = (", in a part" if place.is_part else "") + (
        ", transposed" if place.is_transposed else ""
    )
    bits = [dtype[1:] for dtype in dtypes if dtype in ("I4", "I8")]
    if bits:
        return f"quantised to {bits[0]} bits (similarity {similarity:.3f} before){where}"
    a, b = mine.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    sound = np.isfinite(a) & np.isfinite(b)
    a, b = a[sound], b[sound]
    slack = max(_ROUNDING[dtype] for dtype in dtypes)
    scale = float(a @ b) / max(float(b @ b), 1e-300)
    small = 1e-6 * float(np.sqrt(np.mean(np.square(b))))
    if bool(np.array_equal(a, b)) and dtypes[0] == dtypes[1]:
        how = "identical"
    elif float(np.mean(np.abs(a - b) <= slack * np.abs(b) + small)) > 0.999:
        how = f"the same in another precision ({dtypes[1]} to {dtypes[0]})"
    elif float(np.mean(np.abs(a - scale * b) <= slack * np.abs(scale * b) + small)) > 0.99:
        how = f"the same scaled by {scale:.3g}"
    else:
        how = f"nearly identical (similarity {similarity:.3f})"
    return how + where


def find_copies(
    tensors: Mapping[str, TensorInfo],
    picked: Mapping[str, Mapping[Place, NDArray[np.float32]]],
    matrices: list[TargetMatrix],
    noise: Mapping[str, float] | None = None,
) -> dict[str, Copy]:
    """Draft tensor -> its closest matrix of the target, where similarity reaches STARTED_FROM.

    picked: by draft tensor and place, the draft's values in the order of `list_wanted`. noise: of
    quantised tensors, what rounding added (see measure_similarity).
    """
    users: dict[tuple[int, ...], list[tuple[str, Place, NDArray[np.float32]]]] = {}
    for name, places in picked.items():
        for place, values in places.items():
            mine = _arrange(values, place, tensors[name].shape)
            users.setdefault(place.shape, []).append((name, place, mine))
    best: dict[str, Copy] = {}
    handles: dict[Path, int] = {}
    try:
        for matrix in matrices:
            samples: dict[tuple[object, object], NDArray[np.float32]] = {}
            for name, place, mine in users.get(matrix.tensor.shape, []):
                if matrix.path not in handles:
                    handles[matrix.path] = open_plain(matrix.path)
                key = (place.region, place.theirs)
                if key not in samples:
                    samples[key] = _read_sample(matrix, place, handles[matrix.path])
                theirs = samples[key]
                added = (noise or {}).get(name, 0.0)
                similarity = measure_similarity(mine, theirs, noise=added)
                if similarity < STARTED_FROM:
                    continue
                if name in best and best[name].similarity >= similarity:
                    continue
                dtypes = (tensors[name].dtype, matrix.tensor.dtype)
                how = _describe(place, mine, theirs, dtypes, similarity)
                best[name] = Copy(matrix=matrix, place=place, similarity=similarity, how=how)
    finally:
        for handle in handles.values():
            os.close(handle)
    return best
