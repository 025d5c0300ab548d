"""Rules about the vocabulary map: d2t holds offsets, target id = i + d2t[i]."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.safetensors_header import TensorInfo
from paceline.validate.case import Case
from paceline.validate.report import Finding, finding

__all__ = ["check_token_map", "check_vocabulary"]

_MAX_ROWS = 2**22  # 32 MB of int64: above any vocabulary
_HINT = " It looks like absolute ids: subtract the index, d2t[i] = id - i."


def _read(path: Path, tensor: TensorInfo, dtype: str) -> NDArray[Any] | None:
    """The values of one small tensor; None when the file changed or cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.pread(handle, tensor.num_bytes, tensor.start)
    except OSError:
        return None
    finally:
        os.close(handle)
    return np.frombuffer(data, dtype=dtype) if len(data) == tensor.num_bytes else None


def _find(case: Case, name: str) -> tuple[str, TensorInfo] | None:
    """The tensor, when contract and header agree on it, so that its values can be read."""
    rule = case.contract.tensors.get(name) if case.contract else None
    for file, tensors in case.scan.tensors_by_file.items():
        tensor = tensors.get(name)
        if tensor is not None:
            right = rule is not None and tensor.shape == rule.shape and tensor.dtype in rule.dtypes
            return (file, tensor) if right and tensor.num_elements <= _MAX_ROWS else None
    return None


def check_vocabulary(case: Case) -> Iterator[Finding]:
    """`ten.d2t` and `ten.t2d`: reads only these two tensors."""
    if case.contract is None or case.contract.sizes is None or "t2d" not in case.contract.tensors:
        return
    numbers, flags = case.contract.sizes.numbers, case.contract.sizes.flags
    vocab_size = numbers["vocab_size"]
    kept: NDArray[np.int64] | None = None
    mask_place = _find(case, "t2d")
    if mask_place is not None:
        mask = _read(case.scan.path / mask_place[0], mask_place[1], "<u1")
        if mask is not None:
            yield from _check_mask(mask_place[0], mask)
            kept = np.flatnonzero(mask)
    place = _find(case, "d2t")
    if place is None:
        if kept is not None and "draft_vocabulary" not in flags and len(kept) != vocab_size:
            yield finding(
                "ten.t2d",
                mask_place[0] if mask_place else "",
                f"t2d keeps {len(kept)} ids, but the draft has the full vocabulary",
                where="t2d",
                found=len(kept),
                expected=str(vocab_size),
                fix="Remove t2d, or write the draft with its draft_vocab_size.",
                severity="warning",
            )
        return
    file, tensor = place
    width = {"I64": "<i8", "I32": "<i4", "I16": "<i2"}[tensor.dtype]
    offsets = _read(case.scan.path / file, tensor, width)
    if offsets is None:
        yield finding(
            "fs.read",
            file,
            "'d2t' could not be read",
            where="d2t",
            expected="a readable file",
            fix="Copy the file again.",
        )
        return
    yield from _check_offsets(case, file, offsets.astype(np.int64), vocab_size, kept)


def check_token_map(case: Case) -> Iterator[Finding]:
    """`ten.token_map`: Medusa's rows of a cut vocabulary are the target ids themselves."""
    vocab_size = case.config.get("vocab_size")
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool):
        return
    for file, tensors in case.scan.tensors_by_file.items():
        tensor = tensors.get("token_map")
        dtype = {"I64": "<i8", "I32": "<i4"}.get(tensor.dtype) if tensor else None
        if tensor is None or dtype is None or tensor.num_elements > _MAX_ROWS:
            continue
        ids = _read(case.scan.path / file, tensor, dtype)
        if ids is not None:
            yield from _check_token_map(file, ids, vocab_size)


def _check_token_map(file: str, ids: NDArray[Any], vocab_size: int) -> Iterator[Finding]:
    fix = "Rebuild the map from a list of unique target ids."
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        first = int(outside[0])
        yield finding(
            "ten.token_map",
            file,
            f"token_map sends draft id {first} to target id {int(ids[first])}, but there are"
            f" {vocab_size} tokens",
            where=f"token_map[{first}]",
            found=int(ids[first]),
            expected=f"0 to {vocab_size - 1}",
            fix=fix,
        )
    values, counts = np.unique(ids, return_counts=True)
    if len(values) != len(ids):
        twice = int(values[int(np.argmax(counts > 1))])
        yield finding(
            "ten.token_map",
            file,
            f"token_map holds target id {twice} more than once ({len(ids) - len(values)} repeats)",
            where="token_map",
            found=twice,
            expected="every target id at most once",
            fix=fix,
        )


