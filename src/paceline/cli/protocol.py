"""What a run of several cycles, or of a draft against itself, asks for and leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import say
from paceline.errors import PlanError

if TYPE_CHECKING:
    from paceline.eval import Cycles
    from paceline.rules import Rules

__all__ = ["keep_floor", "require_protocol"]


def keep_floor(out: Path, rules: Rules) -> None:
    """Keeps what a draft differed from itself by as this machine's noise floor."""
    from paceline.eval import keep_noise_floor, measure_noise_floor
    from paceline.records import read_json

    floor = measure_noise_floor(read_json(out / "result.json"), rules)
    path = keep_noise_floor(floor)
    say(
        f"noise floor of this machine: {floor['score']:.2f} points of score, "
        f"{floor['tpot']:.2%} of time per token; kept in {path}"
    )


def require_protocol(baseline: str | None, cycles: Cycles | None, against_itself: bool) -> None:
    """Raises PlanError for options without effect on each other."""
    if against_itself and baseline is not None:
        raise PlanError(
            "--baseline has no effect with --noise-floor: the draft is its own baseline",
            fix="Leave one of them out.",
        )
    if cycles is not None and baseline is None and not against_itself:
        raise PlanError(
            "cycles of blocks need a second arm",
            expected="--baseline, or --noise-floor",
            fix="Leave --cycles out to measure one draft alone.",
        )
