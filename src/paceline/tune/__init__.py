"""Serving settings searched under a quality gate; knows no engine, is handed a Bench."""

from paceline.tune.config import write_config
from paceline.tune.journal import Journal
from paceline.tune.search import Bench, Outcome, Row, search
from paceline.tune.settings import Settings, read_settings
from paceline.tune.space import Knob, Situation

__all__ = [
    "Bench",
    "Journal",
    "Knob",
    "Outcome",
    "Row",
    "Settings",
    "Situation",
    "read_settings",
    "search",
    "write_config",
]