def _check_mask(file: str, mask: NDArray[Any]) -> Iterator[Finding]:
    strange = int(np.count_nonzero(mask > 1))
    if strange:
        yield finding(
            "ten.t2d",
            file,
            f"{strange} values of t2d are neither 0 nor 1",
            where="t2d",
            found=int(mask.max()),
            expected="0 or 1",
            fix="Save t2d as a bool tensor.",
            severity="warning",
        )


def _check_offsets(
    case: Case,
    file: str,
    offsets: NDArray[np.int64],
    vocab_size: int,
    kept: NDArray[np.int64] | None,
) -> Iterator[Finding]:
    index = np.arange(len(offsets), dtype=np.int64)
    # an offset outside +-vocab_size is wrong by itself; clipping keeps the sum from wrapping
    ids = index + np.clip(offsets, -(2**40), 2**40)
    absolute = _looks_absolute(offsets, vocab_size)
    hint = _HINT if absolute else ""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        first = int(outside[0])
        name = f"target '{case.target.name}'" if case.target else "the target"
        yield finding(
            "ten.d2t",
            file,
            f"d2t sends draft id {first} to target id {int(index[first]) + int(offsets[first])},"
            f" but {name} has {vocab_size} tokens ({len(outside)} of {len(ids)} are outside)."
            + hint,
            where=f"d2t[{first}]",
            found=int(offsets[first]),
            expected=f"{-first} to {vocab_size - 1 - first}",
            fix="Rebuild the vocabulary map for this target, or point --target at the model it was"
            " built for.",
        )
        return
    values, counts = np.unique(ids, return_counts=True)
    if len(values) != len(ids):
        twice = int(values[int(np.argmax(counts > 1))])
        rows = np.flatnonzero(ids == twice)[:2]
        yield finding(
            "ten.d2t",
            file,
            f"d2t sends draft ids {rows[0]} and {rows[1]} to the same target id {twice}"
            f" ({len(ids) - len(values)} repeats)." + hint,
            where=f"d2t[{rows[1]}]",
            found=int(offsets[rows[1]]),
            expected="every target id at most once",
            fix="Rebuild the vocabulary map from a list of unique ids.",
        )
        return
    if kept is not None:
        yield from _compare(file, ids, kept, hint)
    elif absolute:
        yield finding(
            "ten.d2t",
            file,
            "every offset of d2t is larger than the one before, so no two neighbouring target ids"
            " are kept." + hint,
            where="d2t",
            found=offsets[:6].tolist(),
            expected="offsets: d2t[i] = target id - i",
            fix="Check it against the ids that were selected; ship t2d to settle it.",
            severity="warning",
        )
    if len(ids) > 1 and not bool(np.all(np.diff(ids) > 0)):
        yield finding(
            "ten.d2t",
            file,
            "the target ids of d2t are not ascending",
            where="d2t",
            found=ids[:6].tolist(),
            expected="ascending ids",
            fix="Right only if lm_head has its rows in the same order.",
            severity="warning",
        )


def _looks_absolute(offsets: NDArray[np.int64], vocab_size: int) -> bool:
    """True offsets of an ascending map never fall, and stand still inside each run of ids."""
    return (
        len(offsets) >= 8
        and bool(np.all(np.diff(offsets) > 0))
        and int(offsets[0]) >= 0
        and int(offsets[-1]) < vocab_size
    )


def _compare(
    file: str, ids: NDArray[np.int64], kept: NDArray[np.int64], hint: str
) -> Iterator[Finding]:
    """d2t against t2d, position by position. vLLM goes by d2t alone: a t2d of another list is an
    error only where d2t looks like ids, so that the two together say which one is wrong."""
    if len(kept) != len(ids):
        yield finding(
            "ten.t2d",
            file,
            f"t2d keeps {len(kept)} target ids, d2t maps {len(ids)}",
            where="t2d",
            found=len(kept),
            expected=str(len(ids)),
            fix="Write both from one list of ids.",
            severity=None if hint else "warning",
        )
        return
    ordered = np.sort(ids)
    wrong = int(np.count_nonzero(ordered != kept))
    if wrong:
        yield finding(
            "ten.t2d",
            file,
            f"the target ids that d2t implies ({', '.join(map(str, ordered[:3].tolist()))}, ...)"
            f" disagree with t2d at {wrong} of {len(ids)} positions." + hint,
            where="d2t",
            found=ordered[:6].tolist(),
            expected=str(kept[:6].tolist()),
            fix="d2t holds offsets (target id = i + d2t[i]), t2d a mask over target ids; write both"
            " from one list.",
            severity=None if hint else "warning",
        )
