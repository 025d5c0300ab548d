"""The zip archive that torch.save writes: every byte of the file belongs to one place in it.

Two readers of a zip archive can find two contents in it: members that overlap, a second directory,
sizes that differ between a member's header and the directory. Here members are stored as they are,
follow one another from the first byte on, and end where the directory begins, which ends where the
file does. Source of the form: caffe2/serialize/inline_container.cc and its miniz, PyTorch 2.13.
"""

from __future__ import annotations

import re
import struct

from paceline.errors import DraftError

__all__ = ["read_members"]

MAX_MEMBERS = 64
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_FOLLOWED = 0x8  # a member's sizes stand behind it too
_FLAGS = (0, _FOLLOWED, 0x800, _FOLLOWED | 0x800)
_NAME = re.compile(
    rb"([A-Za-z0-9_.\-]{1,128})/(data\.pkl|version|byteorder|\.format_version|\.storage_alignment"
    rb"|\.data/serialization_id|data/\d{1,3})"
)


def read_members(data: bytes) -> dict[str, range]:
    """Name inside the archive's one folder -> where its bytes are. Raises DraftError."""
    begin, end, count = _read_end(data)
    members: dict[str, range] = {}
    folders = set()
    place, at = 0, begin
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise DraftError("its directory is cut short")
        entry = _ENTRY.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc, packed, size = entry[:10]
        length, extra, comment, disk, _, _, offset = entry[10:]
        name = data[at + _ENTRY.size : at + _ENTRY.size + length]
        if signature != b"PK\x01\x02" or method or flags not in _FLAGS or packed != size:
            raise DraftError("a member of it is packed, encrypted or no member")
        if extra or comment or disk or offset != place:
            raise DraftError("its directory says more than where its members are")
        found = _NAME.fullmatch(name)
        if found is None:
            raise DraftError(f"it holds {name[:60]!r}, which torch.save does not write")
        folders.add(found[1])
        own = found[2].decode("ascii")
        if own in members or len(folders) > 1:
            raise DraftError("two of its members share a name, or lie in two folders")
        members[own], place = _find_member(data, place, begin, (flags, crc, size, name))
        at += _ENTRY.size + length
    if at != end or place != begin:
        raise DraftError("it holds bytes that belong to no member")
    return members


def _read_end(data: bytes) -> tuple[int, int, int]:
    """(where the directory begins, where it ends, its number of members)."""
    end = len(data) - _END.size
    if end < 0:
        raise DraftError("it is too short for a zip archive")
    signature, disk, first, here, count, size, begin, comment = _END.unpack_from(data, end)
    if signature != b"PK\x05\x06" or disk or first or here != count or comment:
        raise DraftError("it does not end as a zip archive does")
    wide_at = end - _LOCATOR.size - _END_64.size
    if wide_at >= 0 and data.startswith(b"PK\x06\x07", end - _LOCATOR.size):
        _, on, place, disks = _LOCATOR.unpack_from(data, end - _LOCATOR.size)
        wide = _END_64.unpack_from(data, wide_at)
        if on or place != wide_at or disks != 1 or wide[:2] != (b"PK\x06\x06", 44):
            raise DraftError("its end does not say where its directory is")
        if any(wide[4:6]) or wide[6] != wide[7]:
            raise DraftError("it is one part of an archive")
        told = ((count, wide[7], 0xFFFF), (size, wide[8], 2**32 - 1), (begin, wide[9], 2**32 - 1))
        if any(short not in (full, top) for short, full, top in told):
            raise DraftError("its two ends contradict each other")
        count, size, begin, end = wide[7], wide[8], wide[9], wide_at
    if begin + size != end or count > MAX_MEMBERS:
        raise DraftError("its directory does not end where the file does, or is too long")
    return begin, end, count


def _find_member(
    data: bytes, place: int, end: int, told: tuple[int, int, int, bytes]
) -> tuple[range, int]:
    """(its bytes, where the next member begins). told: what the directory says of it."""
    flags, crc, size, name = told
    if place + _LOCAL.size > end:
        raise DraftError("a member of it is cut short")
    signature, _, own_flags, method, _, _, own_crc, packed, own_size, length, extra = (
        _LOCAL.unpack_from(data, place)
    )
    followed = bool(flags & _FOLLOWED)
    sizes = [(crc, size, size)] + [(0, 0, 0)] * followed
    begin = place + _LOCAL.size + length + extra
    if (
        signature != b"PK\x03\x04"
        or own_flags != flags
        or method
        or data[place + _LOCAL.size : place + _LOCAL.size + length] != name
        or (own_crc, packed, own_size) not in sizes
        or begin + size > end
    ):
        raise DraftError("a member of it is another one than its directory says")
    after = begin + size
    if followed:
        short = struct.pack("<4s3L", b"PK\x07\x08", crc, size, size)
        long = struct.pack("<4sL2Q", b"PK\x07\x08", crc, size, size)
        if data.startswith(short, after):
            after += len(short)
        elif data.startswith(long, after):
            after += len(long)
        else:
            raise DraftError("a member of it ends otherwise than its directory says")
    return range(begin, begin + size), after
