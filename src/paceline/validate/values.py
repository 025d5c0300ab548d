"""Rules about weight values (`--deep`): one pass over each file, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.safetensors_header import TensorInfo
from paceline.validate.case import Case
from paceline.validate.copies import (
    Place,
    TargetMatrix,
    find_copies,
    list_places,
    list_target_matrices,
    list_wanted,
)
from paceline.validate.copy_findings import tell_copies, tell_not_compared
from paceline.validate.packed_values import list_packed, read_packed
from paceline.validate.report import Finding, finding
from paceline.validate.scan import (
    FLOAT_BITS,
    Measured,
    decode,
    has_same_bytes,
    measure_tensor,
    open_plain,
    read_pieces,
)

__all__ = ["check_values"]

_PIECE = 2**22
_MAX_COMPARED = 256
_SHARED = ("embed_tokens.weight", "lm_head.weight")
_CODES = {"I32": "<u4", "I8": "<i1"}  # how quantised weights are stored
_SCALES = ("weight_scale", "weight_scale_inv", "input_scale")


def check_values(case: Case) -> Iterator[Finding]:
    """Reads every float tensor once. Headers must be sound: callers check that first."""
    matrices = list_target_matrices(case.target.path) if case.target is not None else []
    shapes = {matrix.tensor.shape for matrix in matrices if matrix.kind != "ends"}
    seen: dict[str, tuple[str, TensorInfo]] = {}
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, str] = {}
    picked: dict[str, Mapping[Place, NDArray[np.float32]]] = {}
    noise: dict[str, float] = {}
    for file, held in case.scan.tensors_by_file.items():
        handle = open_plain(case.scan.path / file)
        try:
            for name, tensor in sorted(held.items(), key=lambda item: item[1].start):
                if name.endswith("weight_shape"):
                    yield from _check_stored_shape(file, name, tensor, held, handle)
                if tensor.dtype in _CODES and len(tensor.shape) == 2:
                    yield from _check_codes(file, name, tensor, handle)
                if tensor.dtype not in FLOAT_BITS:
                    continue
                wanted = {}
                if len(tensor.shape) == 2 and _is_compared(case, name, len(tensors)):
                    places = [
                        place for other in shapes for place in list_places(tensor.shape, other)
                    ]
                    wanted = {place: list_wanted(place, tensor.shape) for place in places}
                values = measure_tensor(handle, tensor, wanted)
                if wanted:
                    tensors[name], files[name] = tensor, file
                    picked[name] = values.picked
                yield from _check_one(file, name, tensor, values)
                if name.endswith(_SCALES):
                    yield from _check_scale(file, name, tensor, handle)
                yield from _check_twice(case, file, tensor, values, seen)
                if name.endswith(_SHARED):
                    yield from _check_shared(case, file, name, tensor, matrices)
            for name, matrix in list_packed(held, handle).items() if shapes else ():
                if not _is_compared(case, name, len(tensors)):
                    continue
                samples = {
                    place: read_packed(handle, matrix, list_wanted(place, matrix.shape))
                    for other in shapes
                    for place in list_places(matrix.shape, other)
                }
                tensors[name], files[name] = matrix.tensor, file
                picked[name] = {place: sample.values for place, sample in samples.items()}
                noise[name] = max((sample.noise for sample in samples.values()), default=0.0)
        finally:
            os.close(handle)
    if matrices:
        found = find_copies(tensors, picked, matrices, noise)
        yield from tell_copies(case, files, tensors, found)
    yield from tell_not_compared(case, matrices, tensors)


def _is_compared(case: Case, name: str, num_compared: int) -> bool:
    """Held against every matrix of the target: tensors with a place in the draft, whose number its
    sizes bound; of a draft without sizes, the first few. Others are refused as they are."""
    if name.endswith(_SHARED):
        return False
    if case.contract is None or case.contract.variant is None:
        return num_compared < _MAX_COMPARED
    return case.contract.canonical(name) in case.contract.tensors


def _check_one(file: str, name: str, tensor: TensorInfo, values: Measured) -> Iterator[Finding]:
    if values.num_bad:
        yield _tell_not_finite(file, name, values)
        return
    if values.num_over_fp16:
        yield _tell_over_fp16(file, name, values)
    if name.endswith(_SCALES):
        return  # equal or tiny by nature; their own rule looks at their sign
    is_matrix = len(tensor.shape) >= 2 and tensor.num_elements > 1
    # a norm of ones is fine, of zeros it lets nothing through; Qwen3.5's add one to what is stored
    is_zero_norm = name.endswith("norm.weight") and not name.startswith("mtp.")
    if values.is_constant and (is_matrix or (is_zero_norm and not values.largest)):
        yield _tell_constant(file, name, values)
    elif not tensor.dtype.startswith("F8") and (values.rms > 100.0 or 0.0 < values.rms < 1e-6):
        yield _tell_size(file, name, values)


def _tell_not_finite(file: str, name: str, values: Measured) -> Finding:
    return finding(
        "ten.finite",
        file,
        f"tensor '{name}' holds {values.num_bad} values that are NaN or infinite",
        where=name,
        found=values.num_bad,
        expected="finite values",
        fix="The training run diverged: export an earlier checkpoint.",
    )


def _tell_over_fp16(file: str, name: str, values: Measured) -> Finding:
    many = values.num_over_fp16
    return finding(
        "ten.fp16",
        file,
        f"{many} value{'s' if many > 1 else ''} exceed{'' if many > 1 else 's'} the fp16 range"
        f" 65504 (largest {values.largest:g})",
        where=name,
        found=f"{values.largest:g}",
        expected="at most 65504 in size",
        fix="Serve in bfloat16 only. Activations can overflow even where weights fit.",
    )


def _tell_constant(file: str, name: str, values: Measured) -> Finding:
    return finding(
        "ten.const",
        file,
        f"every value of '{name}' is the same",
        where=name,
        found=f"{values.largest:g}" if values.largest else "0",
        expected="trained weights",
        fix="The tensor was probably never trained or never filled.",
    )


def _tell_size(file: str, name: str, values: Measured) -> Finding:
    return finding(
        "ten.norm",
        file,
        f"the values of '{name}' have an unusual size (root mean square {values.rms:.3g})",
        where=name,
        found=f"{values.rms:.3g}",
        expected="between 1e-6 and 100",
        fix="Check the export's dtype and scale.",
    )


def _check_codes(file: str, name: str, tensor: TensorInfo, handle: int) -> Iterator[Finding]:
    """`ten.const` of quantised weights: every stored word or byte is the first one."""
    first = None
    for piece in read_pieces(handle, tensor):
        words = np.frombuffer(piece, dtype=_CODES[tensor.dtype])
        first = words[0] if first is None else first
        if bool(np.any(words != first)):
            return
    yield finding(
        "ten.const",
        file,
        f"every value of '{name}' is the same",
        where=name,
        found="one code alone",
        expected="trained weights",
        fix="The tensor was probably never trained or never filled.",
    )


def _check_scale(file: str, name: str, tensor: TensorInfo, handle: int) -> Iterator[Finding]:
    """Scales of a quantised layer: a zero or a negative one turns weights into something else."""
    wrong = 0
    for piece in read_pieces(handle, tensor):
        values = decode(piece, tensor.dtype)
        wrong += int(np.count_nonzero(~(values > 0)))
    if wrong:
        yield finding(
            "ten.scale",
            file,
            f"{wrong} scales of '{name}' are not positive",
            where=name,
            found=wrong,
            expected="positive scales",
            fix="Quantise the layer again: a group of zeros still has a small positive scale.",
        )


def _check_stored_shape(
    file: str, name: str, tensor: TensorInfo, held: Mapping[str, TensorInfo], handle: int
) -> Iterator[Finding]:
    """`weight_shape` of a packed layer: the engine cuts the unpacked rows and columns by it."""
    packed = held.get(name.removesuffix("weight_shape") + "weight_packed")
    if packed is None or tensor.dtype != "I64" or tensor.num_elements != 2:
        return
    rows, columns = np.frombuffer(next(read_pieces(handle, tensor)), dtype="<i8").tolist()
    words = packed.shape[-1]
    # an int32 word holds 4, 8 or 16 values of 8, 4 or 2 bits
    fits = any(-(-columns // values) == words for values in (4, 8, 16))
    if rows != packed.shape[0] or not fits:
        yield finding(
            "ten.scale",
            file,
            f"'{name}' says {rows} x {columns}, but the packed weight has {packed.shape[0]} rows of"
            f" {words} words",
            where=name,
            found=f"[{rows}, {columns}]",
            expected=f"{packed.shape[0]} rows of {4 * words}, {8 * words} or {16 * words} columns",
            fix="Quantise the layer again, or copy its file again.",
        )


def _check_twice(
    case: Case,
    file: str,
    tensor: TensorInfo,
    values: Measured,
    seen: dict[str, tuple[str, TensorInfo]],
) -> Iterator[Finding]:
    if len(tensor.shape) < 2 or tensor.name.endswith(_SCALES):
        return  # norms are often all ones: equal by nature
    other_file, other = seen.setdefault(values.fingerprint, (file, tensor))
    folder = case.scan.path
    if other is not tensor and has_same_bytes(folder / file, tensor, folder / other_file, other):
        yield finding(
            "ten.dupcontent",
            file,
            f"tensors '{other.name}' and '{tensor.name}' have the same content",
            where=tensor.name,
            found="the same bytes",
            expected="different weights",
            fix="Check the export: one of the two is probably a copy by mistake.",
        )


def _check_shared(
    case: Case, file: str, name: str, tensor: TensorInfo, matrices: list[TargetMatrix]
) -> Iterator[Finding]:
    """Embeddings and output layer: sharing is fine, and U07: a record that says so must be true."""
    last = next(end for end in _SHARED if name.endswith(end))
    path = case.scan.path / file
    same_kind = [
        other for other in matrices if other.kind == "ends" and other.tensor.shape == tensor.shape
    ]
    for other in same_kind:
        if has_same_bytes(path, tensor, other.path, other.tensor):
            borrows = case.contract is None or bool(
                case.contract.variant is not None and case.contract.variant.shared
            )
            yield finding(
                "ten.copy",
                file,
                f"tensor '{name}' is a bit-identical copy of the target's '{other.tensor.name}'"
                + ("; vLLM drops it and uses the target's" if borrows else ", which is fine"),
                where=name,
                found="the same bytes",
                expected="no tensor" if borrows else "what training used",
                fix="Leave it out: it is shared anyway."
                if borrows
                else "Nothing is wrong with it.",
                severity="note",
            )
            return
    trained = (case.scan.metadata or {}).get("trained")
    key = "embeddings" if last == _SHARED[0] else "lm_head"
    record = trained.get(key) if isinstance(trained, dict) else None
    if not isinstance(record, str) or "shared" not in record:
        return
    for other in same_kind:
        if other.tensor.name.endswith(last) and other.tensor.dtype == tensor.dtype:
            yield _tell_differs(path, name, tensor, other, key)
            return


def _tell_differs(
    path: Path, name: str, tensor: TensorInfo, other: TargetMatrix, key: str
) -> Finding:
    row = tensor.num_bytes // tensor.shape[0]
    rows = row * max(1, _PIECE // row)
    mine, theirs = open_plain(path), open_plain(other.path)
    try:
        pieces = zip(
            read_pieces(mine, tensor, piece_bytes=rows),
            read_pieces(theirs, other.tensor, piece_bytes=rows),
            strict=True,
        )
        differ = sum(_count_rows(left, right, row) for left, right in pieces)
    finally:
        os.close(mine)
        os.close(theirs)
    what = "embeddings are" if key == "embeddings" else "output layer is"
    return finding(
        "ten.embed" if key == "embeddings" else "ten.lm_head",
        path.name,
        f"the record says the {what} shared with the target, but values differ in"
        f" {differ} of {tensor.shape[0]} rows",
        where=name,
        found=f"{differ} rows differ",
        expected="no tensor, or the target's own values",
        fix=f"Leave {name} out of the export.",
        severity="error",
    )


def _count_rows(mine: memoryview, theirs: memoryview, row_bytes: int) -> int:
    """Rows that differ anywhere."""
    left = np.frombuffer(mine, dtype="<u1").reshape(-1, row_bytes)
    right = np.frombuffer(theirs, dtype="<u1").reshape(-1, row_bytes)
    return int(np.count_nonzero((left != right).any(axis=1)))
