"""Quantiles against published tables, spreads by hand, draws against their stream."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.eval.statistics import (
    MIN_DEGREES_OF_FREEDOM,
    Spread,
    draw_resamples,
    geometric_mean,
    half_width,
    measure_spread,
    t_quantile,
)


def column(*values: float) -> np.ndarray:
    """One block."""
    return np.array(values, dtype=np.float64)[:, None]


@pytest.mark.parametrize(
    ("probability", "df", "value"),
    [
        (0.975, 1, 12.7062047362),
        (0.975, 4.7, 2.6207260754),  # scipy.stats.t.ppf
        (0.975, 8, 2.3060041350),
        (0.95, 30, 1.6972608866),
        (0.975, 312, 1.9675964974),
        (0.9995, 4, 8.6103015813),
        (0.975, math.inf, 1.9599639845),
        (0.5, 5, 0.0),
    ],
)
def test_t_quantile(probability: float, df: float, value: float) -> None:
    tolerance = 1e-8 if math.isfinite(df) else 1e-5
    assert t_quantile(probability, df) == pytest.approx(value, abs=tolerance)
    assert t_quantile(1 - probability, df) == pytest.approx(-value, abs=tolerance)


def test_draws_are_seeded() -> None:
    draws = draw_resamples([4, 2], num_resamples=1000, seed=7)
    assert [d.shape for d in draws] == [(1000, 4), (1000, 2)]
    assert set(np.unique(draws[0])) == {0, 1, 2, 3}
    again = draw_resamples([4, 2], num_resamples=1000, seed=7)
    assert all(np.array_equal(a, b) for a, b in zip(draws, again, strict=True))
    assert not np.array_equal(draws[0], draw_resamples([4, 2], num_resamples=1000, seed=8)[0])


def test_draws_are_the_frozen_stream() -> None:
    """A result's interval must come out the same elsewhere: these numbers may never change."""
    draws = draw_resamples([4, 2], num_resamples=2, seed=0)
    assert draws[0].tolist() == [[0, 3, 1, 0], [3, 3, 3, 3]]
    assert draws[1].tolist() == [[1, 1], [1, 0]]


def test_spread_of_a_mean_of_two_categories() -> None:
    """Cells of ((1, 5) mean 3, (2, 3, 4) mean 3) / 2: s^2 = 8 and 1, over 4 for the two halves."""
    spread = measure_spread([column(-2, 2) / 2, column(-1, 0, 1) / 2])
    assert spread is not None
    parts = (8 / 4 / 2, 1 / 4 / 3)
    assert spread.variance == pytest.approx(sum(parts), rel=1e-14)
    satterthwaite = sum(parts) ** 2 / (parts[0] ** 2 / 1 + parts[1] ** 2 / 2)
    assert spread.degrees_of_freedom == pytest.approx(satterthwaite, rel=1e-14)
    assert spread.blocks == 0.0


def test_equal_categories_add_their_degrees_of_freedom() -> None:
    spread = measure_spread([column(-1, 0, 1), column(-1, 0, 1), column(-1, 0, 1)])
    assert spread is not None
    assert spread.degrees_of_freedom == pytest.approx(6.0)


def test_a_lone_prompt_is_given_the_average_variance() -> None:
    spread = measure_spread([column(-1, 1), column(-2, 0, 2), column(0)])
    assert spread is not None
    pooled = (2 + 8) / (1 + 2)
    assert spread.prompts == pytest.approx(2 / 2 + 4 / 3, rel=1e-14)
    assert spread.lone == pytest.approx(pooled, rel=1e-14)
    assert spread.freedom_of_lone == 3
    # Student's for the average of three degrees of freedom, 3.1824, beside a given quantile
    wide = Spread(prompts=1.0, freedom_of_prompts=9, lone=2.0, freedom_of_lone=3)
    assert half_width(wide, confidence=0.95, quantile=2.0) == pytest.approx(
        math.sqrt(4 + 2 * 3.1824463053**2)
    )


