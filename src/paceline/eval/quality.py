"""Quality by question: what became of each answer, and what an optimised target lost.

Four outcomes. *right* and *wrong* are finished answers that could be read; *broken* is a finished
one that could not (no choice in it, or nothing after the thought); *cut* ran into max_tokens. A cut
answer says nothing: shares are bounded by counting it once as wrong, once as right.

The same questions go to both, so the difference is paired: with b questions that only the target
got right and c that only the optimised one did, it is (c - b) / n. Its interval is Agresti and
Min's (half a question added to each cell of the table), its test McNemar's exact one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.eval.statistics import t_quantile

__all__ = [
    "OUTCOMES",
    "Outcome",
    "PairedLoss",
    "Tally",
    "measure_paired_loss",
    "tally_outcomes",
    "wilson_interval",
]

Outcome = Literal["right", "wrong", "broken", "cut"]
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "broken", "cut")


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Outcomes of one arm on one task."""

    right: int
    wrong: int
    broken: int
    cut: int

    @property
    def num_questions(self) -> int:
        return self.right + self.wrong + self.broken + self.cut

    @property
    def num_finished(self) -> int:
        return self.right + self.wrong + self.broken

    @property
    def accuracy(self) -> float | None:
        """Right answers of the finished ones; None where none finished."""
        return self.right / self.num_finished if self.num_finished else None

    @property
    def lowest(self) -> float:
        """Share of right answers if every cut one were wrong."""
        return self.right / self.num_questions

    @property
    def highest(self) -> float:
        """Share of right answers if every cut one were right."""
        return (self.right + self.cut) / self.num_questions

    @property
    def broken_share(self) -> float | None:
        """Of the finished answers; None where none finished."""
        return self.broken / self.num_finished if self.num_finished else None


@dataclass(frozen=True, kw_only=True)
class PairedLoss:
    """How the optimised target differs from the plain one over the questions both finished.

    only_plain, only_arm: questions that one alone got right. difference: (only_arm - only_plain) /
    num_pairs, with its interval; None without pairs. p_value: McNemar's exact, two-sided.
    lowest, highest: the difference over all questions with cut answers counted against the arm, and
    for it.
    """

    num_pairs: int
    num_cut: int
    only_plain: int
    only_arm: int
    difference: float | None
    low: float | None
    high: float | None
    p_value: float | None
    lowest: float
    highest: float


def tally_outcomes(outcomes: Sequence[Outcome]) -> Tally:
    counts = Counter(outcomes)
    return Tally(
        right=counts["right"], wrong=counts["wrong"], broken=counts["broken"], cut=counts["cut"]
    )


def wilson_interval(right: int, total: int, *, confidence: float) -> tuple[float, float] | None:
    """Wilson's interval of a share; None for no questions at all."""
    if total == 0:
        return None
    z = _normal_quantile(confidence)
    share = right / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def measure_paired_loss(
    plain: Mapping[str, Outcome], arm: Mapping[str, Outcome], *, confidence: float
) -> PairedLoss:
    """Question id -> outcome of the unoptimised target and of the arm; the same questions.

    A broken answer is not right, like a wrong one; a pair with a cut answer is set aside.
    """
    assert plain.keys() == arm.keys(), "the same questions go to both"
    assert plain, "there are questions"
    pairs = [(plain[key], arm[key]) for key in plain]
    finished = [pair for pair in pairs if "cut" not in pair]
    only_plain = sum(one == "right" != other for one, other in finished)
    only_arm = sum(other == "right" != one for one, other in finished)
    against = sum((other == "right") - (one in ("right", "cut")) for one, other in pairs)
    in_favour = sum((other in ("right", "cut")) - (one == "right") for one, other in pairs)
    interval = _agresti_min(only_plain, only_arm, len(finished), confidence=confidence)
    return PairedLoss(
        num_pairs=len(finished),
        num_cut=len(pairs) - len(finished),
        only_plain=only_plain,
        only_arm=only_arm,
        difference=(only_arm - only_plain) / len(finished) if finished else None,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        p_value=_mcnemar(only_plain, only_arm) if finished else None,
        lowest=against / len(pairs),
        highest=in_favour / len(pairs),
    )


def _agresti_min(b: int, c: int, total: int, *, confidence: float) -> tuple[float, float] | None:
    """Agresti and Min (2005): Wald's interval with 1/2 added to each of the four cells."""
    if total == 0:
        return None
    more_b, more_c, more = b + 0.5, c + 0.5, total + 2.0
    centre = (more_c - more_b) / more
    variance = (more_b + more_c - (more_c - more_b) ** 2 / more) / more**2
    half = _normal_quantile(confidence) * math.sqrt(variance)
    return max(-1.0, centre - half), min(1.0, centre + half)


def _mcnemar(b: int, c: int) -> float:
    """Twice the binomial tail of the rarer of the two at 1/2, at most 1."""
    total, rarer = b + c, min(b, c)
    tail = sum(math.comb(total, count) for count in range(rarer + 1))
    share: float = 2 * tail / 2**total
    return min(1.0, share)  # whole numbers: no overflow for thousands of questions


def _normal_quantile(confidence: float) -> float:
    return t_quantile((1 + confidence) / 2, math.inf)
