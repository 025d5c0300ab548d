"""The forecast's cache arithmetic against vLLM's own functions, on specs built by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.forecast import CachePlan, measure_memory, parse_design, read_shape
from paceline.forecast.cache import LayerCache, group_layers, measure_cache
from paceline.forecast.memory import all_layers

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

CONTEXT = 16384
DESIGNS = {
    "none": None,
    "mtp": "",
    "eagle3 of the target's geometry": "",
    "eagle3 of its own geometry": "num_heads = 16\nnum_kv_heads = 8\nhead_dim = 128\n",
    "eagle3 with narrow keys": "num_heads = 16\nnum_kv_heads = 2\nhead_dim = 128\n",
    "dflash with pages that do not divide": "num_heads = 12\nnum_kv_heads = 3\nhead_dim = 128\n",
    "dflash with wide keys": "num_heads = 24\nnum_kv_heads = 12\nhead_dim = 256\n",
    "eagle3 in fp8": 'kv_dtype = "fp8"\n',
    "dflash five layers": "num_layers = 5\nnum_heads = 32\nnum_kv_heads = 8\nhead_dim = 128\n",
    "dflash sliding": "num_layers = 2\nwindow = 2048\n",
    "draft_model": "num_layers = 12\nhidden_size = 1024\nnum_heads = 16\nnum_kv_heads = 2\n",
}


def _config(context: int = CONTEXT, in_flight: int = 16384) -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            mamba_cache_mode="none", get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC
        ),
        model_config=SimpleNamespace(max_model_len=context),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
        max_in_flight_tokens=in_flight,
    )


def _spec(layer: LayerCache, shape: Any, num_speculative_tokens: int) -> Any:
    """The same layer as vLLM's own record; a state's size comes from vLLM's shape function."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    if layer.kind == "state":
        state = shape.state
        return MambaSpec(
            block_size=CONTEXT,
            shapes=MambaStateShapeCalculator.gated_delta_net_state_shape(
                1,
                state.num_key_heads,
                state.num_value_heads,
                state.key_head_dim,
                state.value_head_dim,
                state.conv_kernel,
                num_speculative_tokens,
            ),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=layer.page_bytes,
            num_speculative_blocks=num_speculative_tokens,
        )
    heads, head_dim, element = layer.geometry
    sizes = {
        "block_size": layer.block_tokens,
        "num_kv_heads": heads,
        "head_size": head_dim,
        "dtype": {1: torch.uint8, 2: torch.bfloat16}[element],
    }
    if layer.kind == "sliding":
        return SlidingWindowSpec(**sizes, sliding_window=layer.window, dcp_sharded=False)
    return FullAttentionSpec(**sizes)


def _vllm_bytes(
    layers: Sequence[LayerCache], shape: Any, k: int, **setup: int
) -> tuple[int, list[int]]:
    from vllm.v1.core import kv_cache_utils

    specs = {f"layers.{i}.attn": _spec(layer, shape, k) for i, layer in enumerate(layers)}
    config = _config(**setup)
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    total = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
    return int(total), [len(group.layer_names) for group in groups]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("target", ["qwen3.8-27b", "qwen3.5-4b"])
@pytest.mark.parametrize("name", DESIGNS)
def test_cache_equals_vllm(target: str, name: str, kv_dtype: str, device: str) -> None:
    shape = read_shape(target)
    plan = CachePlan(device=device, kv_dtype=kv_dtype)
    for k in range(1, 8):
        sizes = DESIGNS[name]
        design = None
        if sizes is not None:
            text = f'family = "{name.split()[0]}"\nnum_speculative_tokens = {k}\n{sizes}'
            design = parse_design(text, shape)
        layers = all_layers(design, shape, plan, k)
        use = measure_cache(layers, context_tokens=CONTEXT, in_flight_tokens=16384)
        total, counts = _vllm_bytes(layers, shape, k)
        assert [group.num_layers for group in use.groups] == counts
        assert use.total_bytes == total
        # a page is never smaller than what vLLM's own record of the state takes
        assert all(
            _spec(layer, shape, k).real_page_size_bytes <= layer.page_bytes
            for layer in layers
            if layer.kind == "state"
        )


