"""Copies of target layers inside quantised weights: seen in every scheme, on either side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import Tensor, build_draft, build_target_facts, write_safetensors
from test_copies import EMC2, UP, Array, H, I, bf16, draw, folder_with

from paceline.safetensors_header import read_header
from paceline.validate import Report, validate_draft
from paceline.validate.copies import NEARLY_IDENTICAL, find_copies, list_places, list_wanted
from paceline.validate.copies import list_target_matrices as list_matrices
from paceline.validate.packed_values import list_packed, read_packed
from paceline.validate.scan import open_plain

NAME = "midlayer.mlp.up_proj.weight"


def f32(values: Array) -> Tensor:
    return "F32", values.shape, np.ascontiguousarray(values, dtype="<f4").tobytes()


def quantise(values: Array, bits: int, group: int) -> tuple[Array, Array]:
    """(codes, scales) to the nearest, one scale for each `group` inputs of a row."""
    rows, columns = values.shape
    grouped = values.reshape(rows, columns // group, group)
    scale = np.abs(grouped).max(axis=2) / (2 ** (bits - 1) - 1)
    codes = np.rint(grouped / scale[..., None]).reshape(rows, columns)
    return codes.astype(np.int64), scale.astype(np.float32)


def pack(values: Array, bits: int, group: int, name: str = NAME) -> dict[str, Tensor]:
    codes, scale = quantise(values, bits, group)
    each = 32 // bits
    shifted = (codes + 2 ** (bits - 1)).reshape(len(codes), -1, each)
    words = (shifted << (np.arange(each) * bits)).sum(axis=2)
    return {
        f"{name}_packed": ("I32", words.shape, words.astype("<u4").tobytes()),
        f"{name}_scale": f32(scale),
        f"{name}_shape": ("I64", (2,), np.array(codes.shape, dtype="<i8").tobytes()),
    }


def as_bytes(values: Array, name: str = NAME) -> dict[str, Tensor]:
    codes, scale = quantise(values, 8, values.shape[1])
    return {name: ("I8", codes.shape, codes.astype("<i1").tobytes()), f"{name}_scale": f32(scale)}


FORMS: dict[str, tuple[Callable[[Array], dict[str, Tensor]], str]] = {
    "four bits in groups": (lambda values: pack(values, 4, 32), "quantised to 4 bits"),
    "four bits by rows": (lambda values: pack(values, 4, values.shape[1]), "quantised to 4 bits"),
    "eight bits, packed": (lambda values: pack(values, 8, 32), "quantised to 8 bits"),
    "eight bits, bytes": (as_bytes, "quantised to 8 bits"),
}
WHOLES = {
    "as it is": (UP, ""),
    "scaled": (UP * -2.5, ""),
    "rows scaled": (UP * np.geomspace(0.1, 10, I)[:, None], ""),
    "beside another": (np.concatenate([draw(901, I, H), UP], axis=1), "in a part"),
    "transposed": (UP.T.copy(), "transposed"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tensors = {
        f"model.layers.{layer}.mlp.up_proj.weight": bf16(
            UP if layer == 3 else draw(4000 + layer, I, H)
        )
        for layer in range(6)
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("whole", WHOLES)
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_copy_is_seen(form: str, whole: str, target: Path, tmp_path: Path) -> None:
    build, how = FORMS[form]
    values, where = WHOLES[whole]
    path = tmp_path / "draft.safetensors"
    write_safetensors(path, build(values.astype(np.float32)))
    matrices = list_matrices(target)
    handle = open_plain(path)
    (matrix,) = list_packed(read_header(path).tensors, handle).values()
    samples = {
        place: read_packed(handle, matrix, list_wanted(place, matrix.shape))
        for place in list_places(matrix.shape, (I, H))
    }
    copy = find_copies(
        {NAME: matrix.tensor},
        {NAME: {place: sample.values for place, sample in samples.items()}},
        matrices,
        {NAME: max(sample.noise for sample in samples.values())},
    )[NAME]
    assert copy.matrix.tensor.name == "model.layers.3.mlp.up_proj.weight"
    assert copy.similarity >= NEARLY_IDENTICAL, copy
    assert how in copy.how
    assert where in copy.how


@pytest.mark.parametrize("bits", [4, 8])
def test_values_are_those_of_the_engine(bits: int, tmp_path: Path) -> None:
    """By hand: code times the scale of its row and group, for every place."""
    values = draw(7, 12, 64)
    codes, scale = quantise(values, bits, 32)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, pack(values, bits, 32))
    handle = open_plain(path)
    (matrix,) = list_packed(read_header(path).tensors, handle).values()
    flat = np.arange(12 * 64)[::-1].copy()
    found = read_packed(handle, matrix, flat)
    wanted = (codes * np.repeat(scale, 32, axis=1)).ravel()[::-1]
    assert found.values == pytest.approx(wanted, rel=1e-6)
    error = np.mean((values - codes * np.repeat(scale, 32, axis=1)) ** 2) / np.mean(wanted**2)
    assert found.noise == pytest.approx(error, rel=0.15)


def look(folder: Path, target: Path, **more: object) -> Report:
    facts = build_target_facts(target, hidden_size=H)
    return validate_draft(folder, target=facts, rules=EMC2, deep=True)


def put(tmp_path: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    folder, _ = folder_with(tmp_path, target, bf16(draw(77, I, H)))
    held = {}
    header = read_header(folder / "model.safetensors")
    raw = (folder / "model.safetensors").read_bytes()
    for name, tensor in header.tensors.items():
        held[name] = (tensor.dtype, tensor.shape, raw[tensor.start : tensor.end])
    del held[NAME]
    write_safetensors(folder / "model.safetensors", {**held, **tensors})
    return folder


def test_validate_tells_and_layers_of_their_own_are_not_near(target: Path, tmp_path: Path) -> None:
    copied = look(put(tmp_path / "a", target, pack(UP, 4, 32)), target)
    (told,) = [item for item in copied.findings if item.rule == "ten.copy"]
    assert (told.severity, told.where) == ("error", NAME)
    assert "quantised to 4 bits" in told.message
    own = look(put(tmp_path / "b", target, pack(draw(911, I, H), 4, 32)), target)
    assert [f for f in own.findings if f.rule in ("ten.copy", "ten.start")] == []
    assert not any(f.where == "ten.copy" for f in own.findings)


def test_a_layer_trained_on_and_quantised_is_told_as_that(target: Path, tmp_path: Path) -> None:
    """0.9 of correlation before rounding is 0.9 after it is taken off."""
    trained = (0.9 * UP + np.sqrt(1 - 0.81) * draw(912, I, H)).astype(np.float32)
    report = look(put(tmp_path, target, pack(trained, 4, H)), target)
    (told,) = [item for item in report.findings if item.rule in ("ten.copy", "ten.start")]
    assert told.rule == "ten.start"
    assert float(told.found) == pytest.approx(0.9, abs=0.02)


def test_a_copy_of_a_quantised_target(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    layer = "model.layers.3.mlp.up_proj.weight"
    write_safetensors(folder / "model.safetensors", pack(UP, 4, 32, name=layer))
    report = look(put(tmp_path, folder, {NAME: bf16(UP)}), folder)
    (told,) = [item for item in report.findings if item.rule in ("ten.copy", "ten.start")]
    assert layer in told.message
    assert float(told.found.removeprefix("similarity ")) > 0.99


@pytest.mark.parametrize("name", ["_scale", "_shape"])
def test_parts_that_do_not_fit_are_said(name: str, target: Path, tmp_path: Path) -> None:
    tensors = pack(UP, 4, 32)
    del tensors[f"{NAME}{name}"]
    report = look(put(tmp_path, target, tensors), target)
    assert any(
        f.where == "ten.copy" and "cannot be read as a matrix" in f.message for f in report.findings
    )


@pytest.mark.parametrize("form", FORMS)
def test_codes_that_are_all_the_same_are_told(form: str, target: Path, tmp_path: Path) -> None:
    build, _ = FORMS[form]
    tensors = build(draw(77, I, H))
    told = {}
    for kind, changed in (
        ("filled", tensors),
        (
            "empty",
            {n: (d, s, bytes(len(r)) if d[0] == "I" else r) for n, (d, s, r) in tensors.items()},
        ),
    ):
        report = look(put(tmp_path / kind, target, changed), target)
        told[kind] = [item.where for item in report.findings if item.rule == "ten.const"]
    assert (told["filled"], len(told["empty"])) == ([], 1)


def test_a_draft_of_its_own_needs_no_note(tmp_path: Path, target: Path) -> None:
    report = validate_draft(build_draft(tmp_path / "d"), target=build_target_facts(tmp_path))
    assert not any(f.where == "ten.copy" for f in report.findings)
