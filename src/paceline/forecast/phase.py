"""REPORT.toml: the words of a team's report, and the record that a page is made of.

Phase 1 reports a draft before it is trained: every figure is a forecast. Phase 2 is the same source
with a run folder, whose figures then stand in place of the forecasts (report/phase_page.py).
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline.forecast.describe import describe_forecast
from paceline.forecast.design import native_baseline, read_design
from paceline.forecast.run import Forecast, build_forecast
from paceline.forecast.shape import CachePlan, TargetShape, read_shape
from paceline.forecast.step_model import StepModel, list_step_models, read_step_model
from paceline.forecast.steps import read_runs, shape_sha256
from paceline.problems import show_value
from paceline.records import build_provenance
from paceline.rules import Rules, compute_score, read_rules

__all__ = ["Phase", "build_phase_record", "read_phase"]

_FORMAT = "paceline-phase/1"
_TEXTS = ("title", "team", "target", "rules", "design", "summary")
_OPTIONAL = ("date", "step_model", "steps", "baseline_acceptance", "commands")
_TABLES = ("acceptance", "sections", "risks", "alternatives")
_CURVE_POINTS = 41


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The source as it stands. folder: paths in it are relative to it. acceptance: low, expected,
    high and why; alternatives: name, design and acceptance of designs that were weighed."""

    name: str
    folder: Path
    title: str
    team: str
    target: str
    rules: str
    design: str
    summary: str
    date: str
    step_model: str | None
    steps: str | None
    baseline_acceptance: float
    acceptance: dict[str, Any]
    sections: tuple[dict[str, str], ...]
    risks: tuple[dict[str, str], ...]
    alternatives: tuple[dict[str, Any], ...]
    commands: tuple[str, ...]


def read_phase(path: str | Path) -> Phase:
    """Raises RecipeError for a file that cannot be read, or a key or value that means nothing."""
    where = str(path)
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "is not UTF-8 text"
        raise RecipeError(f"the report cannot be read: {why}", where=where) from None
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise RecipeError(f"is not valid TOML: {problem}", where=where) from None
    known = (*_TEXTS, *_OPTIONAL, *_TABLES)
    for key in table:
        if key not in known:
            raise RecipeError(
                f"key '{show_value(key)}' is unknown", where=where, expected=", ".join(known)
            )
    for key in _TEXTS:
        _text(table.get(key), f"{where}: {key}")
    for key in ("date", "step_model", "steps"):
        if key in table:
            _text(table[key], f"{where}: {key}")
    commands = table.get("commands", [])
    if not isinstance(commands, list) or not all(isinstance(one, str) for one in commands):
        raise RecipeError("is no list of texts", where=f"{where}: commands")
    acceptance = table.get("acceptance")
    if not isinstance(acceptance, dict):
        raise RecipeError("is missing", where=f"{where}: acceptance", expected=_ACCEPTANCE)
    _acceptance(acceptance, f"{where}: acceptance")
    alternatives = _tables(table, "alternatives", ("name", "design"), where, ("acceptance",))
    for one in alternatives:
        _number(one.get("acceptance"), f"{where}: alternatives: acceptance")
    return Phase(
        name=where,
        folder=Path(path).parent,
        **{key: table[key] for key in _TEXTS},
        date=table.get("date", ""),
        step_model=table.get("step_model"),
        steps=table.get("steps"),
        baseline_acceptance=_number(
            table.get("baseline_acceptance", 2.8), f"{where}: baseline_acceptance"
        ),
        acceptance=acceptance,
        sections=_tables(table, "sections", ("title", "text"), where),
        risks=_tables(table, "risks", ("risk", "answer"), where),
        alternatives=alternatives,
        commands=tuple(commands),
    )


_ACCEPTANCE = "low, expected, high (acceptance lengths) and why"


def _acceptance(table: dict[str, Any], where: str) -> None:
    if sorted(table) != ["expected", "high", "low", "why"]:
        raise RecipeError(
            f"has keys {', '.join(sorted(table)) or 'none'}", where=where, expected=_ACCEPTANCE
        )
    _text(table["why"], f"{where}.why")
    values = [_number(table[key], f"{where}.{key}") for key in ("low", "expected", "high")]
    if sorted(values) != values:
        raise RecipeError("low, expected, high do not ascend", where=where)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        what = "is missing" if value is None else f"is {show_value(value)}"
        raise RecipeError(what, where=where, expected="text")
    return value


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value <= 65:
        what = "is missing" if value is None else f"is {show_value(value)}"
        raise RecipeError(what, where=where, expected="an acceptance length from 1")
    return float(value)


def _tables(
    table: dict[str, Any],
    key: str,
    texts: tuple[str, ...],
    where: str,
    others: tuple[str, ...] = (),
) -> tuple[dict[str, Any], ...]:
    listed = table.get(key, [])
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise RecipeError("is no list of tables", where=f"{where}: {key}", expected=f"[[{key}]]")
    for number, one in enumerate(listed, 1):
        here = f"{where}: {key} {number}"
        if sorted(one) != sorted((*texts, *others)):
            raise RecipeError(
                f"has keys {', '.join(sorted(one)) or 'none'}",
                where=here,
                expected=", ".join((*texts, *others)),
            )
        for name in texts:
            _text(one[name], f"{here}: {name}")
    return tuple(listed)