def test_a_lone_prompt_of_a_small_weight_adds_little() -> None:
    """Weights as a pooled median has them: 2, 3 and 1 of six prompts."""
    weights = [2 / 6, 3 / 6, 1 / 6]
    cells = [column(-1, 1) * 2 / 6, column(-2, 0, 2) * 3 / 6, column(1) / 6]
    spread = measure_spread(cells, weights)
    assert spread is not None
    assert spread.lone == pytest.approx((2 + 8) / 3 / 36, rel=1e-14)


def test_no_category_of_two_has_no_spread() -> None:
    assert measure_spread([column(0), column(0)]) is None
    assert measure_spread([]) is None
    assert measure_spread([np.empty((0, 1)), column(0)]) is None


def test_blocks_by_hand() -> None:
    """Two prompts, three blocks: block shifts of -1, 0 and 1 and nothing else."""
    cells = [np.array([[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]])]
    spread = measure_spread(cells)
    assert spread is not None
    assert spread.prompts == 0.0
    assert spread.blocks == pytest.approx(1 / 3)  # s^2 = 1 over three blocks
    assert spread.degrees_of_freedom == pytest.approx(2.0)


def test_noise_of_prompts_is_not_counted_as_the_blocks() -> None:
    """Independent noise in every cell: prompts + blocks is the mean's variance, not twice it."""
    random = np.random.RandomState(1)
    found = [
        measure_spread([random.normal(0, 1, (20, 8)), random.normal(0, 1, (20, 8))])
        for _ in range(400)
    ]
    mean = np.mean([spread.prompts for spread in found if spread])
    assert mean == pytest.approx(2 / 160, rel=0.05)
    extra = np.mean([spread.blocks for spread in found if spread])
    assert extra < 0.45 * mean  # cut at 0, so not 0 on average


def test_few_blocks_keep_the_noise_in_theirs() -> None:
    """A difference of two blocks is no estimate of anything less noisy."""
    random = np.random.RandomState(3)
    cells = random.normal(0, 1, (20, 2))
    cells -= cells.mean()
    spread = measure_spread([cells])
    assert spread is not None
    assert spread.blocks == pytest.approx(cells.mean(axis=0).var(ddof=1) / 2)


def test_half_width() -> None:
    spread = Spread(prompts=4.0, freedom_of_prompts=8)
    assert half_width(spread, confidence=0.95) == pytest.approx(2 * 2.3060041350)
    assert half_width(spread, confidence=0.95, quantile=3.0) == pytest.approx(6.0)


def test_blocks_add_their_own_students() -> None:
    """Three blocks: two degrees of freedom, 4.3027."""
    spread = Spread(prompts=3.0, freedom_of_prompts=30, blocks=1.0, num_blocks=3)
    expected = math.sqrt(3 * 3.0**2 + 4.3026527299**2)
    assert half_width(spread, confidence=0.95, quantile=3.0) == pytest.approx(expected)
    assert spread.degrees_of_freedom == pytest.approx(16 / (9 / 30 + 1 / 2))


def test_too_few_degrees_of_freedom_have_no_interval() -> None:
    few = MIN_DEGREES_OF_FREEDOM - 0.01
    assert half_width(Spread(prompts=1.0, freedom_of_prompts=few), confidence=0.95) is None


def test_prompts_that_happen_to_be_alike_need_as_many() -> None:
    two = measure_spread([column(0, 0), column(0, 0)])
    assert two is not None
    assert half_width(two, confidence=0.95) is None
    six = measure_spread([column(0, 0, 0), column(0, 0, 0)])
    assert six is not None
    assert half_width(six, confidence=0.95) == 0.0


def test_rounding_is_no_spread() -> None:
    spread = measure_spread([column(1e-17, -1e-17, 0, 0, 0, 0)])
    assert spread is not None
    assert (spread.prompts, spread.freedom_of_prompts) == (0.0, 5.0)


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0, rel=1e-15)
