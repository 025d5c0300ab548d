"""A plan of runs by shape: which designs, at which acceptance and context lengths, and how long."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, RecipeError
from paceline.forecast.design import Design, build_design
from paceline.forecast.shape import TargetShape
from paceline.problems import show_value

__all__ = [
    "Configuration",
    "MeasurePlan",
    "assume_length",
    "build_measure_plan",
    "read_measure_plan",
]

_KEYS = ("lengths", "num_repeats", "max_tokens", "reference", "configurations", "target")
_MIN_MODEL_LEN = 2048
_OWN = ("name", "acceptance_length", "minutes")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One engine. settings: as a DESIGN.toml states them; design: filled in, None for the target
    alone. minutes: an estimate of what it takes on the GPU that the plan was written for."""

    name: str
    settings: dict[str, Any]
    design: Design | None
    acceptance_length: float | None
    minutes: float | None


@dataclass(frozen=True, kw_only=True)
class MeasurePlan:
    """lengths: prompt tokens. num_repeats: pairs at each length; max_tokens: of each answer.
    reference: the engine that runs beside every other, in turn."""

    lengths: tuple[int, ...]
    num_repeats: int
    max_tokens: int
    reference: Configuration
    configurations: tuple[Configuration, ...]

    @property
    def max_model_len(self) -> int:
        """Room for the longest request, and never less than a block of the cache: an engine whose
        longest sequence is shorter than one counts its pool in another way."""
        return max(_MIN_MODEL_LEN, max(self.lengths) + self.max_tokens + 32)

    def without_decree(self) -> MeasurePlan:
        """The same plan for an engine that cannot be told what to accept: vLLM's CPU build."""
        return dataclasses.replace(
            self,
            reference=dataclasses.replace(self.reference, acceptance_length=None),
            configurations=tuple(
                dataclasses.replace(one, acceptance_length=None) for one in self.configurations
            ),
        )


def assume_length(num_speculative_tokens: int) -> float:
    """An acceptance length where none is stated: 1 + 0.6 K, at most 2.8. Step time hardly depends
    on it; it is the number of tokens a step that do."""
    return min(2.8, 1 + 0.6 * num_speculative_tokens)


def build_measure_plan(
    designs: Sequence[tuple[str, Design]],
    reference: Design | None,
    *,
    lengths: Sequence[int],
    num_repeats: int,
    max_tokens: int,
) -> MeasurePlan:
    """The target alone and each design beside the reference. Raises PlanError for sizes that give
    no figure, or a target without a reference."""
    if reference is None:
        raise PlanError(
            "the target has no MTP head to measure against",
            expected="a target with one, or a plan file with [reference]",
        )
    plan = MeasurePlan(
        lengths=tuple(lengths),
        num_repeats=num_repeats,
        max_tokens=max_tokens,
        reference=_from_design("baseline", reference),
        configurations=(
            Configuration(
                name="plain", settings={}, design=None, acceptance_length=None, minutes=None
            ),
            *(_from_design(name, design) for name, design in designs),
        ),
    )
    _check(plan, "--lengths, --repeats, --max-tokens")
    return plan


def read_measure_plan(path: str | Path, shape: TargetShape) -> MeasurePlan:
    """Reads PLAN.toml. Raises RecipeError for a key or value that means nothing, PlanError for a
    design that cannot be or another target than the plan's."""
    where = str(path)
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "is not UTF-8 text"
        raise RecipeError(f"the plan cannot be read: {why}", where=where) from None
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise RecipeError(f"is not valid TOML: {problem}", where=where) from None
    for key in table:
        if key not in _KEYS:
            raise RecipeError(
                f"key '{show_value(key)}' is unknown", where=where, expected=", ".join(_KEYS)
            )
    for key in _KEYS:
        if key not in table:
            raise RecipeError(f"key '{key}' is missing", where=where)
    if table["target"] != shape.facts.name:
        raise PlanError(
            f"the plan is for {show_value(table['target'])}",
            where=where,
            expected=f"--target {show_value(table['target'])}, or a plan for {shape.facts.name}",
        )
    lengths, listed = table["lengths"], table["configurations"]
    if not isinstance(lengths, list) or not isinstance(listed, list):
        raise RecipeError("lengths and configurations are lists", where=where)
    plan = MeasurePlan(
        lengths=tuple(_whole(length, f"{where}: lengths") for length in lengths),
        num_repeats=_whole(table["num_repeats"], f"{where}: num_repeats"),
        max_tokens=_whole(table["max_tokens"], f"{where}: max_tokens"),
        reference=_from_table(table["reference"], shape, f"{where}: reference"),
        configurations=tuple(
            _from_table(one, shape, f"{where}: configurations {number}")
            for number, one in enumerate(listed, 1)
        ),
    )
    if plan.reference.design is None:
        raise RecipeError("the reference is the target alone", where=where, expected="a design")
    names = [one.name for one in (plan.reference, *plan.configurations)]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"two configurations are called {show_value(name)}", where=where)
    _check(plan, where)
    return plan


def _check(plan: MeasurePlan, where: str) -> None:
    good = plan.lengths and all(1 <= n <= 1_000_000 for n in plan.lengths)
    if not good or plan.num_repeats < 2 or plan.max_tokens < 8:
        raise PlanError(
            f"lengths {list(plan.lengths)}, {plan.num_repeats} repeats, {plan.max_tokens} tokens",
            where=where,
            expected="lengths from 1, at least 2 repeats for an interval, at least 8 tokens",
        )


def _whole(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RecipeError(f"is {show_value(value)}", where=where, expected="a whole number from 1")
    return value


def _from_design(name: str, design: Design) -> Configuration:
    names = {"kv_dtype": {"bfloat16": "bf16", "fp8": "fp8"}.get(design.kv_dtype, "bf16")}
    stated = {key: names.get(key, getattr(design, key)) for key in design.stated}
    return Configuration(
        name=name,
        settings={"family": design.family, **stated},
        design=design,
        acceptance_length=assume_length(design.num_speculative_tokens),
        minutes=None,
    )


def _from_table(table: object, shape: TargetShape, where: str) -> Configuration:
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise RecipeError("has no name", where=where, expected="name, and a design's settings")
    settings = {key: value for key, value in table.items() if key not in _OWN}
    minutes, length = table.get("minutes"), table.get("acceptance_length")
    for key, value in (("minutes", minutes), ("acceptance_length", length)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (not is_number or value <= 0):
            raise RecipeError(f"{key} is {show_value(value)}", where=where, expected="above 0")
    if not settings:
        if length is not None:
            raise RecipeError("acceptance_length has no effect without a draft", where=where)
        return Configuration(
            name=table["name"], settings={}, design=None, acceptance_length=None, minutes=minutes
        )
    design = build_design(settings, shape, where=where)
    k = design.num_speculative_tokens
    length = assume_length(k) if length is None else float(length)
    if not 1 <= length <= k + 1:
        raise RecipeError(f"acceptance_length is {length:g}", where=where, expected=f"1 to {k + 1}")
    return Configuration(
        name=table["name"],
        settings=settings,
        design=design,
        acceptance_length=length,
        minutes=minutes,
    )
