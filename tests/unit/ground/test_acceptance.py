"""U33: acceptance arithmetic, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from paceline.acceptance import (
    Acceptance,
    accept_greedy,
    build_acceptance,
    conditional_acceptance,
    count_decode_steps,
    marginal_acceptance_length,
)
from paceline.errors import ResultError


def test_u33_bonus_is_in_the_length_only() -> None:
    taken = Acceptance(num_steps=100, num_drafted=300, num_accepted=150, accepted_at=(80, 50, 20))
    assert taken.acceptance_length == 2.5
    assert taken.accepted_per_step == 1.5
    assert taken.acceptance_rate == 0.5
    assert taken.position_acceptance == (0.8, 0.5, 0.2)


def test_u33_averages_over_steps_not_over_batches() -> None:
    first = build_acceptance([3, 1], [3, 3], num_speculative_tokens=3)
    second = build_acceptance([2, 0], [3, 3], num_speculative_tokens=3)
    both = first + second
    assert both.accepted_per_step == 1.5
    assert both.acceptance_length == 2.5
    assert both.accepted_at == (3, 2, 1)


def test_u33_marginals_and_conditionals() -> None:
    marginals = (0.7012, 0.3695, 0.2059, 0.1255, 0.0812)
    assert marginal_acceptance_length(marginals) == pytest.approx(2.4833, abs=5e-5)
    conditionals = conditional_acceptance(marginals)
    assert conditionals[0] == 0.7012
    assert conditionals[1:] == pytest.approx((0.527, 0.557, 0.610, 0.647), abs=5e-4)


def test_a_position_after_a_dead_one_has_no_conditional() -> None:
    assert conditional_acceptance((0.5, 0.0, 0.0)) == (0.5, 0.0, None)


def test_u33_no_steps_is_not_measured() -> None:
    nothing = build_acceptance([], [], num_speculative_tokens=3)
    assert nothing.acceptance_length is None
    assert nothing.accepted_per_step is None
    assert nothing.acceptance_rate is None
    assert nothing.position_acceptance == ()


@pytest.mark.parametrize(
    ("accepted", "drafted"), [([4], [4]), ([2], [1]), ([-1], [3]), ([1, 1], [3])]
)
def test_impossible_counts_are_refused(accepted: list[int], drafted: list[int]) -> None:
    with pytest.raises(ResultError):
        build_acceptance(accepted, drafted, num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("tokens", "accepted", "steps"),
    [
        (1, [], 0),  # the only token came from prefill
        (11, [3, 1, 2], 3 + 1),  # 10 later tokens: 9 from drafting steps, 1 from a plain step
        (10, [3, 1, 2], 3),
        (9, [3, 1, 2], 3),  # the last step was cut by the limit
        (5, [], 4),
    ],
)
def test_steps_without_a_draft_are_counted(tokens: int, accepted: list[int], steps: int) -> None:
    assert count_decode_steps(num_output_tokens=tokens, accepted=accepted) == steps


@pytest.mark.parametrize(
    ("draft", "target", "count"),
    [([1, 2, 3], [1, 2, 3, 9], 3), ([1, 5, 3], [1, 2, 3], 1), ([9], [1], 0), ([], [1], 0)],
)
def test_greedy_acceptance_stops_at_the_first_miss(
    draft: list[int], target: list[int], count: int
) -> None:
    assert accept_greedy(draft, target) == count
