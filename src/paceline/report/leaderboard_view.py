"""Ranked rows -> the strings, sort keys and marks of the leaderboard page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.report.fields import pick, pick_dict, pick_number, pick_text
from paceline.report.formats import (
    NOT_MEASURED,
    clean_text,
    format_interval,
    format_number,
)
from paceline.report.leaderboard import Field, Row
from paceline.report.leaderboard_plots import Mark
from paceline.report.score_view import Term, build_terms, name_draft

__all__ = [
    "build_categories",
    "build_glance",
    "build_marks",
    "build_record",
    "build_rows",
    "name_folders",
]

_STATE_WORDS = {
    "ranked": "ranked",
    "unranked": "withheld",
    "refused": "refused",
    "failed": "not measured",
    "superseded": "superseded",
}


def name_folders(rows: Sequence[Row]) -> dict[str, str]:
    """Identity of an entry -> a folder name of its own, plain and stable."""
    folders: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row.entry.identity):
        words = re.findall(r"[a-z0-9]+", f"{row.entry.team} {row.entry.name}".lower())
        base = "-".join(words)[:60] or "entry"
        name, number = base, 2
        while name in folders.values():
            name, number = f"{base}-{number}", number + 1
        folders[row.entry.identity] = name
    return folders


def build_rows(rows: Sequence[Row], folders: Mapping[str, str]) -> list[dict[str, Any]]:
    """One record a row: texts to show, and numbers to sort by ("" sorts last)."""
    scale = _score_scale(rows)
    return [_build_row(row, folders, scale) for row in rows]


def _build_row(row: Row, folders: Mapping[str, str], scale: tuple[float, float]) -> dict[str, Any]:
    result = row.entry.result
    terms = {term.key: term for term in build_terms(result)} if result is not None else {}
    return {
        "rank": "" if row.rank is None else str(row.rank),
        "rank_range": f"{row.rank} to {row.rank_worst}" if row.is_tied else "",
        "name": row.entry.name,
        "team": row.entry.team,
        "family": row.entry.family,
        "is_final": row.entry.is_final,
        "state": row.state,
        "state_word": _STATE_WORDS[row.state],
        "reasons": row.reasons,
        "notes": row.entry.notes,
        "score": format_number(row.score, 1) if row.score is not None else "-",
        "interval": format_interval(row.low, row.high, 1) if row.low is not None else "",
        "bar": _build_bar(row, scale),
        "terms": [_build_term(terms[key]) for key in ("tau", "memory", "tpot") if key in terms],
        "gate": _describe_gate(result),
        "href": f"entries/{folders[row.entry.identity]}/index.html" if result is not None else "",
        "keys": {
            "rank": _key(row.rank),
            "score": _key(row.score),
            **{key: _key(_ratio(result, key)) for key in ("tau", "memory", "tpot")},
        },
        "text": f"{row.entry.name} {row.entry.team} {row.entry.family}".lower(),
    }


def _key(value: float | None) -> str:
    return "" if value is None else f"{value:.9g}"


def _ratio(result: Mapping[str, Any] | None, key: str) -> float | None:
    if result is None:
        return None
    if pick(result, "ratios", key, "unbounded") is True:
        return 1e9
    return pick_number(result, "ratios", key, "value")


def _build_term(term: Term) -> dict[str, str]:
    return {
        "key": term.key,
        "label": {"tau": "acceptance", "memory": "memory", "tpot": "time"}[term.key],
        "value": term.candidate,
        "ratio": f"× {term.ratio}" if term.ratio not in (NOT_MEASURED, "unlimited") else term.ratio,
        "interval": "" if term.interval in (NOT_MEASURED, "exact") else term.interval,
        "points": "" if term.points is None else f"{term.points:.1f}",
        "capped": "capped" if term.is_capped else "",
    }


def _describe_gate(result: Mapping[str, Any] | None) -> str:
    passed = pick(result, "score", "gate", "passed") if result is not None else None
    return "-" if passed is None else "passed" if passed else "not passed"


def _score_scale(rows: Sequence[Row]) -> tuple[float, float]:
    """From just below the lowest score or interval to just above the highest; 100 is inside."""
    values = [100.0]
    for row in rows:
        values += [v for v in (row.score, row.low, row.high) if v is not None]
    room = max((max(values) - min(values)) * 0.06, 1.0)
    return min(values) - room, max(values) + room


def _build_bar(row: Row, scale: tuple[float, float]) -> dict[str, str] | None:
    """Places in percent: the score, its interval, and 100."""
    if row.score is None:
        return None

    def place(value: float) -> str:
        return f"{(value - scale[0]) / (scale[1] - scale[0]) * 100:.2f}"

    low = row.score if row.low is None else row.low
    high = row.score if row.high is None else row.high
    return {
        "score": place(row.score),
        "low": place(low),
        "width": f"{float(place(high)) - float(place(low)):.2f}",
        "baseline": place(100.0),
    }


def build_glance(field: Field, rows: Sequence[Row], noise: float | None) -> dict[str, Any]:
    """The field at a glance: four figures, the counts by state, and a strip of scores."""
    scale = _score_scale(rows)
    spread = "-"
    if field.quartiles and field.range:
        spread = f"{field.quartiles[0]:.1f}–{field.quartiles[1]:.1f}"
    return {
        "figures": [
            ("entries", str(field.num_entries), f"of {field.num_teams} teams"),
            ("ranked", str(field.num_ranked), f"of {field.num_entries} entries"),
            (
                "median score",
                format_number(field.median, 1) if field.median else "-",
                "baseline 100",
            ),
            (
                "middle half",
                spread,
                f"all: {field.range[0]:.1f} to {field.range[1]:.1f}" if field.range else "",
            ),
        ],
        "states": [(_STATE_WORDS[state], n) for state, n in field.num_by_state.items()],
        "noise": "" if noise is None else f"{noise:.1f}",
        "strip": [
            {**bar, "title": f"{row.entry.name}: {row.score:.1f}"}
            for row in rows
            if row.state == "ranked" and (bar := _build_bar(row, scale)) is not None
        ],
        "baseline": f"{(100 - scale[0]) / (scale[1] - scale[0]) * 100:.2f}",
    }


def build_categories(rows: Sequence[Row], folders: Mapping[str, str]) -> dict[str, Any] | None:
    """Acceptance length by category, one row an entry, the baseline first; None without any."""
    shown = [row for row in rows if row.entry.result is not None and row.state != "superseded"]
    names: dict[str, None] = {}
    for row in shown:
        assert row.entry.result is not None
        names.update(dict.fromkeys(pick_dict(row.entry.result, *_BY_CATEGORY)))
    if not names:
        return None
    first = shown[0].entry.result
    assert first is not None
    table: list[dict[str, Any]] = [
        {
            "name": name_draft(first, "baseline", limit=48),
            "team": "baseline",
            "href": "",
            "values": _taus(first, "baseline", names),
        }
    ]
    for row in shown:
        assert row.entry.result is not None
        table.append(
            {
                "name": row.entry.name,
                "team": row.entry.team,
                "href": f"entries/{folders[row.entry.identity]}/index.html",
                "values": _taus(row.entry.result, "candidate", names),
            }
        )
    top = max((v for line in table for v in line["values"] if v is not None), default=1.0)
    for line in table:
        known = [v for v in line["values"] if v is not None]
        line["cells"] = [
            {
                "text": "-" if value is None else f"{value:.2f}",
                "shade": 0 if value is None else round((value - 1) / max(top - 1, 1e-9) * 100),
                "is_worst": value is not None and min(known) == value < max(known),
            }
            for value in line["values"]
        ]
    return {"names": [clean_text(name, limit=24) for name in names], "rows": table}


_BY_CATEGORY = ("arms", "candidate", "tau", "by_category")


def _taus(result: Mapping[str, Any], arm: str, names: Mapping[str, None]) -> list[float | None]:
    by_category = pick_dict(result, "arms", arm, "tau", "by_category")
    return [pick_number(by_category, name, "value") for name in names]


def build_marks(rows: Sequence[Row], key: str, folders: Mapping[str, str]) -> list[Mark]:
    """Entries with both ratios. key: "memory" or "time"; both fall when the draft gets better."""
    term = {"memory": "memory", "time": "tpot"}[key]
    marks = []
    for row in reversed(rows):  # the best is drawn last, on top
        result = row.entry.result
        if result is None or row.state == "superseded":
            continue
        y, x = pick_number(result, "ratios", "tau", "value"), _inverse(result, term, "value")
        if x is None or y is None:
            continue
        low, high = _inverse(result, term, "high"), _inverse(result, term, "low")
        y_low, y_high = (pick_number(result, "ratios", "tau", end) for end in ("low", "high"))
        marks.append(
            Mark(
                x=x,
                y=y,
                x_interval=(low, high) if low is not None and high is not None else None,
                y_interval=(y_low, y_high) if y_low is not None and y_high is not None else None,
                label="–" if row.rank is None else str(row.rank),
                title=f"{row.entry.name}: acceptance {y:.3f}, {key} {x:.3f} of the baseline's",
                href=f"entries/{folders[row.entry.identity]}/index.html",
                is_ranked=row.rank is not None,
            )
        )
    return marks


def _inverse(result: Mapping[str, Any], term: str, end: str) -> float | None:
    """The ratios are the candidate's advantage; a plot shows what it costs."""
    if pick(result, "ratios", term, "unbounded") is True:
        return 0.0
    ratio = pick_number(result, "ratios", term, end)
    return None if not ratio else 1.0 / ratio


def build_record(
    rows: Sequence[Row], rules: Mapping[str, Any], folders: Mapping[str, str]
) -> dict[str, Any]:
    """The same ranking for programs."""
    return {
        "format": "paceline-leaderboard/1",
        "rules": {key: rules[key] for key in ("name", "version", "sha256")},
        "entries": [
            {
                "rank": row.rank,
                "rank_worst": row.rank_worst,
                "team": row.entry.team or None,
                "name": row.entry.name,
                "family": row.entry.family,
                "state": row.state,
                "reasons": list(row.reasons),
                "notes": list(row.entry.notes),
                "score": {"value": row.score, "low": row.low, "high": row.high},
                "draft_sha256": pick_text(
                    row.entry.result or {}, "arms", "candidate", "draft", "sha256"
                ),
                "report": f"entries/{folders[row.entry.identity]}/index.html"
                if row.entry.result is not None
                else None,
            }
            for row in rows
        ],
    }
