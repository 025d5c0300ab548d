"""Contest rules as data, and the score."""

from __future__ import annotations

from paceline.rules.challenge import (
    GATE_NAMES,
    Challenge,
    QualityGate,
    list_challenges,
    parse_challenge,
    read_challenge,
)
from paceline.rules.contest import Limits, Rules
from paceline.rules.describe import describe_rules
from paceline.rules.read import list_rules, parse_rules, read_rules
from paceline.rules.score import Score, ScoreTerm, compute_score

__all__ = [
    "GATE_NAMES",
    "Challenge",
    "Limits",
    "QualityGate",
    "Rules",
    "Score",
    "ScoreTerm",
    "compute_score",
    "describe_rules",
    "list_challenges",
    "list_rules",
    "parse_challenge",
    "parse_rules",
    "read_challenge",
    "read_rules",
]
