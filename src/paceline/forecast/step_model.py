"""Step time as a sum of kinds of work, each with its own measured cost.

The costs come from runs of the real engine on the real shape (fit.py) and hold for the machine and
the targets that were measured, nothing else: with one target the costs that never vary cannot be
told apart, so the model refuses any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, ResultError
from paceline.forecast.work import StepWork
from paceline.records import read_json, write_json

__all__ = ["FEATURES", "StepModel", "list_features", "read_step_model", "write_step_model"]

_FORMAT = "paceline-step-model/1"
# name -> (unit of its cost, what it counts); in the order of list_features
FEATURES = {
    "target_gb": ("ms per GB", "weights that the verification reads"),
    "cache_gb": ("ms per GB", "the target's keys, values and states"),
    "draft_gb": ("ms per GB", "the draft's weights, keys and values, all passes"),
    "head_gb": ("ms per GB", "the draft's output matrices, all reads"),
    "wide_gb": ("ms per GB and token", "the target's weights, once for each drafted token"),
    "wide_states": ("ms per layer and token", "recurrent layers, once for each drafted token"),
    "target_layers": ("ms per layer", "launches of the target"),
    "draft_layers": ("ms per layer", "launches of the draft's layers, all passes"),
    "draft_passes": ("ms per pass", "starting a pass of the draft and choosing its token"),
    "speculation": ("ms per step", "checking the draft, whatever K"),
    "step": ("ms per step", "everything that every step costs"),
}


def list_features(work: StepWork) -> tuple[float, ...]:
    """Amounts of work in the order of FEATURES."""
    return (
        work.target_bytes / 1e9,
        work.cache_bytes / 1e9,
        work.pass_bytes / 1e9,
        work.head_bytes / 1e9,
        work.num_drafted * work.target_bytes / 1e9,
        float(work.num_drafted * work.num_state_layers),
        float(work.num_layers),
        float(work.num_draft_layers),
        float(work.num_passes),
        1.0 if work.num_drafted else 0.0,
        1.0,
    )


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """costs: by FEATURES, in ms a unit, none negative. machine, targets: what was measured.

    num_points, num_configurations: what it was fitted to. fit_median, fit_worst: relative errors
    on those; held_out_median, held_out_worst: on configurations left out of the fit one at a time,
    None where there were too few. max_k, max_tokens: the edges of what was measured.
    """

    costs: dict[str, float]
    machine: str
    targets: tuple[str, ...]
    num_points: int
    num_configurations: int
    fit_median: float
    fit_worst: float
    held_out_median: float | None
    held_out_worst: float | None
    max_k: int
    max_tokens: int
    provenance: dict[str, Any]

    def predict(self, work: StepWork) -> float:
        """Milliseconds of one step."""
        costs = self.costs.values()
        return math.fsum(c * amount for c, amount in zip(costs, list_features(work), strict=True))

    def require_target(self, name: str) -> None:
        """Raises PlanError for a target that was not measured."""
        if name not in self.targets:
            raise PlanError(
                f"the step-time model knows nothing of {name}",
                where="--step-model",
                expected=f"one of {', '.join(self.targets)}, measured on {self.machine}",
                fix="Measure this target with --measure, or leave --step-model out.",
            )

    def describe(self) -> str:
        """One line: what it was fitted to and how wrong it is."""
        error = "held-out error not measured (too few configurations)"
        if self.held_out_median is not None and self.held_out_worst is not None:
            error = (
                f"off by {self.held_out_median:.1%} (median) and {self.held_out_worst:.1%} (worst)"
                " on configurations it had not seen"
            )
        return (
            f"fitted to {self.num_points} points of {self.num_configurations} configurations on"
            f" {self.machine}, K up to {self.max_k}, {self.max_tokens:,} tokens; {error}"
        )


def write_step_model(path: str | Path, model: StepModel) -> None:
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    write_json(path, {"format": _FORMAT, **fields, "targets": list(model.targets)})


def read_step_model(path: str | Path) -> StepModel:
    """Raises ResultError for a file that is none, or of another form."""
    record = read_json(path, expected="a file that `paceline forecast --fit` wrote")
    if record.pop("format", None) != _FORMAT:
        raise ResultError("is no step-time model", where=str(path), expected=f"format {_FORMAT}")
    names = list(StepModel.__dataclass_fields__)
    if sorted(record) != sorted(names):
        odd = sorted(set(record) ^ set(names))
        raise ResultError(
            f"key '{odd[0]}' is missing or unknown", where=str(path), expected=", ".join(names)
        )
    costs = record["costs"]
    numbers = isinstance(costs, dict) and all(
        isinstance(cost, int | float) and not isinstance(cost, bool) and cost >= 0
        for cost in costs.values()
    )
    if not numbers or list(costs) != list(FEATURES):
        raise ResultError(
            "costs are not those of this version",
            where=f"{path}: costs",
            expected=f"a number from 0 upwards for each of {', '.join(FEATURES)}",
            fix="Fit it again with --fit.",
        )
    return StepModel(**{**record, "targets": tuple(record["targets"])})
