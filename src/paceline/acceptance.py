"""Acceptance arithmetic, standard library only. Terms: docs/structure.md; cases: U33 of the tests.

A *step* is one target verify pass. `acceptance_length` includes the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ResultError

__all__ = [
    "Acceptance",
    "accept_greedy",
    "bench_tau",
    "build_acceptance",
    "conditional_acceptance",
    "count_decode_steps",
    "marginal_acceptance_length",
]


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Sums over drafting steps. Ratios are None ("not measured") without a step, never 1.0 or 0."""

    num_steps: int
    num_drafted: int
    num_accepted: int
    accepted_at: tuple[int, ...]  # accepted_at[i]: steps whose first i+1 drafted tokens held

    @property
    def acceptance_length(self) -> float | None:
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def accepted_per_step(self) -> float | None:
        return self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def position_acceptance(self) -> tuple[float, ...]:
        return tuple(n / self.num_steps for n in self.accepted_at) if self.num_steps else ()

    def __add__(self, other: Acceptance) -> Acceptance:
        width = max(len(self.accepted_at), len(other.accepted_at))
        mine = self.accepted_at + (0,) * (width - len(self.accepted_at))
        theirs = other.accepted_at + (0,) * (width - len(other.accepted_at))
        return Acceptance(
            num_steps=self.num_steps + other.num_steps,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
            accepted_at=tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )


def build_acceptance(
    accepted: Sequence[int], drafted: Sequence[int], *, num_speculative_tokens: int
) -> Acceptance:
    """Sums per-step counts. accepted[i] of drafted[i] tokens held in drafting step i."""
    if len(accepted) != len(drafted):
        raise ResultError(
            f"{len(accepted)} accepted counts but {len(drafted)} drafted counts",
            expected="one of each a step",
        )
    for step, (took, offered) in enumerate(zip(accepted, drafted, strict=True)):
        if not 0 <= took <= offered <= num_speculative_tokens:
            raise ResultError(
                f"step {step} accepted {took} of {offered} drafted tokens",
                expected=f"0 <= accepted <= drafted <= K = {num_speculative_tokens}",
            )
    return Acceptance(
        num_steps=len(accepted),
        num_drafted=sum(drafted),
        num_accepted=sum(accepted),
        accepted_at=tuple(
            sum(1 for took in accepted if took > position)
            for position in range(num_speculative_tokens)
        ),
    )


def conditional_acceptance(position_acceptance: Sequence[float]) -> tuple[float | None, ...]:
    """Position i given that all earlier held. The first is the marginal itself."""
    result: list[float | None] = []
    previous = 1.0
    for value in position_acceptance:
        result.append(value / previous if previous > 0 else None)
        previous = value
    return tuple(result)


def marginal_acceptance_length(position_acceptance: Sequence[float]) -> float:
    """1 + sum of position acceptance (vLLM's per-position rates are unconditional)."""
    return 1.0 + sum(position_acceptance)


def count_decode_steps(*, num_output_tokens: int, accepted: Sequence[int]) -> int:
    """Target decode passes behind one answer, steps without a draft included.

    The first token comes from prefill. Each drafting step yields accepted+1 tokens (the last may
    be cut by a stop or the limit); each step without a draft yields one.
    """
    delivered = num_output_tokens - 1
    return len(accepted) + max(0, delivered - sum(took + 1 for took in accepted))


def bench_tau(output_lens: Sequence[int], chunk_gaps: Sequence[Sequence[float]]) -> float | None:
    """tau of one category from `vllm bench serve --save-detailed` ("output_lens" and "itls").

    That tool's acceptance length knows drafting steps only and counts tokens past a stop. At one
    request at a time and a stream interval of 1 every chunk after the first is one decode step,
    with or without a draft, so its own lists hold what is missing: (tokens - 1) / gaps, summed.
    """
    if len(output_lens) != len(chunk_gaps):
        raise ResultError(
            f"{len(output_lens)} output_lens but {len(chunk_gaps)} itls", expected="one a request"
        )
    steps = sum(len(gaps) for gaps in chunk_gaps)
    return sum(length - 1 for length in output_lens) / steps if steps else None


def accept_greedy(draft: Sequence[int], target: Sequence[int]) -> int:
    """How many leading draft tokens equal the target's own greedy tokens."""
    count = 0
    for guessed, right in zip(draft, target, strict=False):
        if guessed != right:
            break
        count += 1
    return count
