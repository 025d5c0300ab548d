"""`mask_embedding.pt`: what torch.save writes for one tensor is read, without running it."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutations import mutate_archive
from torch_files import (
    HOOKS,
    TENSOR,
    build_archive,
    build_plain,
    frame,
    number,
    saved_dict,
    saved_tensor,
    sizes,
    text,
)

from paceline.draft import MaskEmbedding, parse_mask_embedding
from paceline.errors import DraftError

ROW = {"data/0": b"\x80\x3f" * 16, "version": b"3\n"}


def archive(body: bytes, **more: bytes) -> bytes:
    return build_archive({"data.pkl": frame(body), **ROW, **more})


def read_row(data: bytes, saved: MaskEmbedding) -> bytes:
    return data[saved.tensor.start : saved.tensor.end]


@pytest.mark.parametrize("token", [None, 62])
def test_a_plain_file(token: int | None) -> None:
    data = build_plain(token=token)
    saved = parse_mask_embedding(data)
    assert (saved.tensor.dtype, saved.tensor.shape) == ("BF16", (16,))
    assert (saved.mask_token_id, saved.place) == (token, "cpu")
    assert read_row(data, saved) == b"\x80\x3f" * 16


def test_a_part_of_a_larger_storage() -> None:
    data = build_archive(
        {
            "data.pkl": frame(saved_tensor(2, start=1, stored=4, shape=(1, 2), strides=(9, 1))),
            "data/0": b"aabbccdd",
            "version": b"3\n",
        }
    )
    saved = parse_mask_embedding(data)
    assert saved.tensor.shape == (1, 2)
    assert read_row(data, saved) == b"bbcc"


def make_objects() -> dict[str, Callable[[], Any]]:
    import torch

    def row(dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(24, dtype=torch.float32).to(dtype)

    return {
        "bfloat16": lambda: row(torch.bfloat16),
        "float16": lambda: row(torch.float16),
        "float32": lambda: row(torch.float32),
        "float64": lambda: row(torch.float64),
        "one row": lambda: row(torch.float32).view(1, 24),
        "a row of a table": lambda: row(torch.bfloat16).view(4, 6)[2],
        "a parameter": lambda: torch.nn.Parameter(row(torch.float32)),
        "a dict": lambda: {"embedding": row(torch.bfloat16), "mask_token_id": 7},
        "a dict with more": lambda: {
            "mask_token_id": 2**17,
            "embedding": row(torch.float32),
            "old": row(torch.float32) + 1,
            "loss": 0.5,
            "note": "after 300 steps",
            "kept": True,
            "none": None,
        },
    }


@pytest.mark.parametrize("name", make_objects())
@pytest.mark.parametrize("place", ["buffer", "path"])
def test_files_of_torch_itself(name: str, place: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    value = make_objects()[name]()
    path = tmp_path / "mask_embedding.pt"
    if place == "path":
        torch.save(value, path)
        data = path.read_bytes()
    else:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
    saved = parse_mask_embedding(data)
    expected = value["embedding"] if isinstance(value, dict) else value
    assert saved.tensor.shape == tuple(expected.shape)
    raw = expected.detach().contiguous().view(torch.uint8).numpy().tobytes()
    assert read_row(data, saved) == raw
    named = value.get("mask_token_id") if isinstance(value, dict) else None
    assert saved.mask_token_id == named


EVIL: dict[str, bytes] = {
    "a command": b"cos\nsystem\n" + text("true") + b"\x85R",
    "a command by its own opcode": b"(" + text("true") + b"ios\nsystem\n",
    "an object of its own": b"cpaceline.errors\nDraftError\n)\x81",
    "eval under the dict's name": b"cbuiltins\neval\n" + text("1") + b"\x85R",
    "a function behind the tensor": saved_tensor(16) + b"0cos\ngetcwd\n)R",
    "a state for the tensor": saved_tensor(16) + b"}b",
    "hooks that are called": saved_tensor(16, hooks=b"cos\ngetcwd\n"),
    "hooks that hold something": saved_tensor(16, hooks=HOOKS + text("a") + number(1) + b"s"),
    "hooks that are filled later": (
        saved_tensor(16, hooks=HOOKS + b"q\x05") + b"h\x05" + text("a") + number(1) + b"s0"
    ),
    "hooks that are the dict itself": b"}q\x05("
    + text("embedding")
    + saved_tensor(16, hooks=b"h\x05")
    + b"u",
    "another rebuilding": saved_tensor(16, rebuild=b"ctorch._utils\n_rebuild_wrapper_subclass\n"),
    "a storage of bytes": saved_tensor(16, kind="UntypedStorage"),
    "a storage of whole numbers": saved_tensor(16, kind="LongStorage"),
    "a list": b"]" + saved_tensor(16) + b"a",
    "a dict in a dict": saved_dict(embedding=saved_tensor(16), more=saved_dict(a=number(1))),
    "a name twice": b"}(" + 2 * (text("embedding") + saved_tensor(16)) + b"u",
    "a name that is a number": b"}(" + number(1) + saved_tensor(16) + b"u",
    "no row": saved_dict(mask=saved_tensor(16)),
    "a number for the row": saved_dict(embedding=number(1)),
    "nothing": b"}",
    "two things": saved_tensor(16) + saved_tensor(16),
    "no thing at all": b"",
    "marks without an end": b"(" * 3000,
    "a long loop": saved_tensor(16) + b"q\x00" + b"h\x000" * 5000,
    "a memo that nobody wrote": b"h\x07",
    "more rows than stored": saved_tensor(16, stored=16, shape=(17,)),
    "a start beyond the end": saved_tensor(16, start=1),
    "a start before the beginning": saved_tensor(16, start=-1),
    "strides that overlap": saved_tensor(16, shape=(4, 4), strides=(0, 1)),
    "strides that are turned": saved_tensor(16, shape=(4, 4), strides=(1, 4)),
    "a size of zero": saved_tensor(16, shape=(0,)),
    "a place of its own": saved_tensor(16, place="meta"),
    "a number of a hundred digits": TENSOR + b"\x8a\x64" + b"\x7f" * 100 + b"\x85R",
    "a storage of another size": saved_tensor(8, stored=8),
    "a storage that is not there": saved_tensor(16, key="1"),
    "a path for a storage": saved_tensor(16, key="../0"),
    "five places for a storage": TENSOR + b"((" + text("storage") + sizes(1, 2, 3) + b"tQtR",
}


@pytest.mark.parametrize("name", EVIL)
def test_any_other_pickle_is_refused(name: str) -> None:
    with pytest.raises(DraftError) as told:
        parse_mask_embedding(archive(EVIL[name]))
    assert str(told.value)


def test_pickles_of_another_form_are_refused() -> None:
    body = saved_tensor(16)
    for data in (
        b"\x80\x04" + body + b".",
        b"\x80\x02" + body + b".x",
        b"\x80\x02" + body,
        b"\x80\x02\x80\x02" + body + b".",
        body + b".",
        b"\x80\x02" + body + b"0" * 70_000,
    ):
        with pytest.raises(DraftError):
            parse_mask_embedding(build_archive({"data.pkl": data, **ROW}))


def zipped(*, method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("x/data.pkl", frame(saved_tensor(16)))
        for name, content in ROW.items():
            file.writestr(f"x/{name}", content)
        file.comment = comment
    return buffer.getvalue()


PLAIN = build_plain()
ARCHIVES: dict[str, bytes] = {
    "empty": b"",
    "a bare pickle": frame(saved_tensor(16)),
    "packed": zipped(method=zipfile.ZIP_DEFLATED),
    "with a comment": zipped(comment=b"PK\x05\x06"),
    "something in front": b"#!/bin/sh\n" + PLAIN,
    "something behind": PLAIN + b"x",
    "a second archive behind": PLAIN + PLAIN,
    "cut": PLAIN[:-1],
    "TorchScript": archive(saved_tensor(16), **{"code/x.py": b"import os"}),
    "constants": archive(saved_tensor(16), **{"constants.pkl": frame(b"}")}),
    "a path": archive(saved_tensor(16), **{"../../x": b"x"}),
    "a storage too many": archive(saved_tensor(16), **{"data/1": b"x"}),
    "big ends": archive(saved_tensor(16), byteorder=b"big"),
    "a format of tomorrow": archive(saved_tensor(16), **{".format_version": b"2"}),
    "no pickle": build_archive(ROW),
    "a name twice": PLAIN.replace(b"/byteorder", b"/data.pkl\0"[:10]),
    "another name in front": PLAIN.replace(b"/version", b"/versiom", 1),
    "another size in front": PLAIN.replace(b"PK\x07\x08", b"PK\x07\x09", 1),
    "a directory of another archive": PLAIN[: PLAIN.index(b"PK\x01\x02")]
    + build_plain(8)[build_plain(8).index(b"PK\x01\x02") :],
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_any_other_archive_is_refused(name: str) -> None:
    with pytest.raises(DraftError) as told:
        parse_mask_embedding(ARCHIVES[name])
    assert str(told.value)


def test_a_plain_zip_archive_of_the_same_members_is_read() -> None:
    assert parse_mask_embedding(zipped()).tensor.shape == (16,)
    assert parse_mask_embedding(
        build_archive({"data.pkl": frame(saved_tensor(16)), **ROW}, wide=False)
    )


def test_bytes_of_no_member_are_refused() -> None:
    members = {"data.pkl": frame(saved_tensor(16)), **ROW}
    assert parse_mask_embedding(build_archive(members))
    with pytest.raises(DraftError, match="belong to no member"):
        parse_mask_embedding(build_archive(members, hidden=b"#!/bin/sh"))


def test_members_that_overlap_are_refused() -> None:
    """The second entry of the directory points at the first member."""
    at = PLAIN.rindex(b"PK\x01\x02")
    moved = PLAIN[: at + 42] + struct.pack("<L", 0) + PLAIN[at + 46 :]
    with pytest.raises(DraftError, match="directory says more"):
        parse_mask_embedding(moved)


def test_what_is_accepted_torch_reads_alike() -> None:
    """Mutations that know the form: no fault, and no second opinion."""
    torch = pytest.importorskip("torch")
    random, corpus = Random(0), [build_plain(), build_plain(token=3), zipped()]
    accepted, told = 0, set[str]()
    for _ in range(3000):
        data = mutate_archive(random, corpus)
        try:
            saved = parse_mask_embedding(data)
        except DraftError as problem:
            told.add(problem.what)
            continue
        accepted += 1
        state = torch.load(io.BytesIO(data), weights_only=True)
        row = state["embedding"] if isinstance(state, dict) else state
        assert tuple(row.shape) == saved.tensor.shape
        assert row.contiguous().view(torch.uint8).numpy().tobytes() == read_row(data, saved)
    assert accepted > 100
    assert len(told) > 15
