"""What one sequence takes of the KV pool: the grouping rules of vLLM 0.31.0, without vLLM.

Source of the facts: vllm/v1/core/kv_cache_utils.py (get_kv_cache_groups and what it calls),
vllm/v1/kv_cache_interface.py, vllm/platforms/interface.py (_align_hybrid_block_size). Layers whose
pages differ share one pool, so a draft's cost is a difference of two totals, never a sum of its own
layers. tests/flow/test_forecast_cache.py holds both against vLLM's own functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CacheUse", "Group", "LayerCache", "align_block_tokens", "group_layers", "measure_cache"]


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """The cache of one layer.

    kind: "full", "sliding" or "state" (a recurrent layer). block_tokens: tokens a page holds.
    page_bytes: of one page, padding included. num_pages: pages of one sequence (state layers: one
    state, and one more for each drafted token). geometry: what layers of one group must share.
    window: of a sliding layer, in tokens.
    """

    kind: str
    block_tokens: int
    page_bytes: int
    geometry: tuple[int, ...]
    num_states: int = 0
    window: int | None = None

    def count_pages(self, context_tokens: int, in_flight_tokens: int) -> int:
        """Pages that vLLM sets aside for one sequence."""
        if self.kind == "state":
            return self.num_states
        tokens = context_tokens
        if self.kind == "sliding":
            assert self.window is not None
            tokens = min(self.window - 1 + in_flight_tokens, context_tokens)
            return -(-tokens // self.block_tokens) + 1
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers under one block table. `layer` stands for all of them; page_bytes: of all together."""

    layer: LayerCache
    num_layers: int
    page_bytes: int


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """Bytes of one sequence. block_bytes: one block of the shared pool; it fits the widest group.

    kv_bytes: blocks of attention groups; state_bytes: blocks of recurrent groups.
    """

    block_bytes: int
    kv_bytes: int
    state_bytes: int
    groups: tuple[Group, ...]

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.state_bytes


def align_block_tokens(state_bytes: int, bytes_per_token: int, *, alignment_tokens: int) -> int:
    """Tokens in a block of a hybrid target: its attention page must hold one recurrent state.

    alignment_tokens: the larger of the kernel's granularity and the configured block size (16 on
    CUDA with FlashAttention, 128 on the CPU build).
    """
    chunk = alignment_tokens * bytes_per_token
    return max(alignment_tokens, alignment_tokens * -(-state_bytes // chunk))


def group_layers(layers: Sequence[LayerCache]) -> tuple[Group, ...]:
    """Groups in the order vLLM makes them. `layers` in the order of the model, draft last."""
    if not layers:
        return ()
    if _is_uniform(layers):
        total = sum(layer.page_bytes for layer in layers)
        return (Group(layer=layers[0], num_layers=len(layers), page_bytes=total),)
    buckets: dict[LayerCache, int] = {}
    for layer in _unify_pages(layers):
        buckets[layer] = buckets.get(layer, 0) + 1
    fewest, most = min(buckets.values()), max(buckets.values())
    # a little uneven: pad up to the largest bucket rather than split all by the smallest
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for layer, count in buckets.items():
        num_groups = -(-count // size)
        for index in range(num_groups):
            width = len(range(index, count, num_groups))
            groups.append(Group(layer=layer, num_layers=width, page_bytes=width * layer.page_bytes))
    return tuple(groups)


def measure_cache(
    layers: Sequence[LayerCache], *, context_tokens: int, in_flight_tokens: int
) -> CacheUse:
    """Bytes of the pool that one sequence of context_tokens needs.

    in_flight_tokens: the most that is scheduled but not settled (max_num_batched_tokens, twice
    with asynchronous scheduling); only sliding layers keep blocks for it.
    """
    groups = group_layers(layers)
    block = max((group.page_bytes for group in groups), default=0)
    pages = {"attention": 0, "state": 0}
    for group in groups:
        kind = "state" if group.layer.kind == "state" else "attention"
        pages[kind] += group.layer.count_pages(context_tokens, in_flight_tokens)
    return CacheUse(
        block_bytes=block,
        kv_bytes=block * pages["attention"],
        state_bytes=block * pages["state"],
        groups=groups,
    )


def _is_uniform(layers: Sequence[LayerCache]) -> bool:
    """One block table serves all: the same kind, block and, for windows and states, the same size.

    Attention layers of other geometry still share a table: they need the same number of pages.
    """
    first = layers[0]
    if any(
        layer.kind != first.kind or layer.block_tokens != first.block_tokens for layer in layers
    ):
        return False
    if first.kind == "sliding":
        return all(layer.window == first.window for layer in layers)
    if first.kind == "state":
        return all(
            (layer.num_states, layer.page_bytes) == (first.num_states, first.page_bytes)
            for layer in layers
        )
    return True


def _unify_pages(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Smaller pages grow to the largest: by more tokens where that divides, else by padding."""
    largest = max(layer.page_bytes for layer in layers)
    unified = []
    for layer in layers:
        if layer.page_bytes == largest:
            unified.append(layer)
        elif layer.kind != "state" and largest % layer.page_bytes == 0:
            tokens = layer.block_tokens * (largest // layer.page_bytes)
            unified.append(dataclasses.replace(layer, block_tokens=tokens, page_bytes=largest))
        else:
            unified.append(dataclasses.replace(layer, page_bytes=largest))
    return unified
