"""Seconds and memory of `paceline validate` on a folder of 3 GB, beside `sha256sum` of its weights.

    python bench/validate_cost.py [--keep]

Promises: shallow at most 1.5 s and 150 MB; deep at most 1.2 times sha256sum and 600 MB, alone,
beside a target of 64 layers with which every matrix is compared, and as a fetched folder, whose
hashes are taken again; a folder that means harm (headers of up to 16 MB in several forms) at most
5 s and 150 MB. The large folder is an EAGLE-3 draft with embeddings of its own, real bytes on disk,
read once before the clock runs (so both readers find it in the page cache), and removed. The
target's 39 GB are a hole in its file: what is read of it are a few thousand values a matrix.
Prints one JSON object; with --keep it also goes to bench/results/validate_cost.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.hub import manifest_path
from paceline.records import build_provenance, write_json

SHALLOW_S, SHALLOW_BYTES = 1.5, 150 * 10**6
DEEP_SHARE, DEEP_BYTES = 1.2, 600 * 10**6
HOSTILE_S, HOSTILE_BYTES = 5.0, 150 * 10**6
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 1,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 184320,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [2, 32, 61],
    "num_aux_hidden_states": 3,
}


def build_folder(folder: Path) -> None:
    """Writes the draft. In a process of its own: a child's peak memory begins at its parent's."""
    import numpy as np

    from paceline.draft import build_contract

    rules = build_contract("eagle3", CONFIG).tensors
    names = sorted(set(rules) - {"t2d", "input_norm.weight", "mask_hidden"})
    names.sort(key=lambda name: name != "d2t")  # the widest elements first: all starts aligned
    normal = np.random.default_rng(0).standard_normal(2**23, dtype=np.float32) * 0.02
    tile = (normal.view("<u4") >> 16).astype("<u2").tobytes()
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        size = math.prod(rules[name].shape) * (8 if name == "d2t" else 2)
        dtype = "I64" if name == "d2t" else "BF16"
        entries[name] = {
            "dtype": dtype,
            "shape": list(rules[name].shape),
            "data_offsets": [at, at + size],
        }
        at += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for turn, name in enumerate(names):
            begin, end = entries[name]["data_offsets"]
            left = end - begin
            if name == "d2t":
                file.write(np.zeros(left // 8, dtype="<i8").tobytes())
                continue
            shift = 2 * turn * 4096  # no two tensors with the same bytes
            rolled = memoryview(tile[shift:] + tile[:shift])
            while left:
                left -= file.write(rolled[: min(left, len(tile))])
    write_rest(folder)


def build_target(folder: Path) -> None:
    """64 layers of the draft's width: headers that are true, values that are a hole in the file."""
    hidden, wide, layers = CONFIG["hidden_size"], CONFIG["intermediate_size"], 64
    config = {
        **{key: CONFIG[key] for key in CONFIG if "aux" not in key and "draft" not in key},
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
    }
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    shapes = dict.fromkeys(ends, (CONFIG["vocab_size"], hidden))
    for layer in range(layers):
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (1024, hidden)),
            ("self_attn.v_proj", (1024, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (wide, hidden)),
            ("mlp.up_proj", (wide, hidden)),
            ("mlp.down_proj", (hidden, wide)),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    entries, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)


def build_manifest(folder: Path) -> None:
    """What `paceline fetch` leaves beside a folder, without a Hub."""
    files = {}
    for item in folder.iterdir():
        with open(item, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[item.name] = {"bytes": item.stat().st_size, "sha256": digest}
    manifest = {"format": "paceline-fetch/1", "repo": "o/n", "commit": "0" * 40, "files": files}
    write_json(manifest_path(folder), manifest)


def build_hostile(place: Path) -> None:
    """Headers at the edge of what a reader takes, each in a folder that is sound otherwise."""
    entry = '"%s%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    headers = {
        "20,000 tensors with long names": ",".join(
            entry % ("a" * 240, i, i, i + 1) for i in range(20_000)
        ),
        "120,000 tensors": ",".join(entry % ("a", i, i, i + 1) for i in range(120_000)),
        "one name 80,000 times": ",".join(entry % ("a", 0, 0, 1) for _ in range(80_000)),
        "2,000 long strings": ",".join(f'"{i}":"{"x" * 8000}"' for i in range(2000)),
        "490,000 numbers": f'"a":[{"1," * 490_000}1]',
        "brackets": '"a":' + "[" * (16 * 2**20 - 100),
    }
    for number, (name, text) in enumerate(headers.items()):
        folder = place / f"{number} {name}"
        folder.mkdir(parents=True)
        raw = f"{{{text}}}".encode()
        raw += b" " * (-len(raw) % 8)
        weights = struct.pack("<Q", len(raw)) + raw + bytes(120_000)
        (folder / "model.safetensors").write_bytes(weights)
        write_rest(folder)


