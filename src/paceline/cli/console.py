"""What every command prints with: tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["console", "print_facts", "progress", "say"]

console = Console(soft_wrap=False, highlight=False)

_SECONDS_BETWEEN_LINES = 10.0


def say(text: str) -> None:
    """One plain line, flushed at once, so that a log shows where a long command is."""
    console.print(text, markup=False, soft_wrap=True)
    sys.stdout.flush()


def print_facts(title: str, facts: list[tuple[str, str]]) -> None:
    """A two-column table of label and value."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts:
        table.add_row(label, value)
    console.print(table)


class Show(Protocol):
    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def progress(label: str) -> Iterator[Show]:
    """Yields `show(done, total, note)`: a bar on a terminal, a line every ten seconds elsewhere."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as bars:
            task = bars.add_task(label, total=None, note="")

            def update(done: int, total: int, note: str = "") -> None:
                bars.update(task, completed=done, total=total, note=note)

            yield update
        return
    last = time.monotonic() - _SECONDS_BETWEEN_LINES

    def show(done: int, total: int, note: str = "") -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            say(f"{label}: {done}/{total}  {note}".rstrip())

    yield show
