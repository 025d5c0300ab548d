"""One pass over values: bit tests against plain arithmetic, at the ends and seams of the pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import encode_bf16, write_safetensors

from paceline.safetensors_header import TensorInfo, read_header
from paceline.validate.scan import FLOAT_BITS, Measured, decode, measure_tensor, read_pieces

PIECE = 64  # bytes: many pieces for a small tensor
NUMPY = {"F16": "<f2", "F32": "<f4"}


def encode(values: Any, dtype: str) -> bytes:
    array = np.asarray(values, dtype=np.float32)
    return encode_bf16(array) if dtype == "BF16" else array.astype(NUMPY[dtype]).tobytes()


@contextmanager
def one_tensor(
    folder: Path, dtype: str, raw: bytes, shape: tuple[int, ...]
) -> Iterator[tuple[int, TensorInfo]]:
    path = folder / "one.safetensors"
    write_safetensors(path, {"x": (dtype, shape, raw)})
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle, read_header(path).tensors["x"]
    finally:
        os.close(handle)


def measure(folder: Path, dtype: str, raw: bytes, count: int, wanted: Any = None) -> Measured:
    with one_tensor(folder, dtype, raw, (count,)) as (handle, tensor):
        return measure_tensor(handle, tensor, wanted, piece_bytes=PIECE)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_all_256_codes_of_an_8_bit_float(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = torch.float8_e4m3fn if dtype == "F8_E4M3" else torch.float8_e5m2
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(kind).to(torch.float32).numpy()
    ours = decode(bytes(range(256)), dtype)
    np.testing.assert_array_equal(ours, theirs)
    form = FLOAT_BITS[dtype]
    by_bits = (np.arange(256) & form.mask) >= form.infinite
    np.testing.assert_array_equal(by_bits, ~np.isfinite(theirs))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_all_65536_codes_of_a_16_bit_float(dtype: str, tmp_path: Path) -> None:
    codes = np.arange(2**16, dtype="<u2")
    values = decode(codes.tobytes(), dtype)
    if dtype == "F16":
        np.testing.assert_array_equal(values, codes.view("<f2").astype(np.float32))
    else:
        np.testing.assert_array_equal(values.view("<u4") >> 16, codes)
    found = measure(tmp_path, dtype, codes.tobytes(), len(codes))
    finite = values[np.isfinite(values)].astype(np.float64)
    assert found.num_bad == len(values) - len(finite)
    assert found.num_over_fp16 == int(np.count_nonzero(np.abs(finite) > 65504))
    assert found.largest == np.abs(finite).max()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 15, 16, 31, 32, 63, 98, 99])
def test_a_bad_value_is_found_wherever_it_is(
    dtype: str, bad: float, place: int, tmp_path: Path
) -> None:
    values = np.linspace(-1, 1, 100, dtype=np.float32)
    assert measure(tmp_path, dtype, encode(values, dtype), 100).num_bad == 0
    values[place] = bad
    found = measure(tmp_path, dtype, encode(values, dtype), 100)
    assert found.num_bad == 1
    assert 0.9 < found.largest <= 1.0


@pytest.mark.parametrize(
    ("dtype", "value", "number"),
    [
        ("BF16", 65280.0, 0),  # the largest bfloat16 below
        ("BF16", 65536.0, 1),
        ("BF16", -70144.0, 1),
        ("F32", 65504.0, 0),
        ("F32", float(np.nextafter(np.float32(65504), np.float32(1e9))), 1),
        ("F32", -3e38, 1),
        ("F16", 65504.0, 0),
    ],
)
def test_the_end_of_the_fp16_range(dtype: str, value: float, number: int, tmp_path: Path) -> None:
    found = measure(tmp_path, dtype, encode([0.5] * 99 + [value], dtype), 100)
    assert (found.num_over_fp16, found.largest) == (number, abs(float(np.float32(value))))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_constant_means_every_value(dtype: str, tmp_path: Path) -> None:
    values = np.full(100, 0.25, dtype=np.float32)
    assert measure(tmp_path, dtype, encode(values, dtype), 100).is_constant
    for place in (0, 1, 31, 32, 50, 99):
        other = values.copy()
        other[place] = 0.5
        assert not measure(tmp_path, dtype, encode(other, dtype), 100).is_constant
    bad = np.full(100, np.nan, dtype=np.float32)
    assert not measure(tmp_path, dtype, encode(bad, dtype), 100).is_constant


def test_root_mean_square_and_fingerprint(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    found = measure(tmp_path, "F32", encode(values, "F32"), 1000)
    assert found.rms == pytest.approx(np.sqrt(np.mean(values.astype(np.float64) ** 2)))
    again = measure(tmp_path, "F32", encode(values, "F32"), 1000)
    other = measure(tmp_path, "F32", encode(-values, "F32"), 1000)
    assert again.fingerprint == found.fingerprint != other.fingerprint


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_picked_values_across_pieces(dtype: str, tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    raw = encode(values, dtype)
    wanted = {"some": np.array([0, 1, 31, 32, 33, 500, 999]), "none": np.array([], dtype=np.int64)}
    found = measure(tmp_path, dtype, raw, 1000, wanted)
    np.testing.assert_array_equal(found.picked["some"], decode(raw, dtype)[wanted["some"]])
    assert len(found.picked["none"]) == 0


def test_a_file_that_is_cut_meanwhile_is_an_error(tmp_path: Path) -> None:
    with one_tensor(tmp_path, "F32", encode([1.0] * 100, "F32"), (100,)) as (handle, tensor):
        os.truncate(tmp_path / "one.safetensors", tensor.end - 8)
        with pytest.raises(OSError, match="changed while it was read"):
            measure_tensor(handle, tensor, piece_bytes=PIECE)


def test_pieces_are_the_bytes_of_the_tensor_alone(tmp_path: Path) -> None:
    raw = bytes(range(200))
    with one_tensor(tmp_path, "U8", raw, (200,)) as (handle, tensor):
        assert b"".join(bytes(p) for p in read_pieces(handle, tensor, piece_bytes=64)) == raw
