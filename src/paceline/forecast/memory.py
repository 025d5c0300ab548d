"""M of a design: resident weights and buffers, and what the shared KV pool grows by."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.forecast.cache import CacheUse, LayerCache, measure_cache
from paceline.forecast.design import Design
from paceline.forecast.shape import CachePlan, TargetShape, target_layers
from paceline.forecast.sizes import DraftSizes, draft_layers, measure_design

__all__ = ["DraftMemory", "all_layers", "measure_cache_of", "measure_memory"]


@dataclass(frozen=True, kw_only=True)
class DraftMemory:
    """Draft memory M for one sequence of context_tokens, in bytes.

    kv_bytes and state_bytes are differences of the pool with the draft and without any: on a hybrid
    target they hold what K adds to the recurrent states and what uneven groups waste; one of the
    two may be negative where a larger block moves bytes to the other. block_tokens: of the target's
    attention, with the draft.
    """

    context_tokens: int
    sizes: DraftSizes
    kv_bytes: int
    state_bytes: int
    block_tokens: int
    with_draft: CacheUse
    without: CacheUse

    @property
    def total_bytes(self) -> int:
        return (
            self.sizes.weights_bytes + self.sizes.buffers_bytes + self.kv_bytes + self.state_bytes
        )


def measure_memory(
    design: Design, shape: TargetShape, *, context_tokens: int, plan: CachePlan
) -> DraftMemory:
    """Raises PlanError where a size of the design does not fit (see measure_design)."""
    with_draft, without = (
        measure_cache_of(one, shape, context_tokens=context_tokens, plan=plan)
        for one in (design, None)
    )
    return DraftMemory(
        context_tokens=context_tokens,
        sizes=measure_design(design, shape, context_tokens=context_tokens),
        kv_bytes=with_draft.kv_bytes - without.kv_bytes,
        state_bytes=with_draft.state_bytes - without.state_bytes,
        block_tokens=_block_tokens(target_layers(shape, plan, design.num_speculative_tokens)),
        with_draft=with_draft,
        without=without,
    )


def measure_cache_of(
    design: Design | None, shape: TargetShape, *, context_tokens: int, plan: CachePlan
) -> CacheUse:
    """What one sequence takes of the pool, target included; None: without a draft."""
    k = design.num_speculative_tokens if design is not None else 0
    return measure_cache(
        all_layers(design, shape, plan, k),
        context_tokens=context_tokens,
        in_flight_tokens=plan.in_flight_tokens,
    )


def all_layers(
    design: Design | None, shape: TargetShape, plan: CachePlan, num_speculative_tokens: int
) -> list[LayerCache]:
    """Layer caches of target and draft, in the order in which the engine registers them."""
    target = target_layers(shape, plan, num_speculative_tokens)
    if design is None:
        return target
    return target + draft_layers(design, shape, _block_tokens(target))


def _block_tokens(layers: list[LayerCache]) -> int:
    return max(layer.block_tokens for layer in layers)
