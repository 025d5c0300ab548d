"""Sample answers as steps of tokens: what held, what the target wrote itself, what it refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ResultError
from paceline.report.fields import pick_list, pick_number, pick_text
from paceline.report.formats import clean_text, format_token

__all__ = ["MAX_SAMPLES", "Sample", "Step", "build_samples"]

MAX_SAMPLES = 12
_MAX_STEPS = 400


@dataclass(frozen=True, kw_only=True)
class Step:
    """Texts ready to show. hidden: refused tokens whose text was not recorded."""

    accepted: tuple[str, ...]
    target: str | None
    rejected: tuple[str, ...]
    hidden: int
    breaks_line: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    heading: str
    prompt: str
    summary: str
    steps: tuple[Step, ...]
    num_cut: int


def build_samples(result: Mapping[str, Any]) -> tuple[Sample, ...]:
    """The first 12 samples, each with its first 400 steps. Raises ResultError."""
    samples = pick_list(result, "samples")
    return tuple(_build_sample(sample, i) for i, sample in enumerate(samples[:MAX_SAMPLES]))


def _build_sample(sample: object, index: int) -> Sample:
    if not isinstance(sample, Mapping):
        raise ResultError("is not an object", where=f"result.json: samples.{index}")
    raw = pick_list(sample, "steps")
    steps = tuple(_build_step(step, f"samples.{index}.steps.{i}") for i, step in enumerate(raw))
    num_held = sum(len(step.accepted) for step in steps)
    num_refused = sum(len(step.rejected) + step.hidden for step in steps)
    names = (pick_text(sample, key) for key in ("arm", "category", "id"))
    return Sample(
        heading=" · ".join(clean_text(name, limit=60) for name in names if name),
        prompt=clean_text(pick_text(sample, "prompt") or "", limit=600),
        summary=(
            f"{_count(len(steps), 'step')}, {_count(num_held, 'drafted token')} accepted, "
            f"{num_refused} rejected"
        ),
        steps=steps[:_MAX_STEPS],
        num_cut=max(0, len(steps) - _MAX_STEPS),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _build_step(step: object, where: str) -> Step:
    if not isinstance(step, Mapping):
        raise ResultError("is not an object", where=f"result.json: {where}")
    accepted = tuple(format_token(text) for text in pick_list(step, "accepted"))
    rejected = tuple(format_token(text) for text in pick_list(step, "rejected"))
    target = pick_text(step, "target")
    refused = int(pick_number(step, "num_rejected") or 0)
    written = (*accepted, format_token(target) if target else "")
    return Step(
        accepted=accepted,
        target=format_token(target) if target else None,
        rejected=rejected,
        hidden=max(0, refused - len(rejected)),
        breaks_line=any("↵" in text for text in written),
    )
