"""Acceptance by scaling: exact curves, intervals, range, and points that mean nothing."""

from __future__ import annotations

import random

import pytest

from paceline.errors import DataError
from paceline.forecast.scaling import describe_scaling, fit_scaling
from paceline.forecast.scaling_points import parse_scaling_points

HEAD = """
axis = "tokens"
target = "smollm2"
family = "eagle3"
num_speculative_tokens = 3
predict = [4e6, 1e8]
"""


def _text(pairs: list[tuple[float, float]], more: str = "") -> str:
    return HEAD + "".join(
        f"\n[[points]]\nx = {x}\nacceptance_length = {y}\n{more}" for x, y in pairs
    )


def _curve(x: float) -> float:
    return 3.0 - 40.0 * x**-0.3


XS = [1e5, 2e5, 5e5, 1e6, 2e6]


def test_an_exact_curve_is_found_again() -> None:
    fit = fit_scaling(parse_scaling_points(_text([(x, _curve(x)) for x in XS])))
    assert fit.worst_residual < 0.005
    assert fit.limit == pytest.approx(3.0, abs=0.08)  # the exponent's grid has steps of 9 %
    near, far = fit.predictions
    assert near.value == pytest.approx(_curve(4e6), abs=0.02)
    assert (near.carries, far.carries) == (True, False)
    assert fit.last_foreseen == pytest.approx(_curve(2e6), abs=0.02)


def test_intervals_hold_the_truth_and_grow_beyond_the_points() -> None:
    """Points with noise of 0.03: the interval at 4 million tokens holds the truth nearly always."""
    held = 0
    for seed in range(20):
        dice = random.Random(seed)
        pairs = [(x, min(4.0, _curve(x) + dice.gauss(0, 0.03))) for x in XS]
        text = HEAD + "".join(
            f"\n[[points]]\nx = {x}\nacceptance_length = {y}\nlow = {y - 0.0588}\n"
            f"high = {min(4.0, y + 0.0588)}\n"
            for x, y in pairs
        )
        near, far = fit_scaling(parse_scaling_points(text), seed=seed).predictions
        held += near.low <= _curve(4e6) <= near.high
        assert far.high - far.low > near.high - near.low
    assert held >= 16


def test_never_above_what_k_allows_and_never_falling() -> None:
    rising = fit_scaling(parse_scaling_points(_text([(1, 1.5), (2, 2.5), (3, 3.5), (4, 3.99)])))
    assert rising.limit == 4.0
    falling = fit_scaling(parse_scaling_points(_text([(1, 3.0), (2, 2.5), (3, 2.2), (4, 2.0)])))
    assert falling.drop == 0.0
    assert falling.predict(1e9) == pytest.approx(2.425)  # the mean: more never makes it worse


def test_what_it_says_of_its_range() -> None:
    fit = fit_scaling(parse_scaling_points(_text([(x, _curve(x)) for x in XS])))
    text = str(describe_scaling(fit, "qwen3.8-27b"))
    assert "BEYOND what these points carry" in text
    assert "measured on smollm2, asked for qwen3.8-27b" in text
    assert "asked for" not in str(describe_scaling(fit, "smollm2"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_text([(1, 2.0), (2, 2.1), (3, 2.2)]), "3 points at 3 different tokens are too few"),
        (_text([(1, 2.0), (1, 2.1), (2, 2.2), (2, 2.3)]), "4 points at 2 different"),
        (_text([(1, 4.5)]), "from 1 to 4"),
        (_text([(0, 2.0)]), "above 0"),
        (_text([(1, 2.0)], "low = 1.5\n"), "half an interval"),
        (_text([(1, 2.0)], "low = 2.5\nhigh = 3.0\n"), "low"),
        (_text([(1, 2.0)], "colour = 1\n"), "'colour' is unknown"),
        (HEAD.replace('"tokens"', '"hours"') + "points = []", "axis is hours"),
        ("axis = ", "not valid TOML"),
    ],
)
def test_points_that_mean_nothing(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit_scaling(parse_scaling_points(text))
