"""The rungs of ladder.py: each changes one thing of the rung that it stands on.

SMOLLM2 runs on real weights; SHAPE on the Qwen3.5-4B shape with dummy weights, where acceptance is
decreed and text means nothing. Most important first: that is the order in which they are measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cli.arms import build_arm_plan
from paceline.errors import PlanError
from paceline.quantize.schemes import choose_scheme
from paceline.quantize.target_plan import TargetPlan, build_target_settings
from paceline.serve import (
    ShapeDraft,
    VllmEndpoint,
    apply_engine_settings,
    check_plan,
    open_shape,
    start,
    with_step_clock,
)
from paceline.serve.pool_size import size_pool
from paceline.target import TargetFacts, read_target

__all__ = ["SHAPE", "SMOLLM2", "Rung", "build_best", "prepare_shape", "prepare_target"]

Opener = Callable[[Path], AbstractContextManager[VllmEndpoint]]
_NO_COMPILING = "a CPU has no CUDA graphs, and a compiled start takes minutes: not measured there"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """over: the rung that it stands on; None for the baseline. change: what is new, in words.

    engine: of `apply_engine_settings`, and compiled; cudagraph_blocks: graphs for that many blocks
    of K + 1 tokens and no other size. acceptance_length: decreed, bonus token included.
    """

    name: str
    over: str | None
    change: str
    draft: str = "none"
    k: int | None = None
    quantised: bool = False
    cudagraph_blocks: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    acceptance_length: float | None = None


def _stack(*rungs: tuple[str, str | None, str, dict[str, Any]]) -> tuple[Rung, ...]:
    """Rungs of (name, over, change, fields that differ from the rung below)."""
    made: dict[str, Rung] = {}
    for name, over, change, fields in rungs:
        below = made[over] if over is not None else Rung(name=name, over=None, change=change)
        engine = {**below.engine, **fields.pop("engine", {})}
        new = {**fields, "engine": engine, "name": name, "over": over, "change": change}
        made[name] = dataclasses.replace(below, **new)
    return tuple(made.values())


_EAGLE3 = {"draft": "smollm2-eagle3", "k": 3}
SMOLLM2 = _stack(
    ("eager", None, "bf16, eager, no draft, no graphs", {"engine": {"compiled": False}}),
    ("compiled", "eager", "compiled, CUDA graphs", {"engine": {"compiled": True}}),
    ("eagle3", "compiled", "draft smollm2-eagle3, K = 3", _EAGLE3),
    ("suffix", "compiled", "suffix, constant K = 8", {"draft": "suffix", "k": 8}),
    ("eagle3-k5", "eagle3", "K = 5", {"k": 5}),
    ("eagle3-graphs", "eagle3", "graphs of K + 1 and 2 (K + 1) only", {"cudagraph_blocks": 2}),
    (
        "eagle3-stream",
        "eagle3",
        "tokens handed over 256 at a time",
        {"engine": {"stream_interval": 256}},
    ),
    ("eagle3-k7", "eagle3", "K = 7", {"k": 7}),
    ("w4a16-eagle3", "eagle3", "target in W4A16", {"quantised": True}),
    ("w4a16", "compiled", "target in W4A16", {"quantised": True}),
    (
        "eagle3-in-step",
        "eagle3",
        "without async scheduling",
        {"engine": {"async_scheduling": False}},
    ),
    (
        "eagle3-one-process",
        "eagle3",
        "scheduler and caller in one process",
        {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}},
    ),
    ("w4a16-suffix", "suffix", "target in W4A16", {"quantised": True}),
    ("suffix-k16", "suffix", "K = 16", {"k": 16}),
    ("ngram", "compiled", "n-gram, constant K = 8", {"draft": "ngram", "k": 8}),
    ("eagle3-k2", "eagle3", "K = 2", {"k": 2}),
    (
        "in-step",
        "compiled",
        "without async scheduling",
        {"engine": {"async_scheduling": False}},
    ),
    ("eager-again", "eager", "nothing: the machine's own drift", {}),
)
_MTP = {"draft": "mtp", "k": 3, "acceptance_length": 2.8}
SHAPE = _stack(
    ("eager", None, "bf16, eager, no draft, no graphs", {"engine": {"compiled": False}}),
    ("compiled", "eager", "compiled, CUDA graphs", {"engine": {"compiled": True}}),
    ("mtp", "compiled", "built-in MTP head, K = 3, acceptance 2.8 by decree", _MTP),
    ("w4a16-mtp", "mtp", "W4A16 g128, recurrent layers and head W8A16", {"quantised": True}),
    ("w4a16", "compiled", "W4A16 g128, recurrent layers and head W8A16", {"quantised": True}),
)


def build_best(rungs: Sequence[Rung], gains: Mapping[str, float], fastest: str) -> Rung | None:
    """The fastest rung with every other change that surely gained; None where none is left.

    gains: rung -> what it alone gave, only of those whose interval lies above 1. A change of draft
    is not taken, a change of K only for the fastest rung's own draft.
    """
    by_name = {rung.name: rung for rung in rungs}
    best, taken = by_name[fastest], []
    for name in sorted(gains, key=lambda one: -gains[one]):
        rung = by_name[name]
        if rung.over is None or name == fastest:
            continue
        below = by_name[rung.over]
        new: dict[str, Any] = {}
        for place in dataclasses.fields(Rung):
            key, value = place.name, getattr(rung, place.name)
            if key in ("name", "over", "change") or value == getattr(below, key):
                continue
            if key == "engine":
                value = {**best.engine, **{k: v for k, v in value.items() if k not in best.engine}}
            new[key] = value
        if "draft" in new or ("k" in new and (rung.draft, below.k) != (best.draft, best.k)):
            continue
        if rung.draft not in ("none", best.draft):
            continue  # a gain on another draft says nothing here
        changed = dataclasses.replace(best, **new)
        if changed != best:
            best = changed
            taken.append(rung.change)
    if not taken:
        return None
    return dataclasses.replace(best, name="best", over=fastest, change="; ".join(taken))


def prepare_target(
    rung: Rung, target: TargetFacts, quantised: Path | None, *, length: int, device: str
) -> Opener:
    """What starts the rung's engine; nothing has started yet. Raises PlanError where it cannot."""
    compiled = rung.engine.get("compiled", False)
    if device == "cpu" and compiled and rung.name == "compiled":
        raise PlanError(_NO_COMPILING)
    if rung.quantised:
        if quantised is None:
            raise PlanError("no quantised target was made or handed in", where="--quantised")
        target = read_target(quantised)
    plan = build_arm_plan(
        target,
        rung.draft,
        num_speculative_tokens=rung.k,
        max_model_len=min(target.max_position_embeddings, length + (rung.k or 0) + 1),
        max_num_seqs=1,
        enforce_eager=device == "cpu" or not compiled,
        device=device,
    )
    settings = dict(rung.engine)
    if rung.cudagraph_blocks is not None:
        width = plan.num_speculative_tokens + 1
        settings["cudagraph_sizes"] = [width * n for n in range(1, rung.cudagraph_blocks + 1)]
    plan = apply_engine_settings(plan, settings)
    without = [name for name, value in rung.env.items() if plan.env.get(name) == value]
    if without:
        raise PlanError("has no effect here: the plan has it already", where=", ".join(without))
    plan = dataclasses.replace(with_step_clock(plan), env={**plan.env, **rung.env})
    check_plan(plan)
    return lambda log: start(plan, log_path=log)


