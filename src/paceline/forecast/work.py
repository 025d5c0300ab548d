"""What one step of a served design does: bytes moved, passes run, tokens verified.

The roofline (score.py) turns bytes into time at one bandwidth; the fitted model (step_model.py)
gives every kind of work its own measured cost.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from paceline.forecast.design import Design
from paceline.forecast.shape import CachePlan, TargetShape, target_layers
from paceline.forecast.sizes import DraftSizes, draft_layers
from paceline.methods import METHODS

__all__ = ["StepWork", "measure_work"]


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One step. target_bytes: weights that the verification reads; cache_bytes: the target's keys,
    values and states. pass_bytes: the draft's weights and keys and values, all passes, and what is
    read once a step; head_bytes: its output matrices, all reads. num_drafted: K, tokens verified
    beyond one. num_layers, num_state_layers: of the target; num_draft_layers: layers that the draft
    runs, all passes; num_passes: forward passes of the draft. On a GPU: waits, whether vLLM's
    runner waits for the device in every step; num_eager_layers, num_eager_passes: of the draft,
    launched kernel by kernel, since vLLM 0.31.0 records no CUDA graph of a whole draft model.
    """

    target_bytes: int
    cache_bytes: int
    pass_bytes: int
    head_bytes: int
    num_drafted: int
    num_layers: int
    num_state_layers: int
    num_draft_layers: int
    num_passes: int
    waits: bool
    num_eager_layers: int
    num_eager_passes: int


def measure_work(
    design: Design | None,
    sizes: DraftSizes | None,
    shape: TargetShape,
    *,
    tokens: int,
    plan: CachePlan,
) -> StepWork:
    """Work of a design's step (None: of the target alone) with `tokens` of context behind it."""
    k = design.num_speculative_tokens if design else 0
    per_token, state_bytes, block_tokens = _target_traffic(_Key(shape), plan, k)
    pass_bytes = head_bytes = passes = layers = 0
    if design is not None and sizes is not None:
        own = draft_layers(design, shape, block_tokens)
        cache = sum(c.page_bytes / c.block_tokens * min(tokens, c.window or tokens) for c in own)
        one_pass = sizes.pass_bytes + round(cache)
        passes = 0 if design.family in ("ngram", "suffix") else 1 if design.is_one_pass else k
        pass_bytes = passes * one_pass + sizes.fuse_bytes
        layers = passes * design.num_layers
        if design.family == "medusa":  # all heads in one pass; a common matrix is read K times
            head_bytes = sizes.head_bytes * (k if design.one_head else 1)
            layers = k * design.num_layers
        else:
            head_bytes = passes * sizes.head_bytes
    on_gpu = plan.device == "cuda"
    is_eager = on_gpu and design is not None and design.family == "draft_model"
    return StepWork(
        target_bytes=shape.streamed_bytes,
        cache_bytes=round(per_token * tokens) + state_bytes,
        pass_bytes=pass_bytes,
        head_bytes=head_bytes,
        num_drafted=k,
        num_layers=len(shape.facts.layer_types),
        num_state_layers=shape.num_state_layers,
        num_draft_layers=layers,
        num_passes=passes,
        waits=on_gpu and design is not None and _waits(design),
        num_eager_layers=layers if is_eager else 0,
        num_eager_passes=passes if is_eager else 0,
    )


def _waits(design: Design) -> bool:
    """Runs on vLLM's V1 runner: by its family, or EAGLE-3 that fills all places in one pass."""
    in_parallel = design.family == "eagle3" and design.is_one_pass
    return in_parallel or METHODS[design.family].gpu_runner == "v1"


class _Key:
    """A shape as a key of a cache: by identity, since its facts hold a dict."""

    def __init__(self, shape: TargetShape) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        return id(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.shape is self.shape


@functools.lru_cache(maxsize=256)
def _target_traffic(key: _Key, plan: CachePlan, k: int) -> tuple[float, int, int]:
    """(bytes of keys and values a token of context, bytes of states a step, tokens of a block)."""
    shape = key.shape
    layers = target_layers(shape, plan, k)
    per_token = sum(c.page_bytes / c.block_tokens for c in layers if c.kind == "full")
    moved = 0
    if shape.state is not None:  # read one state, write one for each verified token
        one = shape.state.state_bytes(k, shape.dtype_bytes)
        moved = shape.num_state_layers * one * (2 + k)
    return per_token, moved, max(layer.block_tokens for layer in layers)