def build_phase_record(phase: Phase) -> dict[str, Any]:
    """Every figure of the report as plain values. Raises what reading and forecasting raise."""
    shape, rules = read_shape(phase.target), read_rules(phase.rules)
    model = None
    if phase.step_model:
        bundled = phase.step_model in list_step_models()
        model = read_step_model(phase.step_model if bundled else phase.folder / phase.step_model)
    forecast = _forecast(phase, phase.design, shape, rules, model)
    most = forecast.design.num_speculative_tokens + 1.0
    if phase.acceptance["high"] > most:
        raise RecipeError(
            f"an acceptance length of {phase.acceptance['high']:g} is expected at most",
            where=f"{phase.name}: acceptance.high",
            expected=f"up to {most:g}, K + 1",
        )
    errors = model.errors(shape.facts.name) if model is not None else None
    error = errors[1] if errors else 0.0
    scores = {
        "low": _score(forecast, rules, phase.acceptance["low"], 1 / (1 + error)),
        "expected": _score(forecast, rules, phase.acceptance["expected"], 1.0),
        "high": _score(forecast, rules, phase.acceptance["high"], 1 + error),
    }
    lengths = [1 + (most - 1) * i / (_CURVE_POINTS - 1) for i in range(_CURVE_POINTS)]
    return {
        "format": _FORMAT,
        "title": phase.title,
        "team": phase.team,
        "date": phase.date,
        "summary": phase.summary,
        "sections": list(phase.sections),
        "risks": list(phase.risks),
        "commands": list(phase.commands),
        "acceptance": dict(phase.acceptance),
        "baseline_acceptance": phase.baseline_acceptance,
        "forecast": forecast.to_json_dict(),
        "described": [[title, [list(line) for line in lines]] for title, lines in _tell(forecast)],
        "score": {name: score["value"] for name, score in scores.items()},
        "terms": scores["expected"]["terms"],
        "step_error": error if model is not None else None,
        "curve": [[length, _score(forecast, rules, length, 1.0)["value"]] for length in lengths],
        "alternatives": [
            _alternative(phase, one, shape, rules, model) for one in phase.alternatives
        ],
        "runs": _runs(phase, shape),
        "provenance": build_provenance(),
    }


def _tell(forecast: Forecast) -> list[tuple[str, list[tuple[str, str]]]]:
    hidden = ("Provisional in the rules", "Warnings", "Score")
    return [section for section in describe_forecast(forecast) if section[0] not in hidden]


def _forecast(
    phase: Phase, design: str, shape: TargetShape, rules: Rules, model: StepModel | None
) -> Forecast:
    forecast = build_forecast(
        read_design(phase.folder / design, shape),
        shape,
        rules,
        baseline=native_baseline(shape, rules.speculation.baseline_num_speculative_tokens),
        baseline_acceptance_length=phase.baseline_acceptance,
        plan=CachePlan(),
        model=model,
    )
    if forecast.memory_ratio is None:
        raise RecipeError(
            "there is no score: the target has no MTP head as a baseline",
            where=f"{phase.name}: target",
        )
    return forecast


def _score(forecast: Forecast, rules: Rules, length: float, step_factor: float) -> dict[str, Any]:
    assert forecast.memory_ratio is not None
    assert forecast.step_ratio is not None
    tau = length / forecast.baseline_acceptance_length
    score = compute_score(
        rules,
        tau_ratio=tau,
        memory_ratio=forecast.memory_ratio,
        tpot_ratio=tau * forecast.step_ratio * step_factor,
    )
    return {
        "value": score.value,
        "ranked": score.ranked,
        "terms": [dataclasses.asdict(term) for term in score.terms],
    }


def _alternative(
    phase: Phase,
    one: dict[str, Any],
    shape: TargetShape,
    rules: Rules,
    model: StepModel | None,
) -> dict[str, Any]:
    forecast = _forecast(phase, one["design"], shape, rules, model)
    length = float(one["acceptance"])
    score = _score(forecast, rules, length, 1.0)
    return {
        "name": one["name"],
        "family": forecast.design.family,
        "num_speculative_tokens": forecast.design.num_speculative_tokens,
        "acceptance": length,
        "num_parameters": forecast.memory.sizes.num_parameters,
        "memory_bytes": forecast.memory.total_bytes,
        "step_ms": forecast.step.step_ms,
        "score": score["value"],
        "ranked": score["ranked"],
        "broken": [name for name, (_, _, holds) in forecast.limits.items() if not holds],
    }


def _runs(phase: Phase, shape: TargetShape) -> list[dict[str, Any]]:
    """Measured step times of this shape, for the table and its intervals."""
    if phase.steps is None:
        return []
    wanted = shape_sha256(shape)
    rows = []
    for run in read_runs(phase.folder / phase.steps):
        if run.target_sha256 != wanted:
            continue
        for point in run.points:
            rows.append(
                {
                    "name": run.name,
                    "machine": run.machine,
                    "num_speculative_tokens": run.num_speculative_tokens,
                    "context_tokens": point.context_tokens,
                    "step_ms": point.step_ms,
                    "low": point.step_ms_low,
                    "high": point.step_ms_high,
                    "ratio": point.ratio,
                    "ratio_low": point.ratio_low,
                    "ratio_high": point.ratio_high,
                }
            )
    return rows
