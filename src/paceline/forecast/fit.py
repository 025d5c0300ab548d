"""Measured runs -> a step-time model, by least squares with no cost below zero.

Rows are divided by the measured time, so errors are relative. A point's time is that of its fastest
answer: whatever else a shared machine does can only slow an answer down, and the model is of an
undisturbed step. The error that counts is on configurations that the fit has not seen: each
(target, design, K) is left out once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import MissingExtraError, ResultError
from paceline.forecast.design import build_design
from paceline.forecast.shape import CachePlan, TargetShape
from paceline.forecast.sizes import measure_design
from paceline.forecast.step_model import FEATURES, StepModel, list_features
from paceline.forecast.steps import StepPoint, StepRun, shape_sha256
from paceline.forecast.work import StepWork, measure_work
from paceline.records import build_provenance

__all__ = [
    "FitPoint",
    "build_points",
    "describe_fit",
    "fit_runs",
    "fit_step_model",
    "solve_costs",
    "undisturbed_ms",
]

_MIN_FOR_HELD_OUT = 4
_LEAN = 0.01
_NUM_BYTES = 4  # the first of FEATURES are bytes


@dataclass(frozen=True, kw_only=True)
class FitPoint:
    """One measured step time and the work behind it. configuration: what is left out together."""

    target: str
    configuration: str
    work: StepWork
    step_ms: float
    tokens: int


def fit_runs(
    runs: Sequence[StepRun], shapes: Sequence[TargetShape], *, where: str = "runs"
) -> StepModel:
    """One model of the targets from their runs; runs of other targets are left aside.

    Raises ResultError for a target without any, or runs from more than one machine.
    """
    own = []
    for shape in shapes:
        wanted = shape_sha256(shape)
        found = [run for run in runs if run.target_sha256 == wanted]
        if not found:
            names = sorted({run.target for run in runs})
            raise ResultError(
                f"no run is of {shape.facts.name}",
                where=where,
                expected=f"runs of this shape; the file has {', '.join(names) or 'none'}",
            )
        own += found
    machines = sorted({run.machine for run in own})
    if len(machines) > 1:
        raise ResultError(
            f"the runs are of {len(machines)} machines: {'; '.join(machines)}",
            where=where,
            expected="one: a cost belongs to a machine",
        )
    device = "cpu" if machines[0].startswith("cpu ") else "cuda"
    return fit_step_model(
        build_points(own, shapes, CachePlan(device=device)),
        machine=machines[0],
        targets=[shape.facts.name for shape in shapes],
        provenance={"runs": sorted(run.key for run in own), **build_provenance()},
    )


def describe_fit(model: StepModel) -> list[tuple[str, str]]:
    """(label, value) lines: what it is fitted to, its errors, every cost."""
    lines = [
        ("fitted", model.describe()),
        ("targets", ", ".join(model.targets)),
        ("on its own points", f"off by {model.fit_median:.1%} (median), {model.fit_worst:.1%}"),
    ]
    if len(model.held_out) > 1:
        for name, (median, worst) in model.held_out.items():
            lines.append((f"unseen, {name}", f"off by {median:.1%} (median), {worst:.1%}"))
    for name, cost in model.costs.items():
        unit, meaning = FEATURES[name]
        lines.append((name, f"{cost:.4g} {unit}: {meaning}"))
    return lines


def build_points(
    runs: Sequence[StepRun], shapes: Sequence[TargetShape], plan: CachePlan | None = None
) -> list[FitPoint]:
    """The work behind each measured point. Raises ResultError for a run of another shape."""
    plan = plan or CachePlan()
    by_name = {shape.facts.name: shape for shape in shapes}
    points = []
    for run in runs:
        shape = by_name.get(run.target)
        if shape is None or shape_sha256(shape) != run.target_sha256:
            raise ResultError(
                f"run {run.key} is of another target than {', '.join(by_name)}",
                where=f"{run.target} {run.target_sha256[:12]}",
                fix="Pass the shape that was measured as --target.",
            )
        design = build_design(run.settings, shape, where=run.name) if run.settings else None
        for point in run.points:
            context = point.context_tokens
            sizes = None
            if design is not None:
                sizes = measure_design(design, shape, context_tokens=context)
            work = measure_work(design, sizes, shape, tokens=context, plan=plan)
            points.append(
                FitPoint(
                    target=run.target,
                    configuration=run.key,
                    work=work,
                    step_ms=undisturbed_ms(run, point, runs),
                    tokens=context,
                )
            )
    return points


def undisturbed_ms(run: StepRun, point: StepPoint, runs: Sequence[StepRun]) -> float:
    """Milliseconds of a step of the fastest answer; `point` is one of `run`. A reference has the
    answers beside every other configuration of `runs` too."""
    beside = [
        other.reference_ms
        for paired in runs
        if paired.reference == run.key
        for other in paired.points
        if other.context_tokens == point.context_tokens and other.reference_ms is not None
    ]
    return min([*point.repeats_ms, *beside])


def solve_costs(points: Sequence[FitPoint], *, lean: float = _LEAN) -> dict[str, float]:
    """Costs by FEATURES, none negative, that make the mean square of relative errors least.

    Some kinds of work never vary without another, and then no measurement can tell their costs
    apart. So each cost leans, with weight `lean` against a relative error, to one bandwidth for all
    bytes (what fits best alone) and to nothing for the rest; 0 for plain least squares.
    """
    try:
        import numpy
        from scipy.optimize import lsq_linear
    except ImportError:
        raise MissingExtraError(
            "scipy is not installed", fix="pip install scipy; it fits the step-time model."
        ) from None
    rows = numpy.array([list_features(point.work) for point in points], dtype=numpy.float64)
    times = numpy.array([point.step_ms for point in points], dtype=numpy.float64)
    rows = rows / times[:, None]
    scale = rows.mean(axis=0)
    used = scale > 0  # a kind of work that never occurred has no cost to find
    total = rows[:, :_NUM_BYTES].sum(axis=1)
    roofline = float(total.sum() / (total @ total)) if total.any() else 0.0
    prior = numpy.where(numpy.arange(len(FEATURES)) < _NUM_BYTES, roofline, 0.0)
    weight = lean * math.sqrt(len(points))
    found = lsq_linear(
        numpy.vstack([rows[:, used] / scale[used], weight * numpy.eye(int(used.sum()))]),
        numpy.concatenate([numpy.ones(len(points)), weight * (prior * scale)[used]]),
        bounds=(0.0, numpy.inf),
        method="bvls",
        tol=1e-12,
    )
    costs = numpy.zeros(len(FEATURES))
    costs[used] = found.x / scale[used]
    return {name: float(max(0.0, cost)) for name, cost in zip(FEATURES, costs, strict=True)}


def fit_step_model(
    points: Sequence[FitPoint],
    *,
    machine: str,
    targets: Sequence[str],
    provenance: dict[str, Any] | None = None,
) -> StepModel:
    """Fits all points, and again without each configuration in turn for the held-out error.

    Raises ResultError for fewer than two points.
    """
    if len(points) < 2:
        raise ResultError(
            f"{len(points)} measured points are too few for a fit", expected="at least 2"
        )
    costs = solve_costs(points)
    errors = [_error(costs, point) for point in points]
    names = sorted({point.configuration for point in points})
    by_target: dict[str, list[float]] = {}
    if len(names) >= _MIN_FOR_HELD_OUT:
        for name in names:
            rest = [point for point in points if point.configuration != name]
            without = solve_costs(rest)
            for point in points:
                if point.configuration == name:
                    by_target.setdefault(point.target, []).append(_error(without, point))
    held = [error for errors in by_target.values() for error in errors]
    return StepModel(
        costs=costs,
        machine=machine,
        targets=tuple(targets),
        num_points=len(points),
        num_configurations=len(names),
        fit_median=statistics.median(errors),
        fit_worst=max(errors),
        held_out_median=statistics.median(held) if held else None,
        held_out_worst=max(held) if held else None,
        held_out={name: (statistics.median(e), max(e)) for name, e in by_target.items()},
        max_k=max(point.work.num_drafted for point in points),
        max_tokens=max(point.tokens for point in points),
        provenance=dict(provenance or {}),
    )


def _error(costs: dict[str, float], point: FitPoint) -> float:
    """Relative error of one prediction, as a share."""
    amounts = list_features(point.work)
    predicted = sum(c * amount for c, amount in zip(costs.values(), amounts, strict=True))
    return abs(predicted - point.step_ms) / point.step_ms
