"""Step time as a sum of kinds of work, each with its own measured cost.

The costs come from runs of the real engine on the real shape (fit.py) and hold for the machine and
the targets that were measured, nothing else: with one target the costs that never vary cannot be
told apart, so the model refuses any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, ResultError
from paceline.forecast.work import StepWork
from paceline.records import read_json, write_json

__all__ = [
    "FEATURES",
    "StepModel",
    "list_features",
    "list_step_models",
    "read_step_model",
    "write_step_model",
]

_FORMAT = "paceline-step-model/2"
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
    "eager_layers": ("ms per layer", "a draft model's layers without a CUDA graph, all passes"),
    "eager_passes": ("ms per pass", "a draft model's passes without a CUDA graph"),
    "waiting": ("ms per step", "a runner that waits for the device in every step"),
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
        float(work.num_eager_layers),
        float(work.num_eager_passes),
        float(work.waits),
        1.0 if work.num_drafted else 0.0,
        1.0,
    )


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """costs: by FEATURES, in ms a unit, none negative. machine, targets: what was measured.

    num_points, num_configurations: what it was fitted to. fit_median, fit_worst: relative errors
    on those; held_out_median, held_out_worst: on configurations left out of the fit one at a time,
    None where there were too few; held_out: the same by target. max_k, max_tokens: the edges of
    what was measured.
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
    held_out: dict[str, tuple[float, float]]
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

    def errors(self, target: str | None = None) -> tuple[float, float] | None:
        """Relative error (median, worst) on configurations left out of the fit; of one target, or
        of all. None where there were too few."""
        if self.held_out_median is None or self.held_out_worst is None:
            return None
        return self.held_out.get(target or "", (self.held_out_median, self.held_out_worst))

    def describe(self, target: str | None = None) -> str:
        """One line: what it was fitted to and how wrong it is. target: on that one alone."""
        error = "held-out error not measured (too few configurations)"
        if (errors := self.errors(target)) is not None:
            error = "off by {:.1%} (median) and {:.1%} (worst) on configurations".format(*errors)
            error += " it had not seen" + (f" of {target}" if target in self.held_out else "")
        return (
            f"fitted to {self.num_points} points of {self.num_configurations} configurations on"
            f" {self.machine}, K up to {self.max_k}, {self.max_tokens:,} tokens; {error}"
        )


def write_step_model(path: str | Path, model: StepModel) -> None:
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    write_json(path, {"format": _FORMAT, **fields, "targets": list(model.targets)})


def list_step_models() -> list[str]:
    """Names of the bundled models: the machine that was measured."""
    folder = resources.files("paceline.forecast") / "step_models"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir())


def read_step_model(path: str | Path) -> StepModel:
    """A bundled model by name, else a file. Raises ResultError for one that is none, or of another
    form."""
    name = str(path)
    if name in list_step_models() and not Path(path).is_file():
        bundled = resources.files("paceline.forecast") / "step_models" / f"{name}.json"
        with resources.as_file(bundled) as file:
            return read_step_model(file)
    record = read_json(
        path,
        expected=f"a file that `paceline forecast --fit` wrote, or {', '.join(list_step_models())}",
    )
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
    held_out = {name: tuple(errors) for name, errors in record["held_out"].items()}
    return StepModel(**{**record, "targets": tuple(record["targets"]), "held_out": held_out})
