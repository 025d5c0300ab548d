"""Mutations of headers and JSON documents that know their structure: for fuzzing the readers.

    random = Random(7)
    data = mutate_header(random, HEADERS)     # bytes of a whole safetensors file
    data = mutate_document(random, DOCUMENTS) # bytes of a JSON file

A seed gives the same bytes on every machine. `corpus/readers` holds what they start from.
"""

from __future__ import annotations

import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from torch_files import build_archive

__all__ = ["CORPUS", "mutate_archive", "mutate_document", "mutate_header", "read_corpus"]

CORPUS = Path(__file__).parent / "corpus" / "readers"
_MAX_BYTES = 64 * 1024

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 16, 48, 64, 2**26, 2**53, 2**62, 2**63, 2**64, 2**200),
    *(0.0, -0.0, 0.5, 1e-6, 1e308, 1e-320, "", "BF16", "F32", "I64", "pt", "eagle3", "llama"),
    *("../x", "a/b", "\u202e", "\x00", "x" * 300, [], {}, [[]], [0, 0], [1, 2, 3], {"a": 1}),
    *([2**62, 2**62], {"auto_map": {}}, {"rope_type": "yarn"}, [None], ["a"], [1, "a"], [True]),
)
_TOKENS = (
    *(b"NaN", b"-Infinity", b"1e999", b"1e-999", b"\\ud800", b"\\u0000", b"[" * 40, b"]" * 40),
    *(b'{"a":1,"a":2}', b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"9" * 40, b"-", b"\\", b'"', b","),
    *(b":", b"{", b"}", b"\n", b"//", b"0x10", b"1.", b".5", b"+1", b"01", b"nul", b"true", b"'"),
)
_DTYPES = (
    "BOOL",
    "U8",
    "I8",
    "F8_E4M3",
    "F16",
    "BF16",
    "I32",
    "F32",
    "I64",
    "F64",
    "F4",
    "C64",
    "",
)


def read_corpus(kind: str) -> list[bytes]:
    """`kind`: "headers" or "documents"; in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / kind).iterdir())]


def mutate_document(random: Random, corpus: Sequence[bytes]) -> bytes:
    """One document: a changed tree, changed bytes, or both."""
    data = random.choice(corpus)
    if random.random() < 0.7:
        data = _change_tree(random, data, corpus)
    if random.random() < 0.4:
        data = _change_bytes(random, data, corpus)
    return data[:_MAX_BYTES]


def mutate_header(random: Random, corpus: Sequence[bytes]) -> bytes:
    """One file: a changed table of contents with lengths that fit or not, or changed bytes."""
    data = random.choice(corpus)
    if random.random() < 0.85:
        data = _change_table(random, data, corpus)
    if random.random() < 0.2:
        data = _change_bytes(random, data, corpus)
    return data[:_MAX_BYTES]


def _change_bytes(random: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(changed))
        end = min(len(changed), at + random.randint(0, 32))
        match random.randint(0, 6):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << random.randint(0, 7)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = random.choice(_TOKENS)
            case 3:
                changed[at:at] = changed[at:end] * random.randint(1, 20)
            case 4:
                del changed[at:]
            case 5:
                other = random.choice(corpus)
                begin = random.randint(0, len(other))
                changed[at:end] = other[begin : begin + random.randint(0, 64)]
            case _:
                changed[at:at] = random.randbytes(random.randint(1, 8))
    return bytes(changed)


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return {"hidden_size": 16, "architectures": ["LlamaForCausalLMEagle3"]}


def _list_places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below the top."""
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack and len(places) < 500:
        item = stack.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item))
        for key in keys:
            places.append((item, key))
            if isinstance(item[key], (dict, list)):
                stack.append(item[key])
    return places


def _change_value(random: Random, value: Any) -> Any:
    """A near value, or any of the interesting ones."""
    if isinstance(value, bool) or random.random() < 0.5:
        return json.loads(json.dumps(random.choice(_VALUES)))
    if isinstance(value, int):
        return value + random.choice((-1, 1, value, -2 * value, 2**32))
    if isinstance(value, float):
        return value * random.choice((-1.0, 0.0, 1e300, 1e-300, 2.0))
    if isinstance(value, str):
        return random.choice((value.upper(), value + value, value[:-1], value + "\x1b[2J", ""))
    if isinstance(value, list):
        return random.choice((value + value, value[:-1], [value], value[::-1], value[:1] * 30))
    if isinstance(value, dict):
        return random.choice(({}, {"x": value}, list(value), {**value, "": None}))
    return 0


