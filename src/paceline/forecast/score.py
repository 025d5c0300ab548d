"""From shapes to score: a bandwidth roofline for the step, and the acceptance a goal needs.

Without a model fitted to measured runs (step_model.py) the step time is an assumption: a step moves
bytes at one bandwidth and costs nothing else. It ignores launches, arithmetic and the wider
verification, so it favours large K. One known point: Qwen3.8-27B's shape with its MTP head, K = 3,
took 18.9 ms a step on an H200 and 14.6 ms a token without a draft; the roofline says 18.0 and 14.9
at 3,500 GB/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.forecast.design import Design
from paceline.forecast.memory import DraftMemory
from paceline.forecast.shape import CachePlan, TargetShape
from paceline.forecast.step_model import StepModel
from paceline.forecast.work import measure_work
from paceline.rules import Rules, Score, compute_score

__all__ = ["GOALS", "Goal", "StepTime", "best_goal", "find_goal", "model_step"]

GOALS = (100.0, 125.0, 150.0)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Bytes that one step moves, and its time at bandwidth_gb_s (10**9 bytes a second).

    fitted_ms: the time by a fitted model, which then counts; None without one.
    """

    verify_bytes: int
    cache_bytes: int
    draft_bytes: int
    bandwidth_gb_s: float
    fitted_ms: float | None = None

    @property
    def step_ms(self) -> float:
        if self.fitted_ms is not None:
            return self.fitted_ms
        moved = self.verify_bytes + self.cache_bytes + self.draft_bytes
        return moved / (self.bandwidth_gb_s * 1e6)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One score. acceptance_ratio: needed against the baseline's; acceptance_length with the
    assumed baseline. reachable: within K + 1. capped: terms at their cap there. gated: the
    gate, not the score, decides the acceptance. score: None where no acceptance reaches it."""

    score: float
    acceptance_ratio: float | None
    acceptance_length: float | None
    reachable: bool
    capped: tuple[str, ...]
    gated: bool
    points: dict[str, float]


def model_step(
    design: Design | None,
    memory: DraftMemory | None,
    shape: TargetShape,
    *,
    tokens: int,
    bandwidth_gb_s: float,
    plan: CachePlan,
    model: StepModel | None = None,
) -> StepTime:
    """Step time of a design (None: of the target alone) with `tokens` of context behind it.

    model: a model fitted to measured runs; None takes the roofline.
    """
    sizes = memory.sizes if memory is not None else None
    work = measure_work(design, sizes, shape, tokens=tokens, plan=plan)
    return StepTime(
        verify_bytes=work.target_bytes,
        cache_bytes=work.cache_bytes,
        draft_bytes=work.pass_bytes + work.head_bytes,
        bandwidth_gb_s=bandwidth_gb_s,
        fitted_ms=model.predict(work) if model is not None else None,
    )


def find_goal(
    rules: Rules,
    goal: float,
    *,
    memory_ratio: float,
    step_ratio: float,
    baseline_acceptance_length: float,
    num_speculative_tokens: int,
) -> Goal:
    """The least acceptance length that scores `goal` and passes the gate.

    memory_ratio: M_B / M. step_ratio: the baseline's step time over the design's, so that
    TPOT_B / TPOT is step_ratio times the acceptance ratio.
    """

    def at(ratio: float) -> Score:
        return compute_score(
            rules, tau_ratio=ratio, memory_ratio=memory_ratio, tpot_ratio=ratio * step_ratio
        )

    low, high = 0.0, 1.0
    while at(high).value < goal and high < 1e6:
        high *= 2
    if at(high).value < goal:  # every term is capped below the goal
        return _goal(goal, None, at(high), baseline_acceptance_length, num_speculative_tokens)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle).value >= goal else (middle, high)
    gate = rules.gate.minimum_tau_ratio
    floor = max(gate, 1 / baseline_acceptance_length)  # an acceptance length is at least 1
    ratio = max(high, floor)
    return _goal(
        goal,
        ratio,
        at(ratio),
        baseline_acceptance_length,
        num_speculative_tokens,
        gated=high < gate,
    )


def best_goal(
    rules: Rules,
    *,
    memory_ratio: float,
    step_ratio: float,
    baseline_acceptance_length: float,
    num_speculative_tokens: int,
) -> Goal:
    """The score when every drafted token holds: no draft of this design can have more."""
    ratio = (1 + num_speculative_tokens) / baseline_acceptance_length
    score = compute_score(
        rules, tau_ratio=ratio, memory_ratio=memory_ratio, tpot_ratio=ratio * step_ratio
    )
    return _goal(score.value, ratio, score, baseline_acceptance_length, num_speculative_tokens)


def _goal(
    goal: float,
    ratio: float | None,
    score: Score,
    baseline: float,
    num_speculative_tokens: int,
    *,
    gated: bool = False,
) -> Goal:
    length = None if ratio is None else ratio * baseline
    return Goal(
        score=goal,
        acceptance_ratio=ratio,
        acceptance_length=length,
        reachable=length is not None and length <= num_speculative_tokens + 1 + 1e-9,
        capped=tuple(t.name for t in score.terms if t.cap is not None and t.ratio >= t.cap),
        gated=gated,
        points={t.name: t.points for t in score.terms if math.isfinite(t.points)},
    )
