"""What is said of a draft's matrices that are close to the target's: `ten.copy` and `ten.start`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from paceline.safetensors_header import TensorInfo
from paceline.validate.case import Case
from paceline.validate.copies import NEARLY_IDENTICAL, Copy, TargetMatrix
from paceline.validate.report import Finding, finding
from paceline.validate.scan import has_same_bytes

__all__ = ["tell_copies", "tell_not_compared"]


def tell_copies(
    case: Case, files: Mapping[str, str], tensors: Mapping[str, TensorInfo], copies: dict[str, Copy]
) -> Iterator[Finding]:
    """Layers of the target may not be copied where the contest says so; its MTP head may.

    One finding for all copies, one for all layers that were trained on: the closest is named.
    """
    close, started, unchanged = [], [], []
    for name in sorted(copies, key=lambda name: -copies[name].similarity):
        copy = copies[name]
        if copy.matrix.kind == "mtp":
            unchanged += [name] if _is_same(case, files[name], tensors[name], copy) else []
        elif copy.similarity >= NEARLY_IDENTICAL:
            close.append(name)
        else:
            started.append(name)
    if close:
        yield _tell_close(case, files, tensors, copies, close)
    if started:
        yield _tell_started(case, files, copies, started)
    if unchanged:
        yield finding(
            "ten.copy",
            files[unchanged[0]],
            f"{len(unchanged)} of {len(tensors)} matrices are those of the target's own MTP head,"
            " bit for bit",
            where=unchanged[0],
            found="the native head",
            expected="a head that was trained further, to beat the native one",
            fix="Nothing is wrong with it: this is the target's own head.",
            severity="note",
        )


def _is_same(case: Case, file: str, tensor: TensorInfo, copy: Copy) -> bool:
    return copy.how == "identical" and has_same_bytes(
        case.scan.path / file, tensor, copy.matrix.path, copy.matrix.tensor
    )


def _and_others(names: list[str]) -> str:
    more = len(names) - 1
    return f"; {more} other {'matrix' if more == 1 else 'matrices'} likewise" if more else ""


def _tell_close(
    case: Case,
    files: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    copies: Mapping[str, Copy],
    names: list[str],
) -> Finding:
    name, copy = names[0], copies[names[0]]
    is_same = _is_same(case, files[name], tensors[name], copy)
    kind = "bit-identical copy" if is_same else "copy"
    allowed = "error" if case.limits.forbids_copied_layers else "note"
    return finding(
        "ten.copy",
        files[name],
        f"tensor '{name}' is a {kind} of the target's '{copy.matrix.tensor.name}'"
        + ("" if is_same else f": {copy.how}")
        + _and_others(names),
        where=name,
        found=f"similarity {copy.similarity:.3f}",
        expected="no copy of a target layer",
        fix="Copying target layers is not a draft; train the layer.",
        severity=allowed if case.is_contest else None,
    )


def _tell_started(
    case: Case, files: Mapping[str, str], copies: Mapping[str, Copy], names: list[str]
) -> Finding:
    name, copy = names[0], copies[names[0]]
    record = (case.scan.metadata or {}).get("trained")
    is_declared = isinstance(record, dict) and bool(record.get("started_from"))
    forbidden = case.is_contest and case.limits.forbids_copied_layers
    return finding(
        "ten.start",
        files[name],
        f"tensor '{name}' was trained on from the target's '{copy.matrix.tensor.name}' (similarity"
        f" {copy.similarity:.2f}){_and_others(names)}",
        where=name,
        found=f"{copy.similarity:.3f}",
        expected="less than 0.5, as between layers that were trained apart",
        fix="Say in metadata.json what it was started from (trained.started_from).",
        severity="warning" if forbidden and not is_declared else None,
    )


def tell_not_compared(
    case: Case, matrices: list[TargetMatrix], compared: Container[str]
) -> Iterator[Finding]:
    """A note where nothing can be compared: packed weights whose parts do not fit, or a target
    without matrices. compared: names of the draft's matrices that were."""
    left_out = [
        name
        for held in case.scan.tensors_by_file.values()
        for name in held
        if name.endswith("weight_packed") and name.removesuffix("_packed") not in compared
    ]
    has_layers = any(matrix.kind == "layer" for matrix in matrices)
    if case.target is None or (has_layers and not left_out):
        return
    yield finding(
        "not.checked",
        "",
        "copies of the target's layers were not looked for: "
        + (
            f"'{left_out[0]}' cannot be read as a matrix"
            if has_layers
            else "the target has no matrices that can be read"
        ),
        where="ten.copy",
        expected="plain or packed matrices on both sides",
        fix="Quantise the draft again."
        if has_layers
        else "Point --target at a copy with its weights.",
    )