def _change_tree(random: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    value = _parse(data)
    if not isinstance(value, (dict, list)) or not value:
        return json.dumps(_change_value(random, value)).encode("utf-8", "surrogatepass")
    for _ in range(random.randint(1, 4)):
        places = _list_places(value)
        if not places:
            break
        container, key = random.choice(places)
        match random.randint(0, 5):
            case 0 | 1:
                container[key] = _change_value(random, container[key])
            case 2:
                del container[key]
            case 3 if isinstance(container, dict):
                container[random.choice((*container, "auto_map", "x" * 40))] = container[key]
            case 4:
                other = _parse(random.choice(corpus))
                spots = _list_places(other) if isinstance(other, (dict, list)) else []
                if spots:
                    source, spot = random.choice(spots)
                    container[key] = source[spot]
            case _:
                for _ in range(random.randint(1, 30)):
                    container[key] = [container[key]]
    text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    if random.random() < 0.1 and '": ' in text:  # one key twice
        at = text.index('": ')
        begin = text.rfind('"', 0, at)
        text = f"{text[:begin]}{text[begin : at + 3]}1, {text[begin:]}"
    return text.encode("utf-8", "surrogatepass")


def _split(data: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
    if length > len(data):
        return {}, b""
    return _parse(data[8 : 8 + length].rstrip(b" ")), data[8 + length :]


def _change_table(random: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    table, body = _split(data)
    if not isinstance(table, dict):
        table = {}
    for _ in range(random.randint(1, 3)):
        names = [name for name in table if isinstance(table[name], dict)]
        entry = table[random.choice(names)] if names else {}
        match random.randint(0, 8):
            case 0:
                entry["dtype"] = random.choice(_DTYPES)
            case 1:
                entry["shape"] = [random.choice((0, 1, 2, 3, 16, 2**26, 2**62, -1)) for _ in "ab"]
            case 2:
                begin = random.choice((0, 1, 4, 8, len(body), 2**53, -4))
                entry["data_offsets"] = [begin, begin + random.choice((0, 1, 2, 4, 8, 64))]
            case 3:
                table[random.choice(("a", "../a", "a b", "", "__metadata__", "x" * 300))] = dict(
                    entry
                )
            case 4 if names:
                del table[random.choice(names)]
            case 5:
                table["__metadata__"] = random.choice(
                    ({"format": "pt"}, {"format": "tf"}, {"a": 1}, [], {"a": "x" * 9000}, None)
                )
            case 6 if entry:
                key = random.choice(sorted(entry))
                entry[key] = _change_value(random, entry[key])
            case 7:
                table = _lay_out(random)
                body = b"\0" * max((e["data_offsets"][1] for e in table.values()), default=0)
            case _:
                body = body[: random.randint(0, len(body))] + b"\0" * random.randint(0, 3)
    text = json.dumps(table).encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        text = _change_bytes(random, text, corpus)
    pad = b" " if random.random() < 0.97 else random.choice((b"\n", b"\0", b"}"))
    text += pad * (-len(text) % 8)
    length = len(text) if random.random() < 0.95 else random.choice((0, 1, len(text) + 8, 2**63, 7))
    return struct.pack("<Q", length) + text + body


def _lay_out(random: Random) -> dict[str, Any]:
    """A sound table of a few tensors, so that a share of all cases is accepted."""
    table: dict[str, Any] = {}
    at = 0
    for index in range(random.randint(1, 5)):
        shape = [random.randint(1, 4) for _ in range(random.randint(0, 3))]
        size = 4
        for count in shape:
            size *= count
        table[f"t{index}.weight"] = {
            "dtype": random.choice(("F32", "I32")),
            "shape": shape,
            "data_offsets": [at, at + size],
        }
        at += size
    return table


def mutate_archive(random: Random, corpus: Sequence[bytes]) -> bytes:
    """A file of torch.save: another pickle inside, another archive around it, or changed bytes."""
    members = _list_members(random.choice(corpus))
    if random.random() < 0.6:
        members["data.pkl"] = _change_pickle(random, members["data.pkl"])
    if random.random() < 0.2:
        members[random.choice(sorted(members))] = random.randbytes(random.choice((0, 1, 32, 33)))
    if random.random() < 0.1:
        members[random.choice(("data/1", "constants.pkl", "../x", "version"))] = b"1"
    if random.random() < 0.1:
        del members[random.choice(sorted(members))]
    data = build_archive(members, wide=random.random() < 0.8)
    if random.random() < 0.25:
        data = _change_bytes(random, data, corpus)
    return data


def _list_members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name.split("/", 1)[1]: file.read(name) for name in file.namelist()}


_OPCODES = (
    *(
        b"(",
        b"t",
        b"}",
        b"]",
        b")",
        b"R",
        b"Q",
        b"u",
        b"s",
        b"0",
        b"2",
        b"b",
        b"\x81",
        b"N",
        b"\x88",
    ),
    *(b"\x89", b"q\x00", b"h\x00", b"h\x01", b"K\x01", b"J\xff\xff\xff\xff", b"\x8a\x01\x05", b"."),
    *(
        b"cos\nsystem\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch\nFloatStorage\n",
        b"\x85",
        b"\x86",
    ),
    *(b"ctorch._utils\n_rebuild_parameter\n", b"X\x01\x00\x00\x00a", b"I9\n", b"G" + bytes(8)),
)


def _change_pickle(random: Random, data: bytes) -> bytes:
    """Opcodes put in, taken out, doubled or exchanged, at their own borders."""
    starts = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    parts = [data[low:high] for low, high in pairwise(starts)]
    for _ in range(random.randint(1, 3)):
        at = random.randrange(1, len(parts))
        change = random.randrange(4)
        if change == 0:
            parts.insert(at, random.choice(_OPCODES))
        elif change == 1 and len(parts) > 2:
            del parts[at]
        elif change == 2:
            parts.insert(at, random.choice(parts))
        else:
            parts[at] = random.choice(_OPCODES)
    return b"".join(parts)
