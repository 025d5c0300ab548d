"""Host overhead: what a decode step takes beyond the models' own computing.

StepClock runs inside vLLM's worker, in the inspector's place. On a CPU it times the forward passes
and output layers of target and draft; on CUDA it adds up the kernels that the profiler saw, graphs
included. The step itself is timed outside, by when its tokens arrive. Prefill does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from paceline.endpoint import Request
from paceline.serve.endpoint import VllmEndpoint
from paceline.serve.inspector import Inspector
from paceline.serve.plan import Plan

__all__ = ["HostOverhead", "StepClock", "measure_host_overhead", "with_step_clock"]

_CLASS = "paceline.serve.step_clock.StepClock"


@dataclass(frozen=True, kw_only=True)
class HostOverhead:
    """Means over decode steps. host_ms = step_ms - compute_ms: scheduling, inputs, sampling,
    bookkeeping."""

    step_ms: float
    compute_ms: float
    num_steps: int

    @property
    def host_ms(self) -> float:
        return self.step_ms - self.compute_ms


class StepClock(Inspector):
    """Adds the two calls around a measured request."""

    def paceline_clock_start(self) -> None:
        """Begins; each call of execute_model opens the next step."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self._steps: list[float] = []
        self._undo: list[Callable[[], None]] = []
        self._profile: Any = None
        self._wrap(runner, "execute_model", self._next_step)
        if _is_cuda(runner):
            from torch.profiler import ProfilerActivity, profile

            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
            return
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        for model in (runner.get_model(), getattr(drafter, "model", None)):
            for name in ("forward", "compute_logits"):
                if hasattr(model, name):
                    self._wrap(model, name, self._timed)

    def paceline_clock_stop(self) -> list[float]:
        """Milliseconds of computing, one number a step; on CUDA their mean at every step."""
        for undo in self._undo:
            undo()
        if self._profile is not None:
            self._profile.stop()
            total_us = sum(event.self_device_time_total for event in self._profile.key_averages())
            return [total_us / 1000.0 / len(self._steps)] * len(self._steps)
        return [seconds * 1000.0 for seconds in self._steps]

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return around(inner, args, kwargs)

        setattr(owner, name, call)
        self._undo.append(lambda: delattr(owner, name))

    def _next_step(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._steps.append(0.0)
        return inner(*args, **kwargs)

    def _timed(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            self._steps[-1] += time.perf_counter() - begun


def _is_cuda(runner: Any) -> bool:
    return str(getattr(runner, "device", "cpu")).startswith("cuda")


def with_step_clock(plan: Plan) -> Plan:
    """The plan with the clock in its worker; all else is the same."""
    return replace(plan, engine_args={**plan.engine_args, "worker_extension_cls": _CLASS})


def measure_host_overhead(endpoint: VllmEndpoint, request: Request) -> HostOverhead | None:
    """One request alone on an engine that was planned `with_step_clock`; None for an answer of
    fewer than two decode steps.

    On CUDA the computing of the prefill is part of the mean: ask for a short prompt and a long
    answer.
    """
    endpoint.inspect("paceline_clock_start")
    answer = endpoint.generate([request])[0]
    steps = endpoint.inspect("paceline_clock_stop")[1:]  # the first is the prefill
    times = answer.chunk_times_s
    if len(times) < 3:
        return None
    return HostOverhead(
        step_ms=(times[-1] - times[0]) * 1000.0 / (len(times) - 1),
        compute_ms=mean(steps[: len(times) - 1]),
        num_steps=len(times) - 1,
    )
