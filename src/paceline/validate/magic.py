"""What a file really is: its first bytes, and its end, where a zip archive keeps its directory."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator

from paceline.validate.report import Finding, finding

__all__ = ["check_magic"]

_START = 265  # a tar archive says "ustar" at byte 257
_END = 22 + 65_535  # the end record of a zip archive and its longest comment
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive (a torch pickle, wheel or npz)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"PK\x07\x08", "a split zip archive"),
    (b"GGUF", "a GGUF model"),
    (b"GGML", "a GGML model"),
    (b"ggjt", "a GGML model"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "an ELF program"),
    (b"MZ", "a Windows program"),
    (b"\xfe\xed\xfa", "a macOS program"),
    (b"\xce\xfa\xed\xfe", "a macOS program"),
    (b"\xcf\xfa\xed\xfe", "a macOS program"),
    (b"\xca\xfe\xba\xbe", "a macOS or Java program"),
    (b"\0asm", "a WebAssembly program"),
    (b"!<arch>", "a library archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\0", "an xz archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a rar archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x04\x22\x4d\x18", "an lz4 archive"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x08\0\0\0TFL3", "a TensorFlow Lite model"),
    (b"SQLite format 3\0", "a database"),
    (b"#!", "a script"),
    (b"%PDF", "a PDF document"),
)
# Protocols 2 to 5 name themselves; 0 and 1 begin with an opcode: an import of a module and a name,
# or the marks that open a container. JSON and prose never begin so.
_PICKLE = re.compile(
    rb"\x80[\x02-\x05]"
    rb"|[ci][A-Za-z_][\w.]*\n[A-Za-z_]\w*\n(?:[()\]}]|[qp][\d\x00-\x1f])"
    rb"|\(?[\]}](?:q\x00|p\d)|\([dl]p\d"
)


def check_magic(name: str, handle: int, size: int) -> Iterator[Finding]:
    """`fs.pickle` by content. Reads at most 66 KB of the open file. Raises OSError."""
    start = os.pread(handle, _START, 0)
    kind = "" if _is_header_length(name, start) else _name_kind(start)
    if not kind and size > 22 and _ends_as_zip(handle, size):
        kind = "something else with a zip archive behind it"
    if kind:
        yield finding(
            "fs.pickle",
            name,
            f"its content is {kind}",
            found=kind,
            expected="what its name says",
            fix="Save the weights with safetensors; remove everything else.",
        )


def _name_kind(start: bytes) -> str:
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return kind
    if start[257:262] == b"ustar":
        return "a tar archive"
    return "a Python pickle" if _PICKLE.match(start) else ""


def _is_header_length(name: str, start: bytes) -> bool:
    """A safetensors file may begin with any length; its ninth byte tells it from a pickle."""
    return name.endswith(".safetensors") and start[8:9] == b"{" and start[4:8] == b"\0\0\0\0"


def _ends_as_zip(handle: int, size: int) -> bool:
    """An end record whose directory is where it says; four bytes of weights alone are chance.

    Readers of zip archives put up with bytes behind the record, so this does too.
    """
    begin = max(0, size - _END)
    tail = os.pread(handle, _END, begin)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        record = tail[at : at + 22]
        if tail[max(0, at - 20) : at].startswith(b"PK\x06\x07"):
            return True  # the locator of a larger end record
        if len(record) == 22:
            entries, length = struct.unpack("<10xHI6x", record)
            directory = begin + at - length
            is_end = entries > 0 and directory >= 0
            if is_end and os.pread(handle, 4, directory) == b"PK\x01\x02":
                return True
        at = tail.rfind(b"PK\x05\x06", 0, at)
    return False
