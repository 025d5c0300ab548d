"""One design against one target and one contest: everything that shapes alone can tell."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from paceline.errors import PlanError
from paceline.forecast.design import Design, native_baseline
from paceline.forecast.memory import DraftMemory, measure_memory
from paceline.forecast.score import GOALS, Goal, StepTime, best_goal, find_goal, model_step
from paceline.forecast.shape import CachePlan, TargetShape
from paceline.forecast.step_model import StepModel
from paceline.rules import Rules

__all__ = ["Forecast", "build_forecast"]

_NOTABLE_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """goals and best are None without a baseline. memory_ratio is infinite for a draft of no
    bytes. device: whose pages M counts. length_tokens: context of the step-time model. limits:
    name -> (value, limit, holds)."""

    design: Design
    baseline: Design | None
    target: str
    device: str
    rules: str
    provisional: tuple[str, ...]
    memory: DraftMemory
    baseline_memory: DraftMemory | None
    limits: dict[str, tuple[int, int, bool]]
    length_tokens: int
    step: StepTime
    baseline_step: StepTime | None
    plain_step: StepTime
    step_source: str | None
    baseline_acceptance_length: float
    memory_ratio: float | None
    step_ratio: float | None
    goals: tuple[Goal, ...] | None
    best: Goal | None
    warnings: tuple[str, ...]

    def to_json_dict(self) -> dict[str, Any]:
        """Plain values; an infinite ratio is the text "unbounded"."""
        found = dataclasses.asdict(self)
        for key, memory in (("memory", self.memory), ("baseline_memory", self.baseline_memory)):
            if memory is None:
                continue
            found[key]["total_bytes"] = memory.total_bytes
            del found[key]["sizes"]["tensors"]
        for key in ("step", "baseline_step", "plain_step"):
            step = getattr(self, key)
            if step is not None:
                found[key]["step_ms"] = step.step_ms
        if self.memory_ratio is not None and math.isinf(self.memory_ratio):
            found["memory_ratio"] = "unbounded"
        return found


def build_forecast(
    design: Design,
    shape: TargetShape,
    rules: Rules,
    *,
    baseline: Design | None = None,
    baseline_acceptance_length: float = 2.8,
    bandwidth_gb_s: float = 3500.0,
    plan: CachePlan | None = None,
    model: StepModel | None = None,
) -> Forecast:
    """The forecast of a design. baseline None: the target's own MTP head with the rules' K.

    model: step times by a model fitted to measured runs; None takes the roofline. Raises PlanError
    for a design or an assumption that cannot be, or a target that the model does not know.
    """
    if model is not None:
        model.require_target(shape.facts.name)
    plan = plan or CachePlan()
    if not (math.isfinite(bandwidth_gb_s) and bandwidth_gb_s > 0):
        raise PlanError(f"the bandwidth is {bandwidth_gb_s}", expected="GB/s above 0")
    k_baseline = rules.speculation.baseline_num_speculative_tokens
    if baseline is None:
        baseline = native_baseline(shape, k_baseline)
    most = 1 + (baseline.num_speculative_tokens if baseline else k_baseline)
    if not 1 <= baseline_acceptance_length <= most:
        raise PlanError(
            f"the baseline's acceptance length is {baseline_acceptance_length}",
            expected=f"1 to {most} (1 + its K)",
        )
    context = rules.context_tokens
    length = context // 2

    def measure(one: Design) -> tuple[DraftMemory, StepTime]:
        memory = measure_memory(one, shape, context_tokens=context, plan=plan)
        step = model_step(
            one,
            memory,
            shape,
            tokens=length,
            bandwidth_gb_s=bandwidth_gb_s,
            plan=plan,
            model=model,
        )
        return memory, step

    memory, step = measure(design)
    base_memory, base_step = measure(baseline) if baseline else (None, None)
    memory_ratio = step_ratio = goals = best = None
    if base_memory is not None and base_step is not None:
        own = memory.total_bytes
        memory_ratio = base_memory.total_bytes / own if own else math.inf
        step_ratio = base_step.step_ms / step.step_ms
        facts = {
            "memory_ratio": memory_ratio,
            "step_ratio": step_ratio,
            "baseline_acceptance_length": baseline_acceptance_length,
        }
        k = design.num_speculative_tokens
        if math.isfinite(memory_ratio) or rules.terms.memory.cap is not None:
            goals = tuple(
                find_goal(rules, goal, num_speculative_tokens=k, **facts) for goal in GOALS
            )
            best = best_goal(rules, num_speculative_tokens=k, **facts)
    limits = rules.limits
    sizes = memory.sizes
    return Forecast(
        design=design,
        baseline=baseline,
        target=shape.facts.name,
        device=plan.device,
        rules=rules.name,
        provisional=rules.provisional,
        memory=memory,
        baseline_memory=base_memory,
        limits={
            "parameters": _limit(sizes.num_parameters, limits.max_parameters),
            "files_bytes": _limit(sizes.files_bytes, limits.max_files_bytes),
        },
        length_tokens=length,
        step=step,
        baseline_step=base_step,
        plain_step=model_step(
            None,
            None,
            shape,
            tokens=length,
            bandwidth_gb_s=bandwidth_gb_s,
            plan=plan,
            model=model,
        ),
        step_source=model.describe(shape.facts.name) if model is not None else None,
        baseline_acceptance_length=baseline_acceptance_length,
        memory_ratio=memory_ratio,
        step_ratio=step_ratio,
        goals=goals,
        best=best,
        warnings=tuple(_warn(design, shape, rules, memory, base_memory, plan)),
    )


def _limit(value: int, limit: int) -> tuple[int, int, bool]:
    return value, limit, value <= limit


def _warn(
    design: Design,
    shape: TargetShape,
    rules: Rules,
    memory: DraftMemory,
    base_memory: DraftMemory | None,
    plan: CachePlan,
) -> list[str]:
    found = []
    if not shape.confirmed:
        found.append(f"the bundled shape of {shape.facts.name} is not confirmed by a config.json")
    if design.family not in rules.families:
        found.append(f"{rules.name} does not allow family {design.family}")
    k = rules.speculation.entry_num_speculative_tokens
    if design.num_speculative_tokens != k:
        found.append(f"K is {design.num_speculative_tokens}, the rules serve entries with K = {k}")
    served = rules.context_tokens
    positions = design.max_position_embeddings
    if positions and positions < served and design.family != "eagle3":
        found.append(f"max_position_embeddings {positions:,} is short of {served:,} tokens")
    buffers = memory.sizes.buffers_bytes
    if buffers > _NOTABLE_SHARE * memory.total_bytes and positions > 2 * served:
        found.append(
            f"the draft's rotary table takes {buffers / 1e6:.1f} MB for {positions:,} positions;"
            f" max_position_embeddings = {served + 64:,} would make it"
            f" {buffers / 1e6 * (served + 64) / positions:.1f} MB"
        )
    if design.window and design.window + plan.in_flight_tokens > served:
        found.append(
            f"the window of {design.window:,} saves no memory: vLLM sets blocks aside for"
            f" {plan.in_flight_tokens:,} tokens in flight, so for all {served:,}"
        )
    if memory.state_bytes and base_memory is not None and memory.total_bytes:
        narrow = memory.total_bytes - memory.state_bytes
        ratio = (base_memory.total_bytes - base_memory.state_bytes) / narrow if narrow else 0.0
        found.append(
            "M counts the recurrent states that K adds, as a started engine holds them; the"
            " published rule names weights and KV cache only. Without states M is"
            f" {narrow:,} bytes" + (f" and M_B / M is {ratio:.3f}" if narrow else "")
        )
    if base_memory is None:
        found.append("no score: the target has no MTP head, so pass --baseline DESIGN.toml")
    return found
