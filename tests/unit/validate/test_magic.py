"""What a file is, by its bytes: every kind under a harmless name, and prose that only looks so."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from builders import build_draft, build_target_facts

from paceline.validate import validate_draft


def make_zip(comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
        archive.comment = comment
    return buffer.getvalue()


def make_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    return buffer.getvalue()


def make_numpy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


class Harm:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("ran",))


HARMFUL: dict[str, bytes] = {
    **{f"pickle protocol {n}": pickle.dumps(Harm(), protocol=n) for n in range(6)},
    **{f"pickled dict {n}": pickle.dumps({"a": 1}, protocol=n) for n in range(6)},
    **{f"pickled list {n}": pickle.dumps([1, 2], protocol=n) for n in range(6)},
    "zip": make_zip(),
    "zip behind prose": b"# My draft\n" * 50 + make_zip(b"a comment"),
    "zip between prose": b"# My draft\n" * 50 + make_zip() + b"\nThe end.\n" * 200,
    "tar": make_tar(),
    "numpy": make_numpy(),
    "gzip": gzip.compress(b"x"),
    "bzip2": bz2.compress(b"x"),
    "xz": lzma.compress(b"x"),
    "gguf": b"GGUF\x03\0\0\0",
    "elf": b"\x7fELF\x02\x01",
    "script": b"#!/bin/sh\nrm -rf /\n",
    "hdf5": b"\x89HDF\r\n\x1a\n",
    "wasm": b"\0asm\x01\0\0\0",
}
PROSE = (
    "# A draft for Qwen",
    "charlie\nparker played\n",
    "changelog\nFirst\nSecond\n",
    "(list of things)",
    "(implementation notes)\n",
    "]quirk",
    "Prose with PK\x05\x06 in it",
    "",
    "c",
)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_draft(tmp_path_factory.mktemp("magic") / "draft")


def found(draft: Path, name: str, content: bytes) -> bool:
    before = (draft / name).read_bytes() if (draft / name).exists() else None
    (draft / name).write_bytes(content)
    try:
        report = validate_draft(draft, target=build_target_facts(draft.parent))
    finally:
        if before is None:
            (draft / name).unlink()
        else:
            (draft / name).write_bytes(before)
    return any(item.rule == "fs.pickle" for item in report.findings)


@pytest.mark.parametrize("kind", HARMFUL)
@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_content_beats_the_name(draft: Path, name: str, kind: str) -> None:
    assert found(draft, name, HARMFUL[kind])


@pytest.mark.parametrize("text", PROSE)
def test_prose_is_not_taken_for_a_pickle(draft: Path, text: str) -> None:
    assert not found(draft, "README.md", text.encode())


def test_a_zip_behind_sound_weights_is_found(draft: Path) -> None:
    assert found(
        draft, "model.safetensors", (draft / "model.safetensors").read_bytes() + make_zip()
    )


@pytest.mark.parametrize("length", [0x10480, 0x4B50, 0x5A4D, 0x12123])
def test_a_header_length_that_spells_a_magic_is_no_finding(draft: Path, length: int) -> None:
    """\\x80\\x04, PK, MZ and #! are lengths of headers too; the ninth byte tells."""
    content = (draft / "model.safetensors").read_bytes()
    old = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + old] + b" " * (length - old)
    assert not found(
        draft, "model.safetensors", length.to_bytes(8, "little") + header + content[8 + old :]
    )