def prepare_shape(rung: Rung, target: TargetFacts, *, length: int, device: str) -> Opener:
    """The same for a target by shape: dummy weights, and acceptance by decree where it drafts."""
    if device == "cpu" and rung.engine.get("compiled") and rung.name == "compiled":
        raise PlanError(_NO_COMPILING)
    if device == "cpu" and rung.quantised:
        raise PlanError("vLLM 0.31.0's CPU build has no kernel for w8a16")
    draft = None
    if rung.draft != "none":
        assert rung.k is not None
        draft = ShapeDraft(family=rung.draft, num_speculative_tokens=rung.k)
    facts = quantise_shape(target) if rung.quantised else target
    max_model_len = length + (rung.k or 0) + 1
    pool = size_pool(
        facts,
        None,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=2,  # room for the MTP head's own layer
        num_speculative_tokens=rung.k or 0,
    )
    return lambda log: open_shape(
        facts,
        draft,
        log_path=log,
        device=device,
        acceptance_length=rung.acceptance_length if device == "cuda" else None,
        max_model_len=max_model_len,
        kv_cache_bytes=pool,
        enforce_eager=device == "cpu" or not rung.engine.get("compiled", False),
    )


def quantise_shape(target: TargetFacts) -> TargetFacts:
    """The shape as `paceline quantize` would write it: every linear layer of the decoder."""
    schemes, kept = {}, []
    body, recurrent, head = choose_scheme("w4a16", 128), choose_scheme("w8a16"), "lm_head"
    for number, kind in enumerate(target.layer_types):
        prefix = f"model.layers.{number}"
        leaves = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        if "linear" in kind:
            names = ("in_proj_qkv", "in_proj_z", "out_proj")
            schemes.update(dict.fromkeys((f"{prefix}.linear_attn.{n}" for n in names), recurrent))
            kept += [f"{prefix}.linear_attn.in_proj_{gate}" for gate in "ba"]
        else:
            leaves += [f"self_attn.{name}_proj" for name in "qkvo"]
        schemes.update(dict.fromkeys((f"{prefix}.{leaf}" for leaf in leaves), body))
    plan = TargetPlan(
        target=target,
        method="rtn",
        body=body,
        recurrent=recurrent,
        head=choose_scheme("w8a16"),
        schemes={**schemes, head: choose_scheme("w8a16")},
        kept=tuple(kept),
        tensors={"mtp.fc.weight": None} if target.num_mtp_layers else {},  # type: ignore[dict-item]
        files={},
    )
    settings = build_target_settings(plan)
    config = {**target.config, "quantization_config": settings, "tie_word_embeddings": False}
    return dataclasses.replace(target, config=config, tie_word_embeddings=False)
