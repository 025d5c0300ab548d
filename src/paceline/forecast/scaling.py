"""Acceptance by scaling: measured points -> a power law towards an asymptote, with intervals.

length(x) = limit - drop * x**(-power), where x counts tokens, layers or parameters. The exponent is
taken from a grid and the rest solved exactly with bounds, so the fit has one answer. Intervals come
from refitting noisy copies of the points: their stated intervals where they have them, else the
fit's own residuals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from paceline.errors import DataError
from paceline.forecast.scaling_points import ScalingPoint, ScalingPoints

__all__ = ["Prediction", "ScalingFit", "describe_scaling", "fit_scaling"]

_POWERS = tuple(0.05 * 1.09**i for i in range(48))  # 0.05 to 2.9
_RESAMPLES = 400
_CARRIES = 4.0  # times the largest x
_MIN_POINTS = 4
_Floats = numpy.typing.NDArray[numpy.float64]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """carries: x is within the measured range, or at most 4 times beyond its end."""

    x: float
    value: float
    low: float
    high: float
    carries: bool


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """Acceptance lengths, bonus token included. limit: the asymptote, with its interval (95 %).

    worst_residual: largest distance of a point from the curve. last_foreseen, last_measured: the
    point with the largest x, from a fit without it; None with too few others. at_edge: the exponent
    is the grid's end, so the points do not decide it.
    """

    points: ScalingPoints
    limit: float
    limit_low: float
    limit_high: float
    drop: float
    power: float
    at_edge: bool
    worst_residual: float
    last_foreseen: float | None
    last_measured: float
    predictions: tuple[Prediction, ...]

    def predict(self, x: float) -> float:
        return float(self.limit - self.drop * x ** (-self.power))


def fit_scaling(points: ScalingPoints, *, seed: int = 0) -> ScalingFit:
    """Raises DataError for fewer than four points, or fewer than three different x."""
    listed = sorted(points.points, key=lambda point: point.x)
    distinct = sorted({point.x for point in listed})
    if len(listed) < _MIN_POINTS or len(distinct) < _MIN_POINTS - 1:
        raise DataError(
            f"{len(listed)} points at {len(distinct)} different {points.axis} are too few",
            where=points.name,
            expected=f"at least {_MIN_POINTS} points at {_MIN_POINTS - 1} places: the curve has"
            " three unknowns",
        )
    x = numpy.array([point.x for point in listed])
    y = numpy.array([point.acceptance_length for point in listed])
    ceiling = points.num_speculative_tokens + 1.0
    limit, drop, power = _solve(x, y, ceiling)
    residuals = y - (limit - drop * x ** (-power))
    dice = numpy.random.default_rng(seed)
    spread = _spread(listed, residuals)
    solved = []
    for _ in range(_RESAMPLES):
        noisy = numpy.clip(y + dice.standard_normal(len(y)) * spread, 1.0, ceiling)
        solved.append(_solve(x, noisy, ceiling))
    limits = numpy.array([one[0] for one in solved])
    predictions = []
    for at in points.predict:
        values = numpy.array([a - b * at ** (-c) for a, b, c in solved])
        low, high = numpy.quantile(values, [0.025, 0.975])
        predictions.append(
            Prediction(
                x=at,
                value=limit - drop * at ** (-power),
                low=float(low),
                high=float(high),
                carries=distinct[0] <= at <= _CARRIES * distinct[-1],
            )
        )
    low, high = numpy.quantile(limits, [0.025, 0.975])
    return ScalingFit(
        points=points,
        limit=limit,
        limit_low=float(low),
        limit_high=float(high),
        drop=drop,
        power=power,
        at_edge=power in (_POWERS[0], _POWERS[-1]),
        worst_residual=float(numpy.abs(residuals).max()),
        last_foreseen=_foresee_last(x, y, ceiling),
        last_measured=float(y[-1]),
        predictions=tuple(predictions),
    )


def _solve(x: _Floats, y: _Floats, ceiling: float) -> tuple[float, float, float]:
    """(limit, drop, power) of least squares; 1 <= limit <= ceiling, drop >= 0."""
    powers = numpy.array(_POWERS)
    z = (x / x[0]) ** (-powers[:, None])  # 1 at the smallest x, so that drop has y's own scale
    spread = z - z.mean(axis=1, keepdims=True)
    square = (spread**2).sum(axis=1)
    drop = numpy.maximum(0.0, -(spread @ (y - y.mean())) / numpy.maximum(square, 1e-300))
    limit = y.mean() + drop * z.mean(axis=1)
    over = limit > ceiling  # on the edge of what can be: drop anew with the limit fixed
    limit = numpy.where(over, ceiling, limit)
    fixed = numpy.maximum(0.0, (z @ (ceiling - y)) / (z**2).sum(axis=1))
    drop = numpy.where(over, fixed, drop)
    errors = ((limit[:, None] - drop[:, None] * z - y) ** 2).sum(axis=1)
    best = int(errors.argmin())
    power = _POWERS[best]
    return float(limit[best]), float(drop[best]) * float(x[0]) ** power, power


def _spread(points: Sequence[ScalingPoint], residuals: _Floats) -> _Floats:
    """Standard error of each point: from its interval, else the residuals' (three unknowns)."""
    free = max(1, len(points) - 3)
    common = math.sqrt(float((residuals**2).sum()) / free)
    return numpy.array(
        [
            common if p.low is None or p.high is None else max((p.high - p.low) / 3.92, 0.0)
            for p in points
        ]
    )


def _foresee_last(x: _Floats, y: _Floats, ceiling: float) -> float | None:
    rest = x < x[-1]
    if len(set(x[rest].tolist())) < _MIN_POINTS - 1:
        return None
    limit, drop, power = _solve(x[rest], y[rest], ceiling)
    return float(limit - drop * x[-1] ** (-power))


def describe_scaling(fit: ScalingFit, target: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(label, value)]): the curve, its predictions, and how far they carry."""
    points = fit.points
    xs = sorted(point.x for point in points.points)
    about = [
        (
            "points",
            f"{len(xs)} of {points.family} on {points.target}, K ="
            f" {points.num_speculative_tokens}, {xs[0]:,.0f} to {xs[-1]:,.0f} {points.axis}",
        ),
        ("curve", f"{fit.limit:.3f} - {fit.drop:.4g} x {points.axis}^-{fit.power:.3f}"),
        ("towards", f"{fit.limit:.2f} ({fit.limit_low:.2f} to {fit.limit_high:.2f})"),
        ("on its points", f"off by at most {fit.worst_residual:.3f}"),
    ]
    if fit.last_foreseen is not None:
        about.append(
            (
                "largest run",
                f"{fit.last_foreseen:.3f} foreseen from the others, {fit.last_measured:.3f}"
                " measured",
            )
        )
    found = []
    for one in fit.predictions:
        text = f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"
        if not one.carries:
            text += "; BEYOND what these points carry: a guess, whatever the interval says"
        found.append((f"{one.x:,.0f}", text))
    honest = [
        f"the curve is seen from {xs[0]:,.0f} to {xs[-1]:,.0f} {points.axis}; up to"
        f" {_CARRIES:g} times the end it may carry, beyond that it is a guess",
    ]
    if points.target != target:
        honest.append(
            f"measured on {points.target}, asked for {target}: the form of the curve may carry"
            " over, its height does not"
        )
    if fit.at_edge:
        honest.append("these points do not decide the exponent: more places are needed")
    return [
        ("Acceptance by scaling", about),
        (f"Acceptance length at {points.axis}", found or [("-", "no place is asked for")]),
        ("How far it carries", [("-", text) for text in honest]),
    ]
