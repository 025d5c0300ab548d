"""Inside vLLM's worker: what one sequence takes of the shared pool, with the draft and without.

The pool without the draft is not the same layers less the draft's. On a hybrid target K widens the
convolution's state, adds K states a Gated-DeltaNet group and moves the size of an attention block
(`Platform._align_hybrid_block_size`), and the draft's layers change the groups. So the
configuration is made again without speculation, aligned by vLLM's own platform code, and both are
grouped by vLLM's own functions (v1/core/kv_cache_utils.py). tests/flow/test_pocket.py holds the
answer against an engine started without the draft, bench/engine_memory.py against the forecast.

An engine whose max_model_len is below its attention block cuts the block to that length and pads it
to a whole page all the same: asked for 16,384 tokens, such blocks would count many times what an
engine of that length takes. So the draft's side is aligned anew as well.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["measure_pool"]

_CPU_BLOCK_TOKENS = 128  # what the CPU backend sets before a hybrid target's alignment


def measure_pool(
    runner: Any, draft: Any | None, context_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(with the draft, without): bytes and blocks of one sequence of context_tokens.

    Each: kv_bytes (attention groups), state_bytes (recurrent groups), block_bytes, block_tokens,
    groups: [number of layers, kind, pages of the sequence]. draft: its module; None without one,
    then both are the same.
    """
    config = _align(runner.vllm_config)
    specs = {name: _align_spec(spec, config) for name, spec in runner.get_kv_cache_spec().items()}
    with_draft = _use(config, specs, context_tokens)
    if config.speculative_config is None:
        return with_draft, with_draft
    modules = set(draft.modules()) if draft is not None else set()
    context = config.compilation_config.static_forward_context
    plain = _without_speculation(config)
    kept = {
        name: _plain_spec(spec, plain)
        for name, spec in specs.items()
        if context.get(name) not in modules
    }
    return with_draft, _use(plain, kept, context_tokens)


def _without_speculation(config: Any) -> Any:
    plain = copy.copy(config)
    plain.speculative_config = None
    return _align(plain)


def _align(config: Any) -> Any:
    """The same engine, a hybrid target's block size aligned anew where it was not given."""
    from vllm.config.cache import CacheConfig
    from vllm.platforms import current_platform

    if not config.model_config.is_hybrid or config.cache_config.user_specified_block_size:
        return config
    aligned = copy.copy(config)
    cache = aligned.cache_config = copy.copy(config.cache_config)
    is_cpu = current_platform.is_cpu()
    cache.block_size = _CPU_BLOCK_TOKENS if is_cpu else CacheConfig.DEFAULT_BLOCK_SIZE
    cache.mamba_page_size_padded = None
    current_platform.update_block_size_for_backend(aligned)
    return aligned


def _align_spec(spec: Any, config: Any) -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    if not config.model_config.is_hybrid:
        return spec
    if isinstance(spec, MambaSpec):
        padded = config.cache_config.mamba_page_size_padded
        return dataclasses.replace(spec, page_size_padded=padded)
    return dataclasses.replace(spec, block_size=config.cache_config.block_size)


def _plain_spec(spec: Any, plain: Any) -> Any:
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = _align_spec(spec, plain)
    if not isinstance(spec, MambaSpec):
        return spec
    model = plain.model_config
    kind, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    return dataclasses.replace(
        spec,
        shapes=tuple(kind.get_mamba_state_shape_from_config(plain)),
        num_speculative_blocks=0,
    )


def _use(config: Any, specs: Mapping[str, Any], context_tokens: int) -> dict[str, Any]:
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

    config = copy.copy(config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = context_tokens
    groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
    total = int(kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups))
    rows: list[tuple[int, str, int]] = []
    tokens = 0
    for group in groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            pages = spec.max_memory_usage_pages(config)
        else:
            pages = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        kind = "state" if isinstance(spec, MambaSpec) else "attention"
        tokens = max(tokens, spec.block_size if kind == "attention" else 0)
        rows.append((len(group.layer_names), kind, int(pages)))
    num_pages = sum(pages for _, _, pages in rows)
    block = total // num_pages if num_pages else 0
    assert block * num_pages == total, "vLLM's total is blocks times pages of all groups"
    state = block * sum(pages for _, kind, pages in rows if kind == "state")
    return {
        "kv_bytes": total - state,
        "state_bytes": state,
        "block_bytes": block,
        "block_tokens": tokens,
        "groups": rows,
    }
