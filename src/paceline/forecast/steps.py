"""Measured step times on disk: one JSON line a finished configuration, format paceline-steps/1.

A configuration is one engine: a target's shape, a design (or none) at one acceptance length, on one
machine. The file is only ever appended to; a key that is there is never measured again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ResultError
from paceline.forecast.design import Design
from paceline.forecast.shape import TargetShape
from paceline.records import append_jsonl, read_jsonl, sha256_bytes

__all__ = [
    "STEPS_FORMAT",
    "StepPoint",
    "StepRun",
    "append_run",
    "configuration_key",
    "read_runs",
    "shape_sha256",
]

STEPS_FORMAT = "paceline-steps/1"
_FIELDS = (
    "key",
    "machine",
    "engine",
    "target",
    "target_sha256",
    "arm",
    "name",
    "settings",
    "num_speculative_tokens",
    "acceptance_length",
    "reference",
    "points",
    "memory",
    "start_s",
    "provenance",
)


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """One context length. context_tokens: in the middle of the answer. step_ms: median over
    repeats of the time between chunks; low, high: 95 % interval of that median by resampling
    repeats. reference_ms: the same of the engine that ran beside it, in turn, and ratio: step_ms
    over reference_ms, pair by pair (median and interval); None for the reference itself.
    steps_per_repeat: steps of each repeat. acceptance_length: delivered tokens over steps.
    """

    context_tokens: int
    num_repeats: int
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    tpot_ms: float
    acceptance_length: float
    reference_ms: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    repeats_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """One line. arm: "plain", "baseline" or "design". settings: of the design, {} for plain.
    acceptance_length: asked of the engine, None for plain. reference: key of the engine that ran
    beside it. memory: what the started engine holds for the draft (bytes), None where not asked.
    """

    key: str
    machine: str
    engine: str
    target: str
    target_sha256: str
    arm: str
    name: str
    settings: dict[str, Any]
    num_speculative_tokens: int
    acceptance_length: float | None
    reference: str | None
    points: tuple[StepPoint, ...]
    memory: dict[str, int] | None
    start_s: float
    provenance: dict[str, Any]


def shape_sha256(shape: TargetShape) -> str:
    """Of the target's config, keys in order: what a cached run belongs to."""
    config = {k: v for k, v in shape.facts.config.items() if not k.startswith("_")}
    return sha256_bytes(json.dumps(config, sort_keys=True).encode("utf-8"))


def configuration_key(
    *,
    machine: str,
    engine: str,
    target_sha256: str,
    design: Design | None,
    acceptance_length: float | None,
    settings: Mapping[str, Any],
) -> str:
    """16 digits that decide whether a configuration was measured already. settings: whatever else
    changes the time, such as context lengths and repeats."""
    shown: dict[str, Any] | None = None
    if design is not None:
        shown = {name: getattr(design, name) for name in design.__dataclass_fields__}
        del shown["stated"]
    text = json.dumps(
        [machine, engine, target_sha256, shown, acceptance_length, dict(settings)], sort_keys=True
    )
    return sha256_bytes(text.encode("utf-8"))[:16]


def append_run(path: str | Path, run: StepRun) -> None:
    values = {name: getattr(run, name) for name in _FIELDS}
    values["points"] = [
        {name: getattr(point, name) for name in point.__dataclass_fields__} for point in run.points
    ]
    append_jsonl(path, {"format": STEPS_FORMAT, **values})


def read_runs(path: str | Path) -> list[StepRun]:
    """Raises ResultError naming the line that is none of ours; a cut last line is dropped."""
    runs: list[StepRun] = []
    for number, record in enumerate(read_jsonl(path), 1):
        where = f"{path}:{number}"
        if record.pop("format", None) != STEPS_FORMAT:
            raise ResultError("is no measured run", where=where, expected=f"format {STEPS_FORMAT}")
        if sorted(record) != sorted(_FIELDS):
            odd = sorted(set(record) ^ set(_FIELDS))
            raise ResultError(f"key '{odd[0]}' is missing or unknown", where=where)
        runs.append(StepRun(**{**record, "points": _read_points(record["points"], where)}))
    return runs


def _read_points(listed: object, where: str) -> tuple[StepPoint, ...]:
    names = sorted(StepPoint.__dataclass_fields__)
    if not isinstance(listed, list) or not listed:
        raise ResultError("has no points", where=where, expected="one a context length")
    points = []
    for point in listed:
        if not isinstance(point, dict) or sorted(point) != names:
            raise ResultError("a point lacks a key", where=where, expected=", ".join(names))
        time = point["step_ms"]
        if not isinstance(time, int | float) or not math.isfinite(time) or time <= 0:
            raise ResultError(
                f"step_ms is {time!r}", where=where, expected="milliseconds above zero"
            )
        points.append(StepPoint(**{**point, "repeats_ms": tuple(point["repeats_ms"])}))
    return tuple(points)
