"""Writes tests/corpus/readers: small headers and documents, sound and broken, to fuzz from.

    python tests/corpus/build_readers.py

Each is one kind of trouble that a reader has met, or a sound file. `expected.json` says which
rules answer to each; tests/unit/ground/test_reader_corpus.py holds both against the readers.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from builders import build_config, build_tensors, random_bf16, write_safetensors  # noqa: E402

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWO = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def frame(table: Any, body: bytes = b"", *, length: int | None = None, pad: bytes = b" ") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text += pad * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def build_headers(folder: Path) -> dict[str, bytes]:
    write_safetensors(folder / "draft", {"w": random_bf16(2, 3, seed=1)})
    sound = (folder / "draft").read_bytes()
    (folder / "draft").unlink()
    names = list(build_tensors(build_config()))
    many = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
        for at, name in enumerate(names)
    }
    one = json.dumps(ONE).encode()
    return {
        "sound": sound,
        "sound-two": frame({"a": ONE, "b": TWO}, bytes(16)),
        "sound-draft-names": frame(many, bytes(len(names))),
        "sound-scalar": frame(
            {"s": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}}, bytes(8)
        ),
        "empty-table": frame({}),
        "name-twice": frame(b'{"a": ' + one + b', "a": ' + one + b"}", bytes(8)),
        "name-path": frame({"../a": ONE}, bytes(8)),
        "name-nul": frame({"a\0b": ONE}, bytes(8)),
        "name-bidi": frame({"a\u202eb": ONE}, bytes(8)),
        "field-unknown": frame({"a": {**ONE, "x": 1}}, bytes(8)),
        "field-twice": frame(
            b'{"a": {"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', bytes(8)
        ),
        "dtype-f4": frame({"a": {**ONE, "dtype": "F4"}}, bytes(8)),
        "shape-huge": frame({"a": {**ONE, "shape": [2**62, 0]}}, bytes(8)),
        "shape-overflow": frame({"a": {**ONE, "shape": [2**26] * 4}}, bytes(8)),
        "shape-bool": frame({"a": {**ONE, "shape": [True, 2]}}, bytes(8)),
        "overlap": frame({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, bytes(12)),
        "hole": frame({"a": ONE, "b": {**TWO, "data_offsets": [12, 20]}}, bytes(20)),
        "trailing": frame({"a": ONE}, bytes(9)),
        "cut": frame({"a": ONE}, bytes(7)),
        "misaligned": frame(
            {
                "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
            },
            bytes(5),
        ),
        "metadata-not-text": frame({"__metadata__": {"a": 1}, "a": ONE}, bytes(8)),
        "metadata-tf": frame({"__metadata__": {"format": "tf"}, "a": ONE}, bytes(8)),
        "padding-nul": frame({"a": ONE}, bytes(8), pad=b"\0"),
        "padding-newline": frame({"a": ONE}, bytes(8), pad=b"\n"),
        "length-zero": frame({"a": ONE}, bytes(8), length=0),
        "length-huge": frame({"a": ONE}, bytes(8), length=2**63),
        "length-beyond": frame({"a": ONE}, bytes(8), length=4096),
        "list": frame([1, 2]),
        "pickle": b"\x80\x04\x95" + bytes(40),
        "zip": b"PK\x03\x04" + bytes(40),
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "nothing": b"",
    }


def build_documents() -> dict[str, bytes]:
    config = build_config()
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    quantized = {"quant_method": "compressed-tensors", "ignore": ["re:.*lm_head", "lm_head"]}
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    sound = {
        "config": config,
        "config-yarn": {**config, "rope_parameters": rope},
        "config-quantized": {**config, "quantization_config": quantized},
        "config-nested": {
            **config,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        },
        "spec": {"family": "eagle3", "num_speculative_tokens": 3},
        "spec-ngram": {"family": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        "metadata": {
            "name": "é",
            "trained": {"thinking": "off", "target": {"tokenizer_sha256": "a"}},
        },
        "index": index,
        "numbers": [0, -1, 2**53, 1.5, -0.0, 1e-300, 1e308],
        "text": ['"\\/\b\f\n\r\t', "😀", "\u2028"],
    }
    broken = {
        "key-twice": b'{"a": {"b": 1, "b": 2}}',
        "nan": b'{"a": NaN}',
        "infinity": b"[Infinity, -Infinity]",
        "integer-large": b"[9007199254740993]",
        "exponent-large": b"[1e999]",
        "exponent-small": b"[1e-999]",
        "mark": b"\xef\xbb\xbf{}",
        "nul": b'{"a": "\0"}',
        "not-utf8": b'{"a": "\xff"}',
        "surrogate": b'{"a": "\\ud800"}',
        "deep": b"[" * 40 + b"]" * 40,
        "cut": b'{"a": [1, 2',
        "two": b"{} {}",
        "comment": b'{"a": 1} // x',
        "quotes": b"{'a': 1}",
        "comma": b'{"a": 1,}',
        "null": b"null",
        "empty": b"",
    }
    return {**{name: json.dumps(value).encode() for name, value in sound.items()}, **broken}


def build_corpus(out: Path) -> None:
    from paceline.safetensors_header import scan_header
    from paceline.strict_json import scan_json

    expected: dict[str, dict[str, list[str]]] = {"headers": {}, "documents": {}}
    for kind, files in (("headers", build_headers(out)), ("documents", build_documents())):
        (out / kind).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            path = out / kind / name
            path.write_bytes(data)
            scanned = scan_header(path) if kind == "headers" else scan_json(data, file=name)
            expected[kind][name] = sorted({problem.rule for problem in scanned[1]})
    (out / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    (HERE / "readers").mkdir(exist_ok=True)
    build_corpus(HERE / "readers")
