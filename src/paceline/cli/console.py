"""What every command prints with: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

__all__ = ["console", "plural", "print_facts", "print_hanging", "progress", "say"]

console = Console(soft_wrap=False, highlight=False)

_SECONDS_BETWEEN_LINES = 10.0


def say(text: str) -> None:
    """One plain line, flushed at once, so that a log shows where a long command is."""
    console.print(text, markup=False, soft_wrap=True)
    sys.stdout.flush()


def plural(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_facts(title: str, facts: list[tuple[str, str]]) -> None:
    """Label and value a line; a long value goes on under its beginning. Whole lines in a file."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    width = max((len(label) for label, _ in facts), default=0)
    for label, value in facts:
        head = f"{label:<{width}}  "
        if console.is_terminal:
            print_hanging(Text.assemble((head, "dim")), value, indent=len(head))
        else:
            say(head + value)


def print_hanging(head: Text, body: str, *, indent: int) -> None:
    """`head`, then `body` wrapped to the console; lines after the first begin at `indent`."""
    lines = textwrap.wrap(
        head.plain + body,
        width=max(console.width - 1, indent + 20),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
    text = head.copy()
    text.plain = "\n".join(lines)
    console.print(text, soft_wrap=True)


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
    first: tuple[float, int] | None = None

    def show(done: int, total: int, note: str = "") -> None:
        nonlocal last, first
        now = time.monotonic()
        if first is None:
            first = (now, done)
        if done == total or now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            seconds, finished = now - first[0], done - first[1]
            rate = f"{finished / seconds:.2f}/s" if finished and seconds > 0 else ""
            say("  ".join(part for part in (f"{label}: {done}/{total}", rate, note) if part))

    yield show
