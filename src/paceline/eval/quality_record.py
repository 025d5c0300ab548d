"""Answers of the arms -> the record of `paceline quality`: tallies, losses, verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.errors import ResultError
from paceline.eval.harness import AskedQuestion
from paceline.eval.quality import (
    PairedLoss,
    Tally,
    measure_paired_loss,
    tally_outcomes,
    wilson_interval,
)
from paceline.eval.quality_gate import join_verdicts, judge_quality
from paceline.rules import Challenge

__all__ = ["QUALITY_FORMAT", "build_quality"]

QUALITY_FORMAT = "paceline-quality/1"

Answers = Mapping[str, Sequence[AskedQuestion]]


def build_quality(
    challenge: Challenge, arm: Answers, plain: Answers | None, *, applies_minimum: bool
) -> dict[str, Any]:
    """Gate name -> answers, of the arm and of the unoptimised target: tasks, verdict, questions.

    Raises ResultError where the two were not asked the same.
    """
    tasks = {}
    for name, asked in arm.items():
        of_plain = plain[name] if plain is not None else None
        if of_plain is not None:
            _require_same(name, asked, of_plain)
        tasks[name] = _build_task(challenge, name, asked, of_plain, applies_minimum)
    return {
        "verdict": join_verdicts([task["verdict"] for task in tasks.values()]),
        "tasks": tasks,
    }


def _build_task(
    challenge: Challenge,
    name: str,
    asked: Sequence[AskedQuestion],
    plain: Sequence[AskedQuestion] | None,
    applies_minimum: bool,
) -> dict[str, Any]:
    gate, rules = challenge.gate(name), challenge.answers
    tally = tally_outcomes([row.outcome for row in asked])
    of_plain, loss = None, None
    if plain is not None:
        of_plain = tally_outcomes([row.outcome for row in plain])
        loss = measure_paired_loss(
            {row.question_id: row.outcome for row in plain},
            {row.question_id: row.outcome for row in asked},
            confidence=rules.confidence,
        )
    result = judge_quality(
        gate,
        tally,
        plain=of_plain,
        loss=loss,
        applies_minimum=applies_minimum,
        max_broken_share=rules.max_broken_share,
        confidence=rules.confidence,
    )
    return {
        "gate": asdict(gate),
        "applies_minimum": applies_minimum,
        "arm": _describe(tally, asked, rules.confidence),
        "plain": None if of_plain is None else _describe(of_plain, plain or (), rules.confidence),
        "loss": _describe_loss(loss),
        "verdict": result.verdict,
        "reasons": list(result.reasons),
    }


def _describe(tally: Tally, asked: Sequence[AskedQuestion], confidence: float) -> dict[str, Any]:
    interval = wilson_interval(tally.right, tally.num_finished, confidence=confidence)
    tokens = [row.num_tokens for row in asked if row.num_tokens is not None]
    return {
        "num_questions": tally.num_questions,
        **{key: getattr(tally, key) for key in ("right", "wrong", "broken", "cut")},
        "accuracy": tally.accuracy,
        "low": interval[0] if interval else None,
        "high": interval[1] if interval else None,
        "lowest": tally.lowest,
        "highest": tally.highest,
        "broken_share": tally.broken_share,
        "num_with_thought": sum(row.has_thought for row in asked),
        "mean_tokens": sum(tokens) / len(tokens) if tokens else None,
        "questions": [asdict(row) for row in asked],
    }


def _describe_loss(loss: PairedLoss | None) -> dict[str, Any] | None:
    return None if loss is None else asdict(loss)


def _require_same(
    name: str, asked: Sequence[AskedQuestion], plain: Sequence[AskedQuestion]
) -> None:
    one, other = (
        Counter((row.question_id, row.prompt_sha256) for row in rows) for rows in (asked, plain)
    )
    if one != other:
        raise ResultError(
            f"{len(one - other)} questions differ between the two",
            where=name,
            expected="the same questions, word for word: a loss is counted question by question",
        )
