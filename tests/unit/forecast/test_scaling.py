"""Acceptance by scaling: exact curves, intervals, range, and points that mean nothing."""

from __future__ import annotations

import random

import pytest

from paceline.errors import DataError
from paceline.forecast.scaling import fit_scaling
from paceline.forecast.scaling_points import parse_scaling_points
from paceline.forecast.scaling_record import describe_scaling, scaling_to_json

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
    (held,) = fit.held_out  # four points are left without the last one, three without two
    assert held.foreseen == pytest.approx(_curve(2e6), abs=0.02)
    assert (held.x, held.num_left_out, held.measured) == (2e6, 1, _curve(2e6))


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
    (far,) = {round(one.value, 3) for one in (*falling.predictions, *falling.band)}
    assert far == pytest.approx(2.425)  # the mean: more never makes it worse


def test_what_it_says_of_its_range() -> None:
    fit = fit_scaling(parse_scaling_points(_text([(x, _curve(x)) for x in XS])))
    text = str(describe_scaling(fit, "qwen3.8-27b"))
    assert "BEYOND what these points carry" in text
    assert "measured on smollm2, asked for qwen3.8-27b" in text
    assert "asked for" not in str(describe_scaling(fit, "smollm2"))


def test_a_beginning_that_bends_upwards_is_followed() -> None:
    """A logistic curve in log x, seen below its middle: a power law cannot bend that way."""

    def rising(x: float) -> float:
        return 1.0 + 2.4 / (1.0 + (4e6 / x) ** 0.7)

    fit = fit_scaling(
        parse_scaling_points(_text([(1e4 * 2**n, rising(1e4 * 2**n)) for n in range(8)]))
    )
    assert fit.form == "logistic"
    assert fit.worst_residual < 0.005
    assert fit.predictions[0].value == pytest.approx(rising(4e6), abs=0.05)
    for one in fit.held_out[:2]:
        assert one.foreseen == pytest.approx(one.measured, abs=0.03)
    assert fit_scaling(parse_scaling_points(_text([(x, _curve(x)) for x in XS]))).form == "power"


def _draws_text(values: list[tuple[float, float, list[float]]]) -> str:
    return HEAD + "".join(
        f"\n[[points]]\nx = {x}\nacceptance_length = {y}\ndraws = {draws}\n"
        for x, y, draws in values
    )


def test_noise_of_shared_prompts_moves_the_curve_and_does_not_bend_it() -> None:
    """Other prompts raise every point alike: the height is unsure, the hold-out is not."""
    dice = random.Random(0)
    shifts = [dice.gauss(0, 0.05) for _ in range(200)]
    common = [(x, _curve(x), [_curve(x) + s for s in shifts]) for x in XS]
    apart = [(x, _curve(x), [_curve(x) + dice.gauss(0, 0.05) for _ in shifts]) for x in XS]
    one, other = (fit_scaling(parse_scaling_points(_draws_text(v))) for v in (common, apart))
    assert one.predictions[0].high - one.predictions[0].low == pytest.approx(3.92 * 0.05, rel=0.15)
    (held,), (loose,) = one.held_out, other.held_out
    assert held.high - held.low < 0.02 < 0.15 < loose.high - loose.low
    assert held.is_covered


def test_a_held_out_point_that_leaves_the_curve_is_told() -> None:
    pairs = [(x, _curve(x)) for x in XS[:-1]] + [(XS[-1], _curve(XS[-1]) - 0.3)]
    spread = "".join(
        f"\n[[points]]\nx = {x}\nacceptance_length = {y}\nlow = {y - 0.02}\nhigh = {y + 0.02}\n"
        for x, y in pairs
    )
    fit = fit_scaling(parse_scaling_points(HEAD + spread))
    assert not fit.held_out[0].is_covered
    assert "OUTSIDE" in str(describe_scaling(fit, "smollm2"))
    assert scaling_to_json(fit)["held_out"][0]["is_covered"] is False


def test_the_interval_of_a_held_out_point_holds_what_is_measured() -> None:
    """Noise of 0.03 a point, shared prompts or not: covered in about 95 of 100 cases."""
    covered = 0
    for seed in range(40):
        dice = random.Random(seed)
        values = [(x, _curve(x) + dice.gauss(0, 0.03)) for x in [5e4, *XS]]
        text = HEAD + "".join(
            f"\n[[points]]\nx = {x}\nacceptance_length = {y}\nlow = {y - 0.0588}\n"
            f"high = {y + 0.0588}\n"
            for x, y in values
        )
        covered += fit_scaling(parse_scaling_points(text), seed=seed).held_out[0].is_covered
    assert covered >= 34


def test_record_has_the_band_as_far_as_it_carries() -> None:
    record = scaling_to_json(fit_scaling(parse_scaling_points(_text([(x, _curve(x)) for x in XS]))))
    assert record["format"] == "paceline-scaling/1"
    assert record["band"][0]["x"] == pytest.approx(1e5)
    assert record["band"][-1]["x"] == pytest.approx(4 * 2e6)
    for one in record["band"]:
        assert one["acceptance_length"] == pytest.approx(_curve(one["x"]), abs=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_draws_text([(1, 2.0, [2.0] * 40), (2, 2.1, [2.1] * 41)]), "40 and 41 draws"),
        (_draws_text([(1, 2.0, [2.0])]), "a list of 40 or more"),
        (_draws_text([(1, 2.0, [5.0] * 40)]), "from 1 to 4"),
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
