"""The quality table on a terminal: a record of `paceline quality` in, renderables out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report.formats import NOT_MEASURED, clean_text

__all__ = ["render_quality"]

_STYLE = {"pass": "bold green", "fail": "bold red", "undecided": "bold yellow"}


def render_quality(record: Mapping[str, Any]) -> RenderableType:
    """Answers of each arm on each task, what was lost, and the verdict with its reasons."""
    answers = Table(box=None, pad_edge=False, title="Answers", title_justify="left")
    for number, column in enumerate(
        ("task", "arm", "asked", "right", "wrong", "broken", "cut", "accuracy (95 %)")
    ):
        answers.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    losses = Table(
        box=None, pad_edge=False, title="Questions lost and won against plain", title_justify="left"
    )
    for number, column in enumerate(
        ("task", "pairs", "cut", "lost", "won", "difference", "p", "limit")
    ):
        losses.add_column(column, justify="right" if number else "left", no_wrap=True)
    lines = []
    for name, task in record["tasks"].items():
        for arm in ("plain", "arm"):
            if task[arm] is not None:
                answers.add_row(*_answers_row(name, arm, task[arm]))
        if task["loss"] is not None:
            losses.add_row(*_loss_row(name, task["loss"], task["gate"]["max_loss"]))
        lines.append(
            Text.assemble(f"{name}: ", (task["verdict"], _STYLE[task["verdict"]]), _asked_of(task))
        )
        lines += [Text(f"  {clean_text(reason)}") for reason in task["reasons"]]
    parts: list[RenderableType] = [answers, Text()]
    if losses.row_count:
        parts += [losses, Text()]
    parts += lines
    parts.append(Text.assemble("quality: ", (record["verdict"], _STYLE[record["verdict"]])))
    return Group(*parts)


def _answers_row(name: str, arm: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (str(found[key]) for key in ("num_questions", "right", "wrong", "broken", "cut"))
    if found["accuracy"] is None:
        return name, arm, *counts, NOT_MEASURED
    share = f"{found['accuracy']:.3f} ({found['low']:.3f}-{found['high']:.3f})"
    return name, arm, *counts, share


def _loss_row(name: str, loss: Mapping[str, Any], max_loss: float) -> tuple[str, ...]:
    counts = (str(loss[key]) for key in ("num_pairs", "num_cut", "only_plain", "only_arm"))
    if loss["difference"] is None:
        return name, *counts, NOT_MEASURED, "", f"{max_loss:.3f}"
    change = f"{loss['difference']:+.3f} ({loss['low']:+.3f} {loss['high']:+.3f})"
    return name, *counts, change, f"{loss['p_value']:.3f}", f"{max_loss:.3f}"


def _asked_of(task: Mapping[str, Any]) -> str:
    minimum = f"at least {task['gate']['minimum']:.3f} right"
    asked = minimum if task["applies_minimum"] else f"({minimum}: asked of another target)"
    return f"  {asked}"
