"""A team's report: phase 1 from forecasts, phase 2 with the measured figures of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from paceline.errors import ResultError
from paceline.records import write_text
from paceline.report.fields import pick_number, pick_text, require_format
from paceline.report.formats import clean_text, format_number
from paceline.report.phase_plots import draw_score_curve
from paceline.report.plots import draw_memory
from paceline.report.score_view import build_headline, build_terms, list_notes

__all__ = ["build_phase_page", "write_phase_page"]

_FORMAT = "paceline-phase/1"
_TEMPLATES = Path(__file__).parent / "templates"
_PARTS = (
    ("weights", "weights_bytes"),
    ("buffers", "buffers_bytes"),
    ("kv", "kv_bytes"),
    ("state", "state_bytes"),
)
_USED = ("terms", "gate", "limits", "speculation")  # what a forecast rests on
_TERMS = {"tau": "acceptance length", "memory": "draft memory", "tpot": "time per token"}


def write_phase_page(
    record: Mapping[str, Any], path: Path, result: Mapping[str, Any] | None = None
) -> None:
    """Writes the page; a result makes it phase 2. Raises ResultError, StorageError."""
    write_text(path, build_phase_page(record, result))


def build_phase_page(record: Mapping[str, Any], result: Mapping[str, Any] | None = None) -> str:
    """The whole page as text. Raises ResultError for a record or result of another form."""
    if record.get("format") != _FORMAT:
        raise ResultError(
            f"the record's format is {record.get('format')!r}", expected=repr(_FORMAT)
        )
    forecast = record["forecast"]
    if result is not None:
        require_format(result)
        _require_same_contest(forecast, result)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    measured = None if result is None else pick_number(result, "score", "value")
    page = environment.get_template("phase.html.j2").render(
        css=Markup((_TEMPLATES / "phase.css").read_text(encoding="utf-8")),
        record=record,
        forecast=forecast,
        phase=1 if result is None else 2,
        paragraphs=_split,
        provisional=[n for n in forecast["provisional"] if n.split(".")[0] in _USED],
        score=record["score"],
        terms=_list_terms(record),
        described=[(title, lines) for title, lines in record["described"]],
        headline=None if result is None else build_headline(result),
        compared=[] if result is None else _compare(record, result),
        notes=[] if result is None else [*_tell_other(forecast, result), *list_notes(result)],
        tiles=_build_tiles(forecast, result),
        curve=draw_score_curve(record, measured=_measured_point(result, measured)),
        memory=draw_memory(_memory_rows(forecast, result), "Draft memory by kind"),
        number=format_number,
        clean=clean_text,
    )
    return page if page.endswith("\n") else page + "\n"


def _require_same_contest(forecast: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    found = pick_text(result, "rules", "name")
    if found != forecast["rules"]:
        raise ResultError(
            f"the run is scored by {found}",
            where="result.json: rules.name",
            expected=f"{forecast['rules']}, as the report's source says",
        )


def _tell_other(forecast: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Where the run may not be of what the report is about; names of targets may differ in form."""
    name = pick_text(result, "target", "name") or "a target without a name"
    found = []
    if name.lower() != str(forecast["target"]).lower():
        found.append(f"The run's target is called {name}, the report's {forecast['target']}.")
    k = pick_number(result, "arms", "candidate", "engine", "num_speculative_tokens")
    foreseen = forecast["design"]["num_speculative_tokens"]
    if k is not None and k != foreseen:
        found.append(f"The run drafted {k:.0f} tokens a step, the report's design {foreseen}.")
    return found


