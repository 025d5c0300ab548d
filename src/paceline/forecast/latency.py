"""One design where latency alone counts, as in adaptfm-2026: how fast it decodes, regime by regime.

Against the target alone, compiled: a challenge's own baseline is slower by what eager execution
costs, which `paceline bench` measures. Reading the prompt is not in it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PlanError
from paceline.forecast.describe import describe_bytes, describe_design
from paceline.forecast.design import Design
from paceline.forecast.memory import DraftMemory, measure_memory
from paceline.forecast.score import model_step
from paceline.forecast.shape import CachePlan, TargetShape
from paceline.forecast.step_model import StepModel

__all__ = ["LatencyForecast", "LatencyPoint", "build_latency", "describe_latency"]

SPEED_UPS = (1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class LatencyPoint:
    """One regime, in the middle of its answer. plain_ms: a token of the target alone; step_ms: a
    step of the design, which gives as many tokens as its acceptance length."""

    prompt_tokens: int
    new_tokens: int
    plain_ms: float
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class LatencyForecast:
    """needed: speed-up over the target alone, mean over the regimes -> acceptance length. most:
    the speed-up with every drafted token right. step_source: None for the roofline."""

    design: Design
    target: str
    memory: DraftMemory
    points: tuple[LatencyPoint, ...]
    needed: dict[float, float]
    most: float
    step_source: str | None

    def to_json_dict(self) -> dict[str, Any]:
        """Plain values; speed-ups as text keys."""
        found = dataclasses.asdict(self)
        found["memory"]["total_bytes"] = self.memory.total_bytes
        del found["memory"]["sizes"]["tensors"]
        found["needed"] = {f"{wanted:g}": length for wanted, length in self.needed.items()}
        return found


def build_latency(
    design: Design,
    shape: TargetShape,
    regimes: Sequence[tuple[int, int]],
    *,
    bandwidth_gb_s: float = 3500.0,
    model: StepModel | None = None,
) -> LatencyForecast:
    """regimes: (prompt tokens, new tokens). A mean of speed-ups grows with the acceptance length
    as each of them does, so what is needed is the speed-up over that of length one. Raises
    PlanError for a context longer than the target's, or a target that the model does not know."""
    if model is not None:
        model.require_target(shape.facts.name)
    plan, points = CachePlan(), []
    for prompt, new in regimes:
        limit = shape.facts.max_position_embeddings
        if prompt + new > limit:
            raise PlanError(
                f"{prompt + new:,} tokens are asked for", expected=f"at most {limit:,} positions"
            )
        tokens = prompt + new // 2
        memory = measure_memory(design, shape, context_tokens=tokens, plan=plan)
        plain, own = (
            model_step(
                one,
                memory if one is not None else None,
                shape,
                tokens=tokens,
                bandwidth_gb_s=bandwidth_gb_s,
                plan=plan,
                model=model,
            ).step_ms
            for one in (None, design)
        )
        points.append(
            LatencyPoint(prompt_tokens=prompt, new_tokens=new, plain_ms=plain, step_ms=own)
        )
    per_token = statistics.fmean(point.plain_ms / point.step_ms for point in points)
    longest = max(prompt + new for prompt, new in regimes)
    return LatencyForecast(
        design=design,
        target=shape.facts.name,
        memory=measure_memory(design, shape, context_tokens=longest, plan=plan),
        points=tuple(points),
        needed={wanted: wanted / per_token for wanted in SPEED_UPS},
        most=(design.num_speculative_tokens + 1) * per_token,
        step_source=model.describe(shape.facts.name) if model is not None else None,
    )


def describe_latency(found: LatencyForecast) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(label, value)]) for a person."""
    kind = "assumed" if found.step_source is None else "fitted to measured runs"
    most = found.design.num_speculative_tokens + 1
    steps = [
        (
            f"{point.prompt_tokens:,} + {point.new_tokens:,}",
            f"{point.plain_ms:.2f} ms a token alone, {point.step_ms:.2f} ms a step",
        )
        for point in found.points
    ]
    needed = []
    for wanted, length in found.needed.items():
        label = "break-even" if wanted == 1 else f"{wanted:g} times"
        out = "; OUT OF REACH: above K + 1" if length > most else ""
        needed.append((label, f"acceptance length {length:.2f}{out}"))
    source = [("model", found.step_source)] if found.step_source else []
    return [
        ("Design", describe_design(found.design)),
        (f"Bytes at {found.memory.context_tokens:,} tokens", describe_bytes(found.memory)),
        (f"Decoding, by regime ({kind})", [*source, *steps]),
        (
            "As fast as the target alone, mean of the regimes",
            [*needed, ("at most", f"{found.most:.2f} times with acceptance length {most}")],
        ),
        (
            "Not in it",
            [("-", "reading the prompt; and the target alone is compiled here, not eager")],
        ),
    ]
