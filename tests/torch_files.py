"""Files of torch.save by hand, byte by byte: sound ones, and what a stranger could put into one.

data = build_archive({"data.pkl": frame(saved_tensor(16)), "data/0": bytes(32)})
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

__all__ = ["build_archive", "build_plain", "frame", "saved_dict", "saved_tensor", "text"]

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOOKS = b"ccollections\nOrderedDict\n)R"


def text(word: str) -> bytes:
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def sizes(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def saved_tensor(
    count: int,
    *,
    kind: str = "BFloat16Storage",
    key: str = "0",
    place: str = "cpu",
    start: int = 0,
    shape: tuple[int, ...] | None = None,
    strides: tuple[int, ...] = (1,),
    stored: int | None = None,
    rebuild: bytes = TENSOR,
    hooks: bytes = HOOKS,
) -> bytes:
    """Opcodes of one tensor. stored: elements of its whole storage."""
    storage = b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key)
    storage += text(place) + number(count if stored is None else stored) + b"tQ"
    rest = number(start) + sizes(*(shape or (count,))) + sizes(*strides) + b"\x89" + hooks
    return rebuild + b"(" + storage + rest + b"tR"


def saved_dict(**parts: bytes) -> bytes:
    return b"}(" + b"".join(text(name) + part for name, part in parts.items()) + b"u"


def frame(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def build_archive(
    members: Mapping[str, bytes],
    *,
    folder: str = "mask_embedding",
    wide: bool = True,
    hidden: bytes = b"",
) -> bytes:
    """The zip archive as torch writes it. wide: with the end record of 64 bits before the end.

    hidden: bytes of no member, before the directory.
    """
    data, directory = b"", b""
    for own, content in members.items():
        name = f"{folder}/{own}".encode()
        crc, size = zlib.crc32(content), len(content)
        padding = -(len(data) + 30 + len(name) + 4) % 64
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        head = struct.pack("<5H3L2H", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        behind = b"PK\x07\x08" + struct.pack("<3L", crc, size, size)
        entry = struct.pack("<6H3L5H2L", 0, 0, 0x808, 0, 0, 0, crc, size, size, len(name), *[0] * 5,
                            len(data))  # fmt: skip
        directory += b"PK\x01\x02" + entry + name
        data += b"PK\x03\x04" + head + name + extra + content + behind
    data += hidden
    begin, count = len(data), len(members)
    data += directory
    if wide:
        end = len(data)
        data += b"PK\x06\x06" + struct.pack(
            "<Q2H2L4Q", 44, 0, 0, 0, 0, count, count, len(directory), begin
        )
        data += b"PK\x06\x07" + struct.pack("<LQL", 0, end, 1)
    end_record = struct.pack("<4H2LH", 0, 0, count, count, len(directory), begin, 0)
    return data + b"PK\x05\x06" + end_record


def build_plain(count: int = 16, *, token: int | None = None, value: bytes = b"\x80\x3f") -> bytes:
    """One bfloat16 row, all of it `value`; with `token`, in a dict that names the mask token."""
    body = saved_tensor(count)
    if token is not None:
        body = saved_dict(mask_token_id=number(token), embedding=body)
    return build_archive(
        {
            "data.pkl": frame(body),
            ".format_version": b"1",
            ".storage_alignment": b"64",
            "byteorder": b"little",
            "data/0": value * count,
            "version": b"3\n",
            ".data/serialization_id": b"1" * 40,
        }
    )
