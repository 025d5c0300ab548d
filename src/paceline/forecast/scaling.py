"""Acceptance by scaling: measured points -> a power law towards an asymptote, with intervals.

length(x) = limit - drop * x**(-power), where x counts tokens, layers or parameters. The exponent is
taken from a grid and the rest solved exactly with bounds, so the fit has one answer. Intervals come
from refitting noisy copies of the points. Their noise: the points' draws, which are of the same
prompts in every point and so move the whole curve, and what the curve leaves over (two trainings
are never alike); or without draws their stated intervals; or without those what is left over alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from paceline.errors import DataError
from paceline.forecast.scaling_points import ScalingPoint, ScalingPoints

__all__ = ["CARRIES", "HeldOut", "Prediction", "ScalingFit", "fit_scaling"]

CARRIES = 4.0  # times the largest x
_POWERS = tuple(0.05 * 1.09**i for i in range(48))  # 0.05 to 2.9
_RESAMPLES = 400
_MIN_POINTS = 4
_QUANTILES = (0.025, 0.975)
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
class HeldOut:
    """A measured point, foreseen by the points below it alone.

    num_left_out: places that the fit did not see, this one the farthest. low, high: what should be
    measured there in 95 of 100 cases, the measurement's own noise included.
    """

    x: float
    num_left_out: int
    foreseen: float
    low: float
    high: float
    measured: float

    @property
    def is_covered(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """Acceptance lengths, bonus token included. limit: the asymptote, with its interval (95 %).

    worst_residual: largest distance of a point from the curve. held_out: the last point foreseen
    without the last place, without the last two, and so on while four points are left. at_edge: the
    exponent is the grid's end, so the points do not decide it. band: the curve over the points and
    as far as it carries.
    """

    points: ScalingPoints
    limit: float
    limit_low: float
    limit_high: float
    drop: float
    power: float
    at_edge: bool
    worst_residual: float
    held_out: tuple[HeldOut, ...]
    predictions: tuple[Prediction, ...]
    band: tuple[Prediction, ...]

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
    ceiling = points.num_speculative_tokens + 1.0
    x, y = _arrays(listed)
    limit, drop, power = _solve(x, y, ceiling)
    residuals = y - (limit - drop * x ** (-power))
    dice = numpy.random.default_rng(seed)
    noise = _draw_noise(listed, residuals, dice)
    solved = [_solve(x, numpy.clip(y + row, 1.0, ceiling), ceiling) for row in noise]
    limits, drops, powers = numpy.array(solved).T
    low, high = numpy.quantile(limits, _QUANTILES)

    def foresee(at: float) -> Prediction:
        low, high = numpy.quantile(limits - drops * at ** (-powers), _QUANTILES)
        return Prediction(
            x=at,
            value=float(limit - drop * at ** (-power)),
            low=float(low),
            high=float(high),
            carries=bool(distinct[0] <= at <= CARRIES * distinct[-1]),
        )

    return ScalingFit(
        points=points,
        limit=limit,
        limit_low=float(low),
        limit_high=float(high),
        drop=drop,
        power=power,
        at_edge=power in (_POWERS[0], _POWERS[-1]),
        worst_residual=float(numpy.abs(residuals).max()),
        held_out=_hold_out(listed, distinct, ceiling, dice),
        predictions=tuple(foresee(at) for at in points.predict),
        band=tuple(
            foresee(float(at)) for at in numpy.geomspace(distinct[0], CARRIES * distinct[-1], 49)
        ),
    )


def _arrays(points: Sequence[ScalingPoint]) -> tuple[_Floats, _Floats]:
    x = numpy.array([point.x for point in points])
    return x, numpy.array([point.acceptance_length for point in points])


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


def _draw_noise(
    points: Sequence[ScalingPoint], residuals: _Floats, dice: numpy.random.Generator
) -> _Floats:
    """Noise of each copy and point [R, N]; residuals: of the fitted points, the first of them."""
    free = max(1, len(residuals) - 3)
    left_over = math.sqrt(float((residuals**2).sum()) / free)
    normal = dice.standard_normal((_RESAMPLES, len(points)))
    if points[0].draws:
        draws = numpy.array([point.draws for point in points]).T
        draws = draws - draws.mean(axis=0)
        chosen = dice.integers(len(draws), size=_RESAMPLES)
        return numpy.asarray(draws[chosen] + left_over * normal, dtype=numpy.float64)
    spread = [
        left_over if p.low is None or p.high is None else max((p.high - p.low) / 3.92, 0.0)
        for p in points
    ]
    return numpy.asarray(numpy.array(spread) * normal, dtype=numpy.float64)


def _hold_out(
    listed: Sequence[ScalingPoint],
    distinct: Sequence[float],
    ceiling: float,
    dice: numpy.random.Generator,
) -> tuple[HeldOut, ...]:
    """The last point from ever fewer below it."""
    last, found = listed[-1], []
    for num in range(1, len(distinct)):
        rest = [point for point in listed if point.x < distinct[-num]]
        if len(rest) < _MIN_POINTS or len({point.x for point in rest}) < _MIN_POINTS - 1:
            break
        x, y = _arrays(rest)
        limit, drop, power = _solve(x, y, ceiling)
        noise = _draw_noise([*rest, last], y - (limit - drop * x ** (-power)), dice)
        values = []
        for row in noise:
            a, b, c = _solve(x, numpy.clip(y + row[:-1], 1.0, ceiling), ceiling)
            values.append(a - b * last.x ** (-c) - row[-1])
        low, high = numpy.quantile(values, _QUANTILES)
        found.append(
            HeldOut(
                x=last.x,
                num_left_out=num,
                foreseen=float(limit - drop * last.x ** (-power)),
                low=float(low),
                high=float(high),
                measured=last.acceptance_length,
            )
        )
    return tuple(found)
