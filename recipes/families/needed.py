"""What a score asks for: the ratio of acceptance lengths, by the ratio of step times.

    python recipes/families/needed.py pocket --score 150

A draft's time per token falls with its acceptance length, so two of the three terms move together.
With a = acceptance length over the baseline's and s = the baseline's step time over the draft's (a
step: one verification and K drafted tokens), time per token improves by a * s, and

    score = 100 * (w_tau * a + w_memory * m + w_time * min(a * s, cap)),   m at its cap at most

All of it is computed by the rules' own file and `paceline.rules.compute_score`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.rules import Rules, compute_score, read_rules

__all__ = ["find_needed", "needed_lines", "term_lines"]

STEP_RATIOS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
_MOST = 100.0


def find_needed(rules: Rules, score: float, *, step_ratio: float, memory_ratio: float) -> float:
    """The least ratio of acceptance lengths that reaches the score, by halving."""
    low, high = 0.0, _MOST
    for _ in range(60):
        middle = (low + high) / 2
        value = compute_score(
            rules, tau_ratio=middle, memory_ratio=memory_ratio, tpot_ratio=middle * step_ratio
        ).value
        low, high = (middle, high) if value < score else (low, middle)
    return high


def needed_lines(
    rules: Rules, scores: Sequence[float], *, baseline_length: float | None
) -> list[str]:
    """A table: for each step-time ratio the acceptance each score needs, memory at its cap."""
    memory, k = rules.caps["memory"], int(rules.speculation.entry_num_speculative_tokens)
    assert memory is not None  # no rules of ours leave it open
    heads = ["step time, baseline's ÷ draft's", *(f"for {score:g}" for score in scores)]
    lines = [_row(heads), _row(["---:"] * len(heads))]
    for step_ratio in STEP_RATIOS:
        cells = [f"{step_ratio:g}"]
        for score in scores:
            ratio = find_needed(rules, score, step_ratio=step_ratio, memory_ratio=memory)
            cell = f"{ratio:.3f}"
            if baseline_length is not None:
                length = ratio * baseline_length
                cell += f" ({length:.2f})" if length <= k + 1 else f" ({length:.2f}: cannot be)"
            cells.append(cell)
        lines.append(_row(cells))
    return lines


def term_lines(terms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What each term of a measured score gave."""
    lines = [
        "| term | weight | ratio | counted as | points |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, term in terms.items():
        cells = [name, f"{term['weight']:.2f}", f"{term['ratio']:.3f}"]
        lines.append(_row([*cells, f"{term['capped_ratio']:.3f}", f"{term['points']:.1f}"]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rules")
    parser.add_argument("--score", type=float, action="append", help="one or more; 140 and 150")
    parser.add_argument("--baseline-length", type=float, help="its acceptance length, for lengths")
    args = parser.parse_args()
    scores = args.score or [140.0, 150.0]
    rules = read_rules(args.rules)
    print("\n".join(needed_lines(rules, scores, baseline_length=args.baseline_length)))


if __name__ == "__main__":
    main()
