from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from paceline.errors import DataError, ResultError, StorageError
from paceline.records import (
    append_jsonl,
    atomic_folder,
    build_provenance,
    parse_json,
    read_json,
    read_jsonl,
    sha256_bytes,
    sha256_file,
    storage_errors,
    write_json,
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": {"b": 1, "b": 1}}', "twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": ', "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1e999}', "does not fit a double"),
        ('{"a": -1e999}', "does not fit a double"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"\\udfff": 1}', "surrogate"),
    ],
)
def test_strict_json(text: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        parse_json(text, where="x.json", error=DataError)


def test_read_json_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, reason in (
        (None, "does not exist"),
        (b"\xff", "cannot be read"),
        (b"[]", "object"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ResultError, match=reason) as caught:
            read_json(path)
        assert str(path) in str(caught.value)


def test_write_json_round_trip_and_refuses_nan(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    write_json(path, {"a": None, "b": "é"})
    assert read_json(path) == {"a": None, "b": "é"}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": None, "b": "é"}
    assert [item.name for item in path.parent.iterdir()] == ["x.json"]


def test_a_killed_writer_costs_one_line_at_most(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, {"id": 1})
    append_jsonl(path, {"id": 2})
    with open(path, "a") as file:
        file.write('{"id": 3, "cut')
    assert [row["id"] for row in read_jsonl(path)] == [1, 2]
    append_jsonl(path, {"id": 4})
    assert [row["id"] for row in read_jsonl(path)] == [1, 2, 4]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n{"id": \n{"id": 3}\n')
    with pytest.raises(ResultError, match=r"rows\.jsonl:2"):
        read_jsonl(path)


def test_atomic_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fail_half_way(kind: type[BaseException]) -> None:
        with atomic_folder(out) as folder:
            (folder / "a").write_text("half")
            raise kind

    for kind in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(kind):
            fail_half_way(kind)
        assert list(tmp_path.iterdir()) == []
    with atomic_folder(out) as folder:
        (folder / "a").write_text("whole")
    assert (out / "a").read_text() == "whole"
    with pytest.raises(StorageError, match="already exists"), atomic_folder(out):
        pass
    with pytest.raises(RuntimeError), atomic_folder(out, replace=True):
        raise RuntimeError
    assert (out / "a").read_text() == "whole"
    with atomic_folder(out, replace=True) as folder:
        (folder / "b").write_text("new")
    assert [item.name for item in out.iterdir()] == ["b"]
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "full"), (errno.EACCES, "permission"), (errno.EROFS, "read-only")],
)
def test_storage_errors_are_told_in_words(number: int, reason: str) -> None:
    with pytest.raises(StorageError, match=reason) as caught, storage_errors("out/x"):
        raise OSError(number, os.strerror(number))
    assert "out/x" in str(caught.value)
    assert caught.value.exit_code == 5


def test_hashes_and_provenance(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_file(path) == sha256_bytes(b"abc") == known
    record = build_provenance(seed=7, inputs={"data": known})
    assert record["seed"] == 7
    assert record["inputs"] == {"data": known}
    json.dumps(record, allow_nan=False)


def test_a_folder_made_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def write_late() -> None:
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "mine").touch()
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").touch()

    with pytest.raises(StorageError, match="already exists"):
        write_late()
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["theirs"]
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_a_file_is_never_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with (
        pytest.raises(StorageError, match="not a folder"),
        atomic_folder(tmp_path / "out", replace=True),
    ):
        raise AssertionError("must not run")
    assert (tmp_path / "out").read_text() == "precious"


def test_a_swap_that_fails_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.ENOSPC, "full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with (
        pytest.raises(StorageError, match="disk is full"),
        atomic_folder(tmp_path / "out", replace=True) as folder,
    ):
        (folder / "new").touch()
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["old"]
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
