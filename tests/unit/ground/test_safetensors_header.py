from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from builders import random_bf16, write_safetensors

from paceline.errors import DraftError, TargetError
from paceline.safetensors_header import TensorInfo, read_header, scan_header

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, entries: object, data: bytes, *, pad: bytes = b" ") -> Path:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text += pad * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_offsets_point_at_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"b": random_bf16(2, 3, seed=1), "a": random_bf16(4, seed=2)}
    write_safetensors(path, tensors)
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == path.stat().st_size
    assert set(header.tensors) == {"a", "b"}
    for name, info in header.tensors.items():
        assert path.read_bytes()[info.start : info.end] == tensors[name][2]
        assert (info.dtype, info.shape) == tensors[name][:2]
    assert header.tensors["b"].num_elements == 6
    assert header.tensors["b"].num_bytes == 12


def test_the_public_writer_and_reader_agree_with_ours(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safe = pytest.importorskip("safetensors.torch")
    path = tmp_path / "x.safetensors"
    tensors = {
        "scalar": torch.tensor(3.5),
        "mask": torch.tensor([True, False, True]),
        "ids": torch.arange(5),
        "w": torch.randn(3, 4, dtype=torch.bfloat16),
    }
    safe.save_file(tensors, path)
    header = read_header(path)
    assert {name: info.shape for name, info in header.tensors.items()} == {
        "scalar": (),
        "mask": (3,),
        "ids": (5,),
        "w": (3, 4),
    }
    ids = header.tensors["ids"]
    assert struct.unpack("<5q", path.read_bytes()[ids.start : ids.end]) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("entries", "data", "rule"),
    [
        (b'{"a": %s, "a": %s}' % ((json.dumps(F32).encode(),) * 2), b"\0" * 8, "st.dup"),
        ({"a": {**F32, "extra": 1}}, b"\0" * 8, "st.fields"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "st.fields"),
        ({"a": 3}, b"", "st.fields"),
        ({"a": {**F32, "dtype": "F4"}}, b"\0" * 8, "st.dtype"),
        ({"a": {**F32, "dtype": ["F32"]}}, b"\0" * 8, "st.dtype"),
        ({"a": {**F32, "shape": [0]}}, b"\0" * 8, "st.shape"),
        ({"a": {**F32, "shape": [True, 2]}}, b"\0" * 8, "st.shape"),
        ({"a": {**F32, "shape": [-2]}}, b"\0" * 8, "st.shape"),
        ({"a": {**F32, "shape": [1, 1, 1, 1, 2]}}, b"\0" * 8, "st.shape"),
        ({"a": {**F32, "shape": [2**26, 2**26, 2**26, 2**26]}}, b"\0" * 8, "st.shape"),
        ({"a": {**F32, "shape": [3]}}, b"\0" * 8, "st.shape"),
        ({"a": {**F32, "data_offsets": [0, 8, 9]}}, b"\0" * 8, "st.cover"),
        ({"a": {**F32, "data_offsets": [-8, 0]}}, b"\0" * 8, "st.cover"),
        ({"a": F32}, b"\0" * 7, "st.cover"),
        ({"a": F32}, b"\0" * 9, "st.cover"),
        ({"a": F32, "b": F32}, b"\0" * 8, "st.cover"),
        ({"a": {**F32, "data_offsets": [4, 12]}}, b"\0" * 12, "st.cover"),
        ({"a": {**F32, "data_offsets": [2, 10]}}, b"\0" * 10, "st.align"),
        ({"a\n": F32}, b"\0" * 8, "st.name"),
        ({"x" * 257: F32}, b"\0" * 8, "st.name"),
        ({"__metadata__": {"format": "np"}, "a": F32}, b"\0" * 8, "st.meta"),
        ({"__metadata__": {"a": 1}, "a": F32}, b"\0" * 8, "st.meta"),
        ({"__metadata__": {str(i): "x" * 100 for i in range(99)}}, b"", "st.meta"),
        ([1], b"", "st.header"),
        (b"{nope}", b"", "st.header"),
    ],
)
def test_refused(entries: object, data: bytes, rule: str, tmp_path: Path) -> None:
    _, problems = scan_header(write(tmp_path / "x.safetensors", entries, data))
    assert rule in [problem.rule for problem in problems]
    with pytest.raises(DraftError):
        read_header(tmp_path / "x.safetensors")


def test_only_spaces_may_follow_the_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"a": F32}, b"\0" * 8, pad=b"\n")
    assert [problem.rule for problem in scan_header(path)[1]] == ["st.header"]


def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for length in (2**63, 15 * 1024 * 1024, 1, 0):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        header, problems = scan_header(path)
        assert header is None
        assert problems[0].rule == "st.header"


def test_missing_files_and_links(tmp_path: Path) -> None:
    assert scan_header(tmp_path / "none")[1][0].rule == "fs.read"
    assert scan_header(tmp_path)[1][0].rule == "fs.type"
    (tmp_path / "link").symlink_to(write(tmp_path / "x", {"a": F32}, b"\0" * 8))
    assert scan_header(tmp_path / "link")[1][0].rule == "fs.type"


def test_the_error_has_the_callers_type_and_names_file_and_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"w": {**F32, "dtype": "F4"}}, b"\0" * 8)
    with pytest.raises(TargetError, match=r"x\.safetensors: w: tensor 'w' has an unknown dtype"):
        read_header(path, error=TargetError)


def test_records_cannot_be_changed() -> None:
    info = TensorInfo(name="a", dtype="F32", shape=(2,), start=0, end=8)
    with pytest.raises(AttributeError):
        info.start = 1  # type: ignore[misc]
