"""Two forms of a scaling curve, three unknowns each, solved by least squares over a grid.

"power": limit - scale * x**-power, for a draft that is past its beginnings.
"logistic": 1 + (limit - 1) / (1 + (scale / x)**power), which begins at 1, where a draft that knows
nothing begins, bends upwards and ends as a power law too; scale is where half of it is reached.
The exponent (and the logistic's scale) come from a grid, the rest is solved exactly with bounds, so
every set of points has one answer; the form that leaves less over is taken.

Shapes: R sets of points, N points, P powers, G (power, scale) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import numpy.typing

__all__ = ["Curves", "solve_curves"]

_Floats = numpy.typing.NDArray[numpy.float64]
_POWERS = 0.05 * 1.03 ** numpy.arange(138)  # 0.05 to 2.9
_NUM_SCALES = 80


@dataclass(frozen=True, kw_only=True)
class Curves:
    """R curves; every array is [R]. ceiling: no length lies above it, none below 1."""

    is_logistic: numpy.typing.NDArray[numpy.bool_]
    limit: _Floats
    scale: _Floats
    power: _Floats
    ceiling: float

    def at(self, x: float) -> _Floats:
        with numpy.errstate(over="ignore"):  # far below the scale: 1
            logistic = 1.0 + (self.limit - 1.0) / (1.0 + (self.scale / x) ** self.power)
            power = self.limit - self.scale * x ** (-self.power)
        values = numpy.where(self.is_logistic, logistic, power)
        return numpy.asarray(numpy.clip(values, 1.0, self.ceiling), dtype=numpy.float64)

    @property
    def at_edge(self) -> bool:
        """The first curve's exponent is the grid's end."""
        return bool(self.power[0] in (_POWERS[0], _POWERS[-1]))


def solve_curves(x_N: _Floats, y_RN: _Floats, *, ceiling: float) -> Curves:
    """1 <= limit <= ceiling, and never falling."""
    power_errors, power = _solve_power(x_N, y_RN, ceiling)
    logistic_errors, logistic = _solve_logistic(x_N, y_RN, ceiling)
    is_logistic = logistic_errors < power_errors - 1e-12
    chosen = [numpy.where(is_logistic, b, a) for a, b in zip(power, logistic, strict=True)]
    return Curves(
        is_logistic=is_logistic,
        limit=chosen[0],
        scale=chosen[1],
        power=chosen[2],
        ceiling=ceiling,
    )


def _solve_power(x_N: _Floats, y_RN: _Floats, ceiling: float) -> tuple[_Floats, list[_Floats]]:
    """Squared errors [R], and limit, scale, power [R]."""
    z_PN = (x_N / x_N[0]) ** (-_POWERS[:, None])  # 1 at the smallest x: drops have y's own scale
    spread_PN = z_PN - z_PN.mean(axis=1, keepdims=True)
    square_P = numpy.maximum((spread_PN**2).sum(axis=1), 1e-300)
    mean_R1 = y_RN.mean(axis=1, keepdims=True)
    drop_RP = numpy.maximum(0.0, -((y_RN - mean_R1) @ spread_PN.T) / square_P)
    limit_RP = mean_R1 + drop_RP * z_PN.mean(axis=1)
    over_RP = limit_RP > ceiling  # on the edge of what can be: drop anew with the limit fixed
    limit_RP = numpy.where(over_RP, ceiling, limit_RP)
    fixed_RP = numpy.maximum(0.0, ((ceiling - y_RN) @ z_PN.T) / (z_PN**2).sum(axis=1))
    drop_RP = numpy.where(over_RP, fixed_RP, drop_RP)
    left_RPN = limit_RP[..., None] - drop_RP[..., None] * z_PN - y_RN[:, None, :]
    errors_RP = (left_RPN**2).sum(axis=2)
    best = errors_RP.argmin(axis=1)
    rows = numpy.arange(len(y_RN))
    power = _POWERS[best]
    scale = drop_RP[rows, best] * float(x_N[0]) ** power
    return errors_RP[rows, best], [limit_RP[rows, best], scale, power]


def _solve_logistic(x_N: _Floats, y_RN: _Floats, ceiling: float) -> tuple[_Floats, list[_Floats]]:
    """As above. Scales from a hundredth of the smallest x to ten thousand times the largest."""
    scales = numpy.geomspace(x_N[0] / 100.0, x_N[-1] * 1e4, _NUM_SCALES)
    power_G, scale_G = (grid.ravel() for grid in numpy.meshgrid(_POWERS[::3], scales))
    h_GN = 1.0 / (1.0 + (scale_G[:, None] / x_N) ** power_G[:, None])
    square_G = (h_GN**2).sum(axis=1)
    product_RG = (y_RN - 1.0) @ h_GN.T
    height_RG = numpy.clip(product_RG / numpy.maximum(square_G, 1e-300), 0.0, ceiling - 1.0)
    errors_RG = height_RG**2 * square_G - 2.0 * height_RG * product_RG
    best = errors_RG.argmin(axis=1)
    rows = numpy.arange(len(y_RN))
    height = height_RG[rows, best]
    left_RN = height[:, None] * h_GN[best] - (y_RN - 1.0)
    return (left_RN**2).sum(axis=1), [1.0 + height, scale_G[best], power_G[best]]