def test_any_mix_of_layers_equals_vllm() -> None:
    """Five hundred random models: dense, hybrid, windows, pages that divide and that do not."""
    shape, dice = read_shape("qwen3.5-4b"), random.Random(1)
    for _ in range(500):
        k, block = dice.randint(1, 12), 16 * dice.choice((1, 8, 33, 100))
        context, in_flight = dice.randint(1, 40_000), dice.choice((512, 2048, 16384))
        layers: list[LayerCache] = []
        for _ in range(dice.randint(1, 4)):
            heads, head_dim = dice.choice((1, 2, 3, 4, 8)), dice.choice((64, 128, 256))
            page = block * 2 * heads * head_dim * 2
            layer = LayerCache(
                kind="full", block_tokens=block, page_bytes=page, geometry=(heads, head_dim, 2)
            )
            kind = dice.choice(("full", "sliding", "state"))
            if kind == "sliding":
                layer = LayerCache(
                    kind="sliding",
                    block_tokens=block,
                    page_bytes=page,
                    geometry=(heads, head_dim, 2),
                    window=dice.choice((128, 2048)),
                )
            elif kind == "state" and not any(one.kind == "state" for one in layers):
                size = shape.state.state_bytes(k, 2) if shape.state else 0
                layer = LayerCache(
                    kind="state", block_tokens=0, page_bytes=size, geometry=(), num_states=1 + k
                )
            layers += [layer] * dice.randint(1, 20)
        dice.shuffle(layers)
        use = measure_cache(layers, context_tokens=context, in_flight_tokens=in_flight)
        total, counts = _vllm_bytes(layers, shape, k, context=context, in_flight=in_flight)
        assert [group.num_layers for group in group_layers(layers)] == counts, layers
        assert use.total_bytes == total, layers


@pytest.mark.parametrize(("device", "configured"), [("cuda", 16), ("cpu", 128)])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("target", ["qwen3.8-27b", "qwen3.5-4b"])
def test_block_size_equals_the_platforms(
    target: str, kv_dtype: str, device: str, configured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own alignment, told the shape; kernels take multiples of 16 (CUDA) and 32 (CPU)."""
    import torch
    import vllm.config.vllm
    import vllm.model_executor.models
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf

    shape = read_shape(target)
    facts = shape.facts
    backend = SimpleNamespace(
        customize_spec=lambda spec: spec,
        get_supported_kernel_block_sizes=lambda: [MultipleOf(16 if device == "cuda" else 32)],
    )
    monkeypatch.setattr(vllm.config.vllm, "set_current_vllm_config", lambda _: nullcontext())
    for k in range(13):
        layers = all_layers(None, shape, CachePlan(device=device, kv_dtype=kv_dtype), k)
        state = next(layer for layer in layers if layer.kind == "state")
        spec = _spec(state, shape, k)
        model = SimpleNamespace(
            get_mamba_state_shape_from_config=lambda _, spec=spec: spec.shapes,
            get_mamba_state_dtype_from_config=lambda _, spec=spec: spec.dtypes,
        )
        monkeypatch.setattr(
            vllm.model_executor.models.ModelRegistry,
            "resolve_model_cls",
            lambda *_, model=model, **__: (model, ""),
        )
        cache = SimpleNamespace(
            block_size=configured,
            cache_dtype="auto" if kv_dtype == "bfloat16" else "fp8",
            mamba_block_size=None,
            mamba_cache_mode="none",
            mamba_page_size_padded=None,
            user_specified_mamba_block_size=False,
        )
        config = SimpleNamespace(
            cache_config=cache,
            parallel_config=None,
            model_config=SimpleNamespace(
                dtype=torch.bfloat16,
                use_mla=False,
                architecture=facts.architecture,
                get_num_kv_heads=lambda _: facts.num_key_value_heads,
                get_head_size=lambda: facts.head_dim,
            ),
        )
        Platform._align_hybrid_block_size(config, backend)  # type: ignore[arg-type]
        assert max(layer.block_tokens for layer in layers) == cache.block_size
        assert state.page_bytes == (cache.mamba_page_size_padded or spec.real_page_size_bytes)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_one_eagle3_layer_of_smollm2_takes_12_mib(device: str, tmp_path: Path) -> None:
    config = {
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
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, plan = read_shape(tmp_path), CachePlan(device=device)
    design = parse_design('family = "eagle3"\nnum_speculative_tokens = 3\n', shape)
    with_draft, _ = _vllm_bytes(all_layers(design, shape, plan, 3), shape, 3)
    without, _ = _vllm_bytes(all_layers(None, shape, plan, 0), shape, 0)
    memory = measure_memory(design, shape, context_tokens=CONTEXT, plan=plan)
    assert with_draft - without == memory.kv_bytes == 12 * 2**20
