"""Runs side by side on a terminal; each run has a letter, so that any folder name fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from paceline.report.fields import pick, pick_list, pick_number, pick_text
from paceline.report.formats import NOT_MEASURED, clean_text, format_interval, format_number

__all__ = ["render_comparison"]

Found = Mapping[str, Any]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FIGURES = {"score": "Score, points", "tau": "Acceptance ratio", "tpot": "Time ratio"}
_VERDICTS = {
    "real": "real",
    "noise": "noise: within the interval",
    "tie": "tie: within the noise floor",
    "unknown": "not measured: too few prompts",
}
_STYLES = {"real": "bold", "unknown": "yellow"}


def render_comparison(found: Found) -> RenderableType:
    """What `compare_runs` found -> a rich renderable of at most 80 columns."""
    runs = pick_list(found, "runs")
    letters = {str(run["run"]): _letter(index) for index, run in enumerate(runs)}
    parts: list[RenderableType] = [Text("Runs", style="bold")]
    for run in runs:
        name, folder = clean_text(run["candidate"], limit=40), clean_text(run["run"], limit=200)
        line = f"{letters[str(run['run'])]}  {name}, K = {run['k']}, in {folder}"
        parts.append(Padding(Text(line), (0, 0, 0, 2), expand=False))
    parts += [Text(""), _runs_table(runs, letters)]
    for run in runs:
        for arm, reasons in (run.get("withheld") or {}).items():
            text = "; ".join(clean_text(reason, limit=300) for reason in reasons)
            line = f"{letters[str(run['run'])]}: {clean_text(arm, limit=24)} withheld: {text}"
            parts.append(Padding(Text(line, style="red"), (0, 0, 0, 2), expand=False))
    for figure, title in _FIGURES.items():
        rows = [row for row in pick_list(found, "differences") if row["figure"] == figure]
        if rows:
            parts += [Text(f"\n{title}", style="bold"), _pairs_table(rows, letters, figure)]
    return Group(*parts, Text(""), *(Text(line, style="dim") for line in _notes(found)))


def _letter(index: int) -> str:
    return _LETTERS[index] if index < len(_LETTERS) else str(index + 1)


def _table(*columns: str) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(columns):
        justify = "right" if index else "left"
        table.add_column(Text(name, style="dim"), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _runs_table(runs: Any, letters: Mapping[str, str]) -> RichTable:
    table = _table("", "score", "interval", "rank", "acceptance", "memory", "time")
    for run in runs:
        value = pick_number(run, "score", "value")
        interval = format_interval(
            pick_number(run, "score", "low"), pick_number(run, "score", "high"), 1
        )
        score = "withheld" if run.get("withheld") else format_number(value, 1)
        ratios = (pick_number(run, "ratios", key, "value") for key in ("tau", "memory", "tpot"))
        table.add_row(
            letters[str(run["run"])],
            score,
            "-" if value is None else interval,
            _write_rank(run.get("rank")),
            *("-" if ratio is None else f"× {ratio:.3f}" for ratio in ratios),
        )
    return table


def _write_rank(rank: Any) -> str:
    if not rank:
        return "-"
    best, worst = rank
    return str(best) if best == worst else f"{best} to {worst}"


def _pairs_table(rows: Any, letters: Mapping[str, str], figure: str) -> RichTable:
    between = "less" if figure == "score" else "over"
    table = _table("", "difference" if figure == "score" else "ratio", "interval", "")
    digits = 2 if figure == "score" else 3
    for row in rows:
        verdict = pick_text(row, "verdict") or "unknown"
        value = pick_number(row, "value") or 0.0
        interval = format_interval(pick_number(row, "low"), pick_number(row, "high"), digits)
        table.add_row(
            f"{letters[row['first']]} {between} {letters[row['second']]}",
            f"{value:+.{digits}f}" if figure == "score" else f"× {value:.{digits}f}",
            "-" if interval == NOT_MEASURED else interval,
            Text(_VERDICTS[verdict], style=_STYLES.get(verdict, "")),
        )
    return table


def _notes(found: Found) -> list[str]:
    floor = pick_number(found, "noise_floor", "score")
    confidence = pick_number(found, "confidence") or 0.0
    lines = [
        f"Intervals hold for all pairs at once at {confidence * 100:g} %; prompts are paired.",
        "Noise floor of this machine: not measured (paceline eval --noise-floor)."
        if floor is None
        else f"Noise floor of this machine: {floor:.2f} points; smaller differences are ties.",
    ]
    if any(pick(run, "ranked") is False for run in pick_list(found, "runs")):
        lines.append("A run that is not ranked by its own rules is compared all the same.")
    return lines