def write_rest(folder: Path) -> None:
    spec = {"family": "eagle3", "num_speculative_tokens": 3}
    metadata = {"name": "bench", "trained": {"thinking": "none"}}
    for name, value in (
        ("config.json", CONFIG),
        ("spec.json", spec),
        ("metadata.json", metadata),
    ):
        (folder / name).write_text(json.dumps(value))


def run(command: list[str]) -> dict[str, Any]:
    """Seconds of the clock and of the processor, peak resident bytes, exit code, last line."""
    began = time.monotonic()
    read_end, write_end = os.pipe()
    pid = os.posix_spawn(
        command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write_end, 1)]
    )
    os.close(write_end)
    with os.fdopen(read_end) as output:
        text = output.read()
    _, status, usage = os.wait4(pid, 0)
    return {
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": usage.ru_maxrss * 1024,
        "exit_code": os.waitstatus_to_exitcode(status),
        "last_line": text.strip().splitlines()[-1][:120] if text.strip() else "",
    }


def describe_deep(runs: list[dict[str, Any]], hash_s: float) -> dict[str, Any]:
    best = min(one["seconds"] for one in runs)
    return {
        "seconds": best,
        "times_sha256sum": round(best / hash_s, 2),
        "peak_bytes": max(one["peak_bytes"] for one in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build_folder(options.build / "large")
        build_target(options.build / "target")
        build_hostile(options.build / "hostile")
        return
    paceline = str(Path(sys.executable).with_name("paceline"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "large"
        folder.mkdir()
        name = str(folder)
        run([sys.executable, __file__, "--build", place])
        weights = (folder / "model.safetensors").stat().st_size
        hashing = ["/usr/bin/sha256sum", str(folder / "model.safetensors")]
        run(hashing)  # into the page cache
        shallow = [run([paceline, "validate", name]) for _ in range(5)]
        hashed = [run(hashing) for _ in range(2)]
        deep = [run([paceline, "validate", name, "--deep"]) for _ in range(2)]
        target = str(Path(place) / "target")
        beside = [run([paceline, "validate", name, "--deep", "--target", target]) for _ in range(2)]
        build_manifest(folder)
        fetched = [run([paceline, "validate", name, "--deep"]) for _ in range(2)]
        hostile = {
            item.name: run([paceline, "validate", str(item), "--deep"])
            for item in sorted((Path(place) / "hostile").iterdir())
        }
    best_hash = min(one["seconds"] for one in hashed)
    shallow_s = statistics.median(one["seconds"] for one in shallow)
    figures = {
        "weights_bytes": weights,
        "shallow": {"median_s": shallow_s, "peak_bytes": max(r["peak_bytes"] for r in shallow)},
        "sha256sum_s": best_hash,
        "deep": describe_deep(deep, best_hash),
        "deep_beside_target": describe_deep(beside, best_hash),
        "deep_fetched": describe_deep(fetched, best_hash),
        "hostile": {
            "slowest_s": max(one["seconds"] for one in hostile.values()),
            "peak_bytes": max(one["peak_bytes"] for one in hostile.values()),
        },
        "verdicts": sorted({one["last_line"] for one in (*shallow, *deep, *beside, *fetched)}),
        "runs": {
            "shallow": shallow,
            "sha256sum": hashed,
            "deep": deep,
            "deep_beside_target": beside,
            "deep_fetched": fetched,
            "hostile": hostile,
        },
    }
    figures["within_promise"] = {
        "shallow": shallow_s <= SHALLOW_S and figures["shallow"]["peak_bytes"] <= SHALLOW_BYTES,
        **{
            kind: figures[kind]["times_sha256sum"] <= DEEP_SHARE
            and figures[kind]["peak_bytes"] <= DEEP_BYTES
            and all(one["exit_code"] == 0 for one in figures["runs"][kind])
            for kind in ("deep", "deep_beside_target", "deep_fetched")
        },
        "hostile": figures["hostile"]["slowest_s"] <= HOSTILE_S
        and figures["hostile"]["peak_bytes"] <= HOSTILE_BYTES
        and all(one["exit_code"] == 2 for one in hostile.values()),
    }
    print(json.dumps(figures, indent=2))
    if options.keep:
        place = Path(__file__).parent / "results" / "validate_cost.json"
        write_json(place, {"provenance": build_provenance(), "figures": figures})


if __name__ == "__main__":
    main()
