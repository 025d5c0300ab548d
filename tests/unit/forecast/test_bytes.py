"""Bytes against hand-worked numbers and against what started engines held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.forecast import (
    CachePlan,
    LayerCache,
    TargetShape,
    group_layers,
    measure_cache,
    measure_memory,
    parse_design,
    read_shape,
)
from paceline.forecast.memory import all_layers
from paceline.forecast.shape import target_layers

QWEN = read_shape("qwen3.8-27b")
MTP = 'family = "mtp"\nnum_speculative_tokens = {}\n'
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture
def smollm2(tmp_path: Path) -> TargetShape:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return read_shape(tmp_path)


@pytest.mark.parametrize(("k", "tokens"), [(3, 1600), (6, 1632), (7, 1648)])
def test_hybrid_block_with_fp8_cache(k: int, tokens: int) -> None:
    """Reported by users of Qwen3.8-27B."""
    layers = target_layers(QWEN, CachePlan(kv_dtype="fp8"), k)
    assert {layer.block_tokens for layer in layers if layer.kind == "full"} == {tokens}


def test_dummy_weights_of_the_27b_shape_take_50_1_gib() -> None:
    assert QWEN.weights_bytes / 2**30 == pytest.approx(50.1, abs=0.05)
    assert (QWEN.num_full_layers, QWEN.num_state_layers) == (16, 48)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_bundled_draft_of_smollm2_as_a_started_engine_held_it(
    smollm2: TargetShape, device: str
) -> None:
    """22,762,000 bytes on an H200: weights 10,179,072, buffers 16, keys and values 12 MiB."""
    design = parse_design('family = "eagle3"\nnum_speculative_tokens = 3\n', smollm2)
    memory = measure_memory(design, smollm2, context_tokens=16384, plan=CachePlan(device=device))
    sizes = memory.sizes
    assert (sizes.weights_bytes, sizes.buffers_bytes) == (10_179_072, 16)
    assert (memory.kv_bytes, memory.state_bytes) == (12 * 2**20, 0)
    assert memory.total_bytes == 22_762_000
    assert sizes.num_parameters == 5_089_536


def test_native_head_of_the_27b_shape() -> None:
    """425 M numbers; its layer joins the 16 full ones: groups of 17, and 3 x 16 GDN layers."""
    design = parse_design(MTP.format(3), QWEN)
    memory = measure_memory(design, QWEN, context_tokens=16384, plan=CachePlan())
    hidden, query, key, inner = 5120, 24 * 256, 4 * 256, 17408
    matrices = 2 * hidden**2 + hidden * (2 * query + 2 * key + query) + 3 * hidden * inner
    assert memory.sizes.num_parameters == matrices + 5 * hidden + 2 * 256
    assert [group.num_layers for group in memory.with_draft.groups] == [16, 16, 16, 17]
    page = memory.block_tokens * 4 * 256 * 2 * 2
    state = 10240 * 6 * 2 + 48 * 128 * 128 * 4
    assert memory.block_tokens == 16 * -(-state // (16 * 4096))
    assert memory.with_draft.block_bytes == 17 * page
    blocks = -(-16384 // memory.block_tokens) + 3 * 4  # one state and three more in each group
    assert memory.with_draft.total_bytes == 17 * page * blocks


def test_k_alone_costs_recurrent_states() -> None:
    """A draft without a cache of its own still makes the engine keep K states more a layer."""
    design = parse_design('family = "ngram"\nnum_speculative_tokens = 5\n', QWEN)
    memory = measure_memory(design, QWEN, context_tokens=16384, plan=CachePlan())
    assert memory.sizes.weights_bytes == memory.sizes.files_bytes - 4096 == 0
    assert memory.state_bytes > 5 * 48 * 48 * 128 * 128 * 4


def test_other_geometry_splits_the_hybrid_layer_by_layer() -> None:
    text = 'family = "eagle3"\nnum_speculative_tokens = 3\nnum_kv_heads = 8\nhead_dim = 128\n'
    groups = group_layers(all_layers(parse_design(text, QWEN), QWEN, CachePlan(), 3))
    assert len(groups) == 65
    assert {group.num_layers for group in groups} == {1}


def test_a_window_keeps_less() -> None:
    layer = LayerCache(kind="sliding", block_tokens=16, page_bytes=100, geometry=(1,), window=1024)
    use = measure_cache([layer], context_tokens=16384, in_flight_tokens=2048)
    assert use.total_bytes == 100 * (-(-(1023 + 2048) // 16) + 1)


def test_quantised_bytes_by_hand(smollm2: TargetShape) -> None:
    text = 'family = "eagle3"\nnum_speculative_tokens = 3\nweights = "{}"\n{}'

    def weights(name: str, group: str = "") -> int:
        design = parse_design(text.format(name, group), smollm2)
        memory = measure_memory(design, smollm2, context_tokens=16384, plan=CachePlan())
        return memory.sizes.weights_bytes

    matrices, norms = 5_087_232, 2 * 4 * 576
    rows = 576 + 576 + 192 + 192 + 576 + 1536 + 1536 + 576  # fc, q, k, v, o, gate, up, down
    assert weights("bf16") == 2 * matrices + norms
    assert weights("fp8") == matrices + 4 * rows + norms
    assert weights("w8a16") == matrices + 2 * rows + 8 * 16 + norms
    scales = matrices // 64
    assert weights("w4a16", "group_size = 64\n") == matrices // 2 + 2 * scales + 8 * 16 + norms


def test_dflash_holds_more_than_its_file(smollm2: TargetShape) -> None:
    """vLLM keeps the key and value matrices of 16-bit weights twice, a row for the mask, and the
    norms of the keys side by side; a started engine of one layer: 9,074,560 bytes of weights."""
    text = 'family = "dflash"\nnum_speculative_tokens = 3\nnum_layers = {}\nweights = "{}"\n'
    for layers, weights, copies in (
        (1, "bf16", 2 * 192 * 576 + 64),
        (2, "bf16", 2 * (2 * 192 * 576 + 64)),
        (2, "fp8", 2 * 64),
    ):
        design = parse_design(text.format(layers, weights), smollm2)
        sizes = measure_memory(design, smollm2, context_tokens=16384, plan=CachePlan()).sizes
        assert sizes.buffers_bytes == 16 * layers + 2 * (576 + copies)
        if (layers, weights) == (1, "bf16"):
            assert sizes.weights_bytes == 9_074_560 - 2 * 576


def test_parallel_eagle3_brings_a_state_for_its_masks(smollm2: TargetShape) -> None:
    text = 'family = "eagle3"\nnum_speculative_tokens = 3\nparallel = {}\nweights = "{}"\n'

    def weights(parallel: str, name: str) -> int:
        design = parse_design(text.format(parallel, name), smollm2)
        memory = measure_memory(design, smollm2, context_tokens=16384, plan=CachePlan())
        return memory.sizes.weights_bytes

    for name in ("bf16", "fp8"):
        assert weights("true", name) - weights("false", name) == 3 * 576 * 2


def test_load_peak_holds_the_matrices_that_are_shared_later() -> None:
    design = parse_design(MTP.format(3), QWEN)
    sizes = measure_memory(design, QWEN, context_tokens=16384, plan=CachePlan()).sizes
    assert sizes.load_peak_bytes - sizes.weights_bytes == 2 * 248320 * 5120 * 2
