"""Quantiles against published tables, draws against a plain loop, coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.eval.statistics import draw_resamples, geometric_mean, interval, t_quantile


@pytest.mark.parametrize(
    ("probability", "df", "value"),
    [
        (0.975, 1, 12.7062047362),
        (0.975, 8, 2.3060041350),
        (0.95, 30, 1.6972608866),
        (0.975, 312, 1.9675964974),
        (0.5, 5, 0.0),
    ],
)
def test_t_quantile(probability: float, df: int, value: float) -> None:
    assert t_quantile(probability, df) == pytest.approx(value, abs=1e-8)
    assert t_quantile(1 - probability, df) == pytest.approx(-value, abs=1e-8)


def test_draws_are_seeded_and_one_short() -> None:
    draws = draw_resamples([4, 2], num_resamples=1000, seed=7)
    assert [d.shape for d in draws] == [(1000, 3), (1000, 1)]
    assert set(np.unique(draws[0])) == {0, 1, 2, 3}
    again = draw_resamples([4, 2], num_resamples=1000, seed=7)
    assert all(np.array_equal(a, b) for a, b in zip(draws, again, strict=True))
    assert not np.array_equal(draws[0], draw_resamples([4, 2], num_resamples=1000, seed=8)[0])


def test_draws_are_the_frozen_stream() -> None:
    """A result's interval must come out the same elsewhere: these numbers may never change."""
    draws = draw_resamples([5, 3], num_resamples=2, seed=0)
    assert draws[0].tolist() == [[4, 0, 3, 3], [3, 1, 3, 2]]
    assert draws[1].tolist() == [[0, 2], [0, 0]]


def test_variance_of_a_mean_is_unbiased_in_small_groups() -> None:
    """Two groups of two: var(mean) by the textbook is mean of s^2/n over groups squared."""
    values = [np.array([1.0, 5.0]), np.array([2.0, 3.0])]
    draws = draw_resamples([2, 2], num_resamples=40000, seed=1)
    means = (values[0][draws[0]].mean(axis=1) + values[1][draws[1]].mean(axis=1)) / 2
    expected = (np.var(values[0], ddof=1) / 2 + np.var(values[1], ddof=1) / 2) / 4
    assert np.var(means) == pytest.approx(expected, rel=0.02)


def test_interval_is_the_widened_percentile() -> None:
    replicates = np.arange(100001) / 100000  # quantile q is q itself
    low, high = interval(replicates, confidence=0.95, degrees_of_freedom=8)
    # normal cdf at -2.3060041 is 0.010555; the plain percentile would give 0.025
    tail = 0.5 * math.erfc(2.3060041350 / math.sqrt(2))
    assert (low, high) == pytest.approx((tail, 1 - tail), abs=1e-6)
    assert tail == pytest.approx(0.010555, abs=1e-5)


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0, rel=1e-15)


def test_coverage_is_sane_for_few_prompts() -> None:
    """Eight categories of three skewed prompts: a 95 % interval holds the truth about as often."""
    random = np.random.RandomState(3)
    centres = random.uniform(0.0, 0.3, size=8)
    truth, held = float(centres.mean()), 0
    num_runs = 400
    draws = draw_resamples([3] * 8, num_resamples=500, seed=0)
    for _ in range(num_runs):
        noise = random.exponential(0.2, size=(8, 3)) - 0.2
        data = centres[:, None] + noise
        replicates = np.mean([data[c][draws[c]].mean(axis=1) for c in range(8)], axis=0)
        low, high = interval(replicates, confidence=0.95, degrees_of_freedom=16)
        held += low <= truth <= high
    assert 0.91 <= held / num_runs <= 0.99
