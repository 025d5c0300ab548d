"""Distillation on the fixed grid: a quantised target's codes are trained to the plain one's logits.

What is trained is what is served: scales keep the values that are stored, codes stay whole numbers
of the grid, everything in 16 bits stays as it was. The loss is the KL divergence from the plain
target's distribution at every token of its own answers. Rows that are not trained on say whether it
helped; where they do not say so beyond chance, the rounded codes are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import PlanError
from paceline.quantize.calibration import CalibrationRow
from paceline.quantize.target_plan import TargetPlan
from paceline.quantize.target_price import student_interval

if TYPE_CHECKING:
    from paceline.quantize.target_layer import Quantized

__all__ = ["Distillation", "distill_target", "require_distillable"]


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """rows: trained on, batch_size a step. held_out: decide whether the result is taken.

    learning_rate: about the largest move of a code in one step of Adam, in steps of a 4-bit grid (a
    finer grid's are as much smaller), in a layer of 64 inputs; it falls with the inputs, which all
    move at once, rises over the first tenth of the steps and falls to zero over the rest.
    """

    rows: Sequence[CalibrationRow]
    held_out: Sequence[CalibrationRow]
    num_steps: int
    batch_size: int = 8
    learning_rate: float = 0.01
    seed: int = 0


def require_distillable(plan: TargetPlan) -> None:
    """Raises PlanError for a scheme without a grid of whole numbers."""
    if any(scheme.kind != "int" for scheme in plan.schemes.values()):
        raise PlanError(
            "distillation moves whole-number codes, and fp8 has none",
            where="--distill",
            expected="scheme w4a16, w8a16 or w8a8",
            fix="Leave --distill out.",
        )


def distill_target(
    plan: TargetPlan,
    start: Quantized,
    how: Distillation,
    *,
    where: str,
    device: str = "cpu",
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Quantized, dict[str, Any]]:
    """(the better of `start` and what it was trained to, what `quantized.json` says of it).

    where: the rows' file, for messages. Raises PlanError for schemes without whole-number codes,
    RecipeError where the loss is no number, and what loading the target raises.
    """
    from paceline.quantize.distill_run import run_distillation

    require_distillable(plan)
    run = run_distillation(plan, start, how, where=where, device=device, on_step=on_step)
    told = compare_divergences(run.before, run.after)
    moved = sum(
        int((weight.codes_RC.cpu() != start.weights[name].codes_RC.cpu()).sum())
        for name, weight in run.weights.items()
    )
    told |= {
        "num_steps": how.num_steps,
        "batch_size": how.batch_size,
        "learning_rate": how.learning_rate,
        "seed": how.seed,
        "num_rows": len(how.rows),
        "num_held_out": len(how.held_out),
        "loss_first": run.losses[0],
        "loss_last": run.losses[-1],
        "codes_moved": moved / sum(weight.codes_RC.numel() for weight in run.weights.values()),
    }
    return (replace(start, weights=run.weights) if told["kept"] else start), told


def compare_divergences(
    before: Sequence[tuple[float, int]], after: Sequence[tuple[float, int]]
) -> dict[str, Any]:
    """Of (sum in nats, tokens) of each held-out row: means a token, their difference with its
    interval over rows, and "kept": whether all of the interval is below zero."""
    counts = [count for _, count in before]
    total = sum(counts)
    changes = [new - old for (old, _), (new, _) in zip(before, after, strict=True)]
    mean = sum(changes) / total
    rests = [change - mean * count for change, count in zip(changes, counts, strict=True)]
    low, high = student_interval(mean, rests, total / len(counts))
    return {
        "kl_before": sum(value for value, _ in before) / total,
        "kl_after": sum(value for value, _ in after) / total,
        "change": mean,
        "change_low": low,
        "change_high": high,
        "kept": high is not None and high < 0,
    }