def _build_tiles(
    forecast: Mapping[str, Any], result: Mapping[str, Any] | None
) -> list[dict[str, str]]:
    """Draft memory and step time: measured where they were, else foreseen, and said which."""
    context = f"one sequence of {forecast['memory']['context_tokens']:,} tokens"
    memory, base = forecast["memory"]["total_bytes"], forecast["baseline_memory"]["total_bytes"]
    step, base_step = forecast["step"]["step_ms"], forecast["baseline_step"]["step_ms"]
    source = "roofline" if forecast["step_source"] is None else "fitted model"
    tiles = [
        {
            "title": "Draft memory M, forecast",
            "value": f"{memory / 1e9:.2f} GB",
            "note": f"baseline {base / 1e9:.2f} GB, {context}",
        },
        {
            "title": f"Step time, {source}",
            "value": f"{step:.1f} ms",
            "note": f"baseline {base_step:.1f} ms, target alone"
            f" {forecast['plain_step']['step_ms']:.1f} ms a token",
        },
    ]
    if result is None:
        return tiles
    own = pick_number(result, "arms", "candidate", "memory", "total_bytes")
    if own is not None:
        tiles[0] = {
            "title": "Draft memory M, measured",
            "value": _size(own),
            "note": f"{_size(memory)} was foreseen, {context}",
        }
    own = pick_number(result, "arms", "candidate", "step_ms")
    if own is not None:
        tiles[1] = {
            "title": "Step time, measured",
            "value": f"{own:.1f} ms",
            "note": f"{step:.1f} ms was foreseen",
        }
    return tiles


def _size(num_bytes: float) -> str:
    if num_bytes >= 1e8:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,.0f} bytes"


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def _list_terms(record: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "name": _TERMS[term["name"]],
            "ratio": format_number(term["ratio"]),
            "cap": "none" if term["cap"] is None else format_number(term["cap"], 1),
            "weight": format_number(term["weight"], 2),
            "points": format_number(term["points"], 1),
        }
        for term in record["terms"]
    ]


def _measured_point(
    result: Mapping[str, Any] | None, score: float | None
) -> tuple[float, float] | None:
    if result is None or score is None:
        return None
    tau = pick_number(result, "arms", "candidate", "tau", "value")
    return None if tau is None else (tau, score)


def _memory_rows(
    forecast: Mapping[str, Any], result: Mapping[str, Any] | None
) -> list[tuple[str, list[tuple[str, float]]]]:
    rows = [
        ("design", _foreseen_parts(forecast["memory"])),
        ("baseline", _foreseen_parts(forecast["baseline_memory"])),
    ]
    if result is not None:
        for name, arm in (("measured", "candidate"), ("its base", "baseline")):
            parts = [
                (kind, pick_number(result, "arms", arm, "memory", key)) for kind, key in _PARTS
            ]
            known = [(kind, max(size, 0.0)) for kind, size in parts if size is not None]
            if known:
                rows.append((name, known))
    return rows


def _foreseen_parts(memory: Mapping[str, Any]) -> list[tuple[str, float]]:
    values = {**memory["sizes"], **memory}
    return [(kind, max(float(values[key]), 0.0)) for kind, key in _PARTS]


def _compare(record: Mapping[str, Any], result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Foreseen beside measured: score, and the ratio of each term."""
    score = record["score"]
    measured = pick_number(result, "score", "value")
    rows = [
        {
            "name": "score",
            "foreseen": f"{score['expected']:.1f} ({score['low']:.1f} to {score['high']:.1f})",
            "measured": _with_interval(result, ("score",), 1),
            "off": _off(score["expected"], measured),
        }
    ]
    terms = {term["name"]: term for term in record["terms"]}
    for shown in build_terms(result):
        if shown.key not in terms:
            continue
        foreseen = terms[shown.key]["ratio"]
        rows.append(
            {
                "name": f"ratio of {_TERMS[shown.key]}",
                "foreseen": format_number(foreseen),
                "measured": _with_interval(result, ("ratios", shown.key), 3),
                "off": _off(foreseen, pick_number(result, "ratios", shown.key, "value")),
            }
        )
    return rows


def _with_interval(result: Mapping[str, Any], keys: tuple[str, ...], digits: int) -> str:
    value = pick_number(result, *keys, "value")
    low, high = pick_number(result, *keys, "low"), pick_number(result, *keys, "high")
    text = format_number(value, digits)
    if value is None or low is None or high is None:
        return text
    return f"{text} ({low:.{digits}f} to {high:.{digits}f})"


def _off(foreseen: float, measured: float | None) -> str:
    return "-" if measured is None or not measured else f"{foreseen / measured - 1:+.1%}"
