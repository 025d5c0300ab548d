"""Submissions -> queue -> measured, sealed and signed results. Needs the extra `judge`."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import MissingExtraError

if find_spec("sqlalchemy") is None:
    raise MissingExtraError(
        "the judge's queue needs SQLAlchemy", fix="Run `pip install 'paceline[judge]'`."
    )

from paceline.judge.conduct import check_conduct, compare_orders, compare_sets
from paceline.judge.home import Home
from paceline.judge.ledger import parse_lines, read_lines
from paceline.judge.publish import publish_results, verify_results
from paceline.judge.queue import Entry, list_entries, pin_setting, read_ledger
from paceline.judge.screen import (
    Screen,
    build_screen,
    screen_error,
    screen_text,
    screened_output,
)
from paceline.judge.submit import submit_draft
from paceline.judge.tables import Queue, open_queue
from paceline.judge.worker import Court, Task, run_worker

__all__ = [
    "Court",
    "Entry",
    "Home",
    "Queue",
    "Screen",
    "Task",
    "build_screen",
    "check_conduct",
    "compare_orders",
    "compare_sets",
    "list_entries",
    "open_queue",
    "parse_lines",
    "pin_setting",
    "publish_results",
    "read_ledger",
    "read_lines",
    "run_worker",
    "screen_error",
    "screen_text",
    "screened_output",
    "submit_draft",
    "verify_results",
]
