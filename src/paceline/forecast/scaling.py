"""Acceptance by scaling: measured points -> a curve towards a limit, with intervals.

The curve is one of two forms (scaling_forms.py), whichever leaves less over. Intervals come from
refitting noisy copies of the points. Their noise: the points' draws, which are of the same prompts
in every point and so move the whole curve, and what the curve leaves over (two trainings are never
alike); or without draws their stated intervals; or without those what is left over alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from paceline.errors import DataError
from paceline.forecast.scaling_forms import Curves, solve_curves
from paceline.forecast.scaling_points import ScalingPoint, ScalingPoints

__all__ = ["CARRIES", "HeldOut", "Prediction", "ScalingFit", "fit_scaling"]

CARRIES = 4.0  # times the largest x
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

    form, scale, power: see scaling_forms.py. limit_open: the limit is what K allows, so the points
    do not decide it; at_edge: nor the exponent, which is the grid's end. worst_residual: largest
    distance of a point from the curve. held_out: the last point foreseen without the last place,
    without the last two, and so on while four points are left. band: the curve over the points and
    as far as it carries.
    """

    points: ScalingPoints
    form: str  # "power" | "logistic"
    limit: float
    limit_low: float
    limit_high: float
    scale: float
    power: float
    limit_open: bool
    at_edge: bool
    worst_residual: float
    held_out: tuple[HeldOut, ...]
    predictions: tuple[Prediction, ...]
    band: tuple[Prediction, ...]


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
    own = solve_curves(x, y[None], ceiling=ceiling)
    residuals = y - _values(own, x)
    dice = numpy.random.default_rng(seed)
    noise = _draw_noise(listed, residuals, dice)
    copies = solve_curves(x, numpy.clip(y + noise, 1.0, ceiling), ceiling=ceiling)
    limit_low, limit_high = numpy.quantile(copies.limit, _QUANTILES)

    def foresee(at: float) -> Prediction:
        low, high = numpy.quantile(copies.at(at), _QUANTILES)
        return Prediction(
            x=at,
            value=float(own.at(at)[0]),
            low=float(low),
            high=float(high),
            carries=bool(distinct[0] <= at <= CARRIES * distinct[-1]),
        )

    return ScalingFit(
        points=points,
        form="logistic" if own.is_logistic[0] else "power",
        limit=float(own.limit[0]),
        limit_low=float(limit_low),
        limit_high=float(limit_high),
        scale=float(own.scale[0]),
        power=float(own.power[0]),
        limit_open=bool(own.limit[0] >= ceiling - 1e-9),
        at_edge=own.at_edge,
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


def _values(curve: Curves, x: _Floats) -> _Floats:
    return numpy.array([curve.at(float(one))[0] for one in x])


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
        own = solve_curves(x, y[None], ceiling=ceiling)
        noise = _draw_noise([*rest, last], y - _values(own, x), dice)
        seen = numpy.clip(y + noise[:, :-1], 1.0, ceiling)
        values = solve_curves(x, seen, ceiling=ceiling).at(last.x) - noise[:, -1]
        low, high = numpy.quantile(values, _QUANTILES)
        found.append(
            HeldOut(
                x=last.x,
                num_left_out=num,
                foreseen=float(own.at(last.x)[0]),
                low=float(low),
                high=float(high),
                measured=last.acceptance_length,
            )
        )
    return tuple(found)
