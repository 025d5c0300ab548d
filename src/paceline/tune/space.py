"""What can be tuned for this target on this device, and why the rest is left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.tune.settings import Settings

__all__ = ["Knob", "Situation", "build_knobs", "neighbours_of_k"]

# vLLM 0.31.0, model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py
_FUSED_HEAD_DIM, _FUSED_TOKENS = 128, 8
_KS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 32)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides which settings have an effect.

    concurrency: requests in flight while measuring. gdn_head_dim: of a hybrid's recurrent layers.
    windows: draft -> windows to try, or why it takes none.
    """

    device: str
    is_hybrid: bool
    concurrency: int
    max_k: int = 32
    gdn_head_dim: int | None = None
    windows: Mapping[str, tuple[int, ...] | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting: its values beside the present one, or the reason why it is not searched.

    risk: what a reader must know before taking it.
    """

    name: str
    values: tuple[Any, ...] = ()
    reason: str | None = None
    risk: str | None = None


def neighbours_of_k(k: int, measured: Sequence[int], *, max_k: int) -> list[int]:
    """The next values of K to try around the best one so far; empty when both sides are known."""
    known = sorted({*(value for value in _KS if value <= max_k), k})
    place = known.index(k)
    around = known[max(0, place - 1) : place] + known[place + 1 : place + 2]
    return [value for value in around if value not in measured]


def build_knobs(best: Settings, k: int | None, situation: Situation) -> list[Knob]:
    """The settings after method and K, for the best so far; k: its drafted tokens a step."""
    on_cpu = situation.device == "cpu"
    knobs = [_drafter_window(best, situation), Knob(name="compiled", values=(True,))]
    knobs.append(_prefix_caching(situation))
    if on_cpu:
        no_graphs = "the CPU engine has no CUDA graphs"
        knobs.append(Knob(name="cudagraph_sizes", reason=no_graphs))
        knobs.append(Knob(name="async_scheduling", reason="vLLM schedules in step on a CPU"))
    else:
        width = 1 if k is None else k + 1
        sizes = tuple(width * count for count in range(1, max(2, situation.concurrency) + 1))
        knobs.append(Knob(name="cudagraph_sizes", values=(sizes,)))
        if best.draft in ("ngram", "suffix"):
            reason = "vLLM 0.31.0 schedules in step for proposers without weights"
            knobs.append(Knob(name="async_scheduling", reason=reason))
        else:
            knobs.append(Knob(name="async_scheduling", values=(False, True)))
    knobs += [_gdn_prefill(situation), _gdn_decode(k, situation)]
    knobs.append(_dynamic_k(best, k, situation))
    return knobs


def vary(best: Settings, knob: Knob) -> list[Settings]:
    """The best settings with each value of one knob that they have not already."""
    made = [replace(best, **{knob.name: value}) for value in knob.values]
    return [settings for settings in made if settings != best]


def _drafter_window(best: Settings, situation: Situation) -> Knob:
    name, found = "drafter_window", situation.windows.get(best.draft, "there is no draft")
    return (
        Knob(name=name, reason=found) if isinstance(found, str) else Knob(name=name, values=found)
    )


def _prefix_caching(situation: Situation) -> Knob:
    if situation.is_hybrid:
        return Knob(
            name="prefix_caching",
            reason="not on a hybrid target: vLLM 0.31.0 restores a stale state there (vLLM #53912)",
        )
    return Knob(
        name="prefix_caching",
        values=(True,),
        risk="measured on unique prompts, where it can only cost; it pays where prompts share a"
        " beginning",
    )


def _gdn_prefill(situation: Situation) -> Knob:
    name = "gdn_prefill_backend"
    if not situation.is_hybrid:
        return Knob(name=name, reason="the target has no recurrent layers")
    if situation.device == "cpu":
        return Knob(name=name, reason="the CPU engine has one kernel for recurrent layers")
    return Knob(name=name, values=("flashinfer",))


def _gdn_decode(k: int | None, situation: Situation) -> Knob:
    """vLLM's fused kernel of a speculative step runs by itself where it can; is it worth it?"""
    name = "gdn_decode_kernel"
    if not situation.is_hybrid:
        return Knob(name=name, reason="the target has no recurrent layers")
    if situation.device == "cpu":
        return Knob(name=name, reason="the CPU engine has one kernel for recurrent layers")
    if situation.gdn_head_dim != _FUSED_HEAD_DIM:
        reason = f"vLLM 0.31.0's fused kernel takes recurrent heads of {_FUSED_HEAD_DIM} alone"
        return Knob(name=name, reason=reason)
    if k is None or k + 1 > _FUSED_TOKENS:
        reason = (
            f"vLLM 0.31.0's fused kernel is for drafted steps of {_FUSED_TOKENS} tokens at most"
        )
        return Knob(name=name, reason=reason)
    return Knob(name=name, values=("triton",))


def _dynamic_k(best: Settings, k: int | None, situation: Situation) -> Knob:
    name = "dynamic_k"
    if k is None or k < 2:
        return Knob(name=name, reason="there is no K to lower")
    if situation.concurrency < 2:
        return Knob(name=name, reason="one request at a time is always a batch of one")
    if situation.is_hybrid or best.draft in ("ngram", "suffix"):
        return Knob(name=name, reason="proposers that draft exactly K keep one shape (vLLM #39273)")
    half = max(1, situation.concurrency // 2)
    rows = ((1, half, k), (half + 1, situation.concurrency, max(1, k // 2)))
    return Knob(name=name, values=(rows,))
