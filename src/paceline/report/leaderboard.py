"""Entries -> a ranking with ties, and the field at a glance. Numbers only; no HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from paceline.errors import ResultError
from paceline.report.fields import pick, pick_dict, pick_list, pick_number
from paceline.report.formats import clean_text
from paceline.report.leaderboard_read import Submitted

__all__ = ["Field", "Row", "describe_field", "list_ranked", "rank_entries", "read_noise"]

STATES = ("ranked", "unranked", "refused", "failed", "superseded")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One entry in its place.

    rank: 1 + the number of entries that are better beyond noise; None when it is not ranked.
    rank_worst: the place it could have if every tie went against it. state: one of STATES.
    """

    entry: Submitted
    state: str
    reasons: tuple[str, ...]
    score: float | None
    low: float | None
    high: float | None
    rank: int | None
    rank_worst: int | None
    is_tied: bool


@dataclass(frozen=True, kw_only=True)
class Field:
    """The field at a glance. quartiles and range: of the ranked entries' scores."""

    num_entries: int
    num_teams: int
    num_ranked: int
    num_by_state: Mapping[str, int]
    median: float | None
    quartiles: tuple[float, float] | None
    range: tuple[float, float] | None


def rank_entries(
    entries: Sequence[Submitted],
    *,
    rules_sha256: str,
    noise: float | None = None,
    places: Mapping[str, tuple[int, int]] | None = None,
) -> list[Row]:
    """Ranked entries by score, then the others by state. noise: points below which two are tied.

    places: identity -> best and worst place, from differences that are paired by prompt. Without
    it, two entries are tied when their intervals overlap or their scores differ by less than the
    noise floor; an entry without an interval stands for its score alone. Raises ResultError for a
    result that was measured under other rules: its score is another quantity.
    """
    rows = [_read_row(entry, rules_sha256) for entry in entries]
    ranked = sorted(
        (row for row in rows if row.state == "ranked"),
        key=lambda row: (-(row.score or 0.0), row.entry.name, row.entry.identity),
    )
    rest = sorted(
        (row for row in rows if row.state != "ranked"),
        key=lambda row: (STATES.index(row.state), -(row.score or 0.0), row.entry.name),
    )
    return [*(_place(row, ranked, noise or 0.0, places) for row in ranked), *rest]


def list_ranked(entries: Sequence[Submitted], *, rules_sha256: str) -> list[Submitted]:
    """The entries that will have a place, to be compared before they are ranked."""
    rows = (_read_row(entry, rules_sha256) for entry in entries)
    return [row.entry for row in rows if row.state == "ranked"]


def _read_row(entry: Submitted, rules_sha256: str) -> Row:
    result = entry.result
    score = low = high = None
    reasons = list(entry.reasons)
    state = entry.state
    if result is not None:
        measured_by = pick(result, "rules", "sha256")
        if measured_by != rules_sha256:
            raise ResultError(
                f"'{entry.name}' was measured under other rules",
                where=entry.identity,
                expected=f"rules of sha256 {rules_sha256[:12]}, found {str(measured_by)[:12]}",
                fix="Name the rules that the results carry with --rules.",
            )
        score, low, high = (pick_number(result, "score", key) for key in ("value", "low", "high"))
        own = pick_dict(result, "score")
        if state == "measured":
            reasons += [clean_text(text, limit=300) for text in pick_list(own, "reasons")]
            for arm in pick_dict(result, "withheld"):  # the fidelity gate: there is no score
                for text in pick_list(result, "withheld", arm):
                    reasons.append(f"{clean_text(arm, limit=24)}: {clean_text(text, limit=300)}")
            is_ranked = score is not None and pick(own, "ranked") is True and not entry.reasons
            if not is_ranked and not reasons:
                reasons.append("no score: a term was not measured")
            state = "ranked" if is_ranked else "unranked"
    if state == "superseded":
        reasons = ["another entry of this team counts"]
    return Row(
        entry=entry,
        state=state,
        reasons=tuple(reasons),
        score=score,
        low=low,
        high=high,
        rank=None,
        rank_worst=None,
        is_tied=False,
    )


def _place(
    row: Row,
    ranked: Sequence[Row],
    noise: float,
    places: Mapping[str, tuple[int, int]] | None,
) -> Row:
    if places is not None:
        best, worst = places[row.entry.identity]
    else:
        best = 1 + sum(1 for other in ranked if _is_better(other, row, noise))
        worst = len(ranked) - sum(1 for other in ranked if _is_better(row, other, noise))
    return Row(
        entry=row.entry,
        state=row.state,
        reasons=row.reasons,
        score=row.score,
        low=row.low,
        high=row.high,
        rank=best,
        rank_worst=worst,
        is_tied=worst > best,
    )


def _is_better(one: Row, other: Row, noise: float) -> bool:
    """Beyond both intervals and the noise floor."""
    assert one.score is not None
    assert other.score is not None
    low = one.score if one.low is None else one.low
    high = other.score if other.high is None else other.high
    return low > high and one.score - other.score >= noise


def describe_field(rows: Sequence[Row]) -> Field:
    """Counts, and the spread of the ranked entries' scores."""
    scores = [row.score for row in rows if row.state == "ranked" and row.score is not None]
    teams = {row.entry.team or row.entry.identity for row in rows}
    cut = quantiles(scores, n=4, method="inclusive") if len(scores) > 1 else None
    return Field(
        num_entries=len(rows),
        num_teams=len(teams),
        num_ranked=len(scores),
        num_by_state={
            state: number
            for state in STATES
            if (number := sum(1 for row in rows if row.state == state))
        },
        median=median(scores) if scores else None,
        quartiles=(cut[0], cut[2]) if cut else None,
        range=(min(scores), max(scores)) if scores else None,
    )


def read_noise(entries: Sequence[Submitted]) -> float | None:
    """The largest noise floor that the results state, in points of score; None when none does."""
    floors = [
        floor
        for entry in entries
        if entry.result is not None and (floor := _read_floor(entry.result)) is not None
    ]
    return max(floors) if floors else None


def _read_floor(result: Mapping[str, Any]) -> float | None:
    noise = pick(result, "noise_floor")
    return pick_number(noise, "score") if isinstance(noise, Mapping) else None
