"""The report on a terminal: plain at 80 columns, and complete without colour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from paceline.report.fields import require_format
from paceline.report.formats import NOT_MEASURED
from paceline.report.score_view import (
    Headline,
    build_headline,
    build_terms,
    list_deviations,
    list_notes,
    list_provisional,
    list_replay_lines,
    name_draft,
)
from paceline.report.settings_view import build_setup_rows
from paceline.report.tables import (
    Table,
    build_acceptance_table,
    build_category_table,
    build_fidelity_table,
    build_memory_table,
    build_position_table,
    build_timing_table,
)
from paceline.report.trust_view import build_slices_table, describe_protocol, list_trust_lines

__all__ = ["print_report", "render_score_table"]

_STATE_STYLE = {
    "ranked": "bold green",
    "unranked": "bold yellow",
    "withheld": "bold red",
    "not scored": "bold",
}


def render_score_table(result: Mapping[str, Any]) -> RenderableType:
    """The score, its gate and its three terms: a result.json's content -> a rich renderable.

    Raises ResultError when a field is of the wrong kind.
    """
    require_format(result)
    headline = build_headline(result)
    parts: list[RenderableType] = [_headline_text(headline)]
    parts += [_indented(reason) for reason in headline.reasons]
    parts += [Text(f"Gate   {headline.gate}"), Text(f"Rules  {headline.rules}")]
    provisional = list_provisional(result)
    if provisional:
        names = ", ".join(provisional)
        parts.append(_indented(f"provisional, not yet published: {names}", "yellow"))
    return Group(*parts, Text(""), _terms_table(result))


def print_report(result: Mapping[str, Any], console: Console) -> None:
    """Prints the whole report. Raises ResultError when a field is of the wrong kind."""
    require_format(result)
    console.print()
    setup = RichTable.grid(padding=(0, 2, 0, 0))
    setup.add_row(Text("candidate", style="dim"), Text(name_draft(result, "candidate"), "bold"))
    setup.add_row(Text("baseline", style="dim"), Text(name_draft(result, "baseline")))
    for label, value in (*build_setup_rows(result), ("protocol", describe_protocol(result))):
        setup.add_row(Text(label, style="dim"), Text(value))
    console.print(setup)
    console.print()
    console.print(render_score_table(result))
    trust = list_trust_lines(result)
    if trust:
        _print_lines(console, "How far to trust it", trust)
    for table in (
        build_acceptance_table(result),
        build_position_table(result),
        build_category_table(result),
        *_slices(result),
        build_timing_table(result),
        build_memory_table(result),
        build_fidelity_table(result),
    ):
        console.print(_render(table))
    _print_lines(console, "Trained against served", list_replay_lines(result))
    deviations = list_deviations(result)
    if deviations:
        _print_lines(console, "Differs from the rules", deviations)
    _print_lines(console, "Notes", list_notes(result) or ("none",))


def _slices(result: Mapping[str, Any]) -> tuple[Table, ...]:
    table = build_slices_table(result)
    return (table,) if table.rows else ()


def _headline_text(headline: Headline) -> Text:
    text = Text("Score  ")
    text.append(headline.score, style="bold")
    if headline.interval:
        text.append(f"  ({headline.interval})" if headline.interval != NOT_MEASURED else "")
    text.append(f"  {headline.state.upper()}", style=_STATE_STYLE[headline.state])
    return text


def _indented(text: str, style: str = "") -> Padding:
    return Padding(Text(text, style=style), (0, 0, 0, 7), expand=False)


def _terms_table(result: Mapping[str, Any]) -> RichTable:
    table = RichTable(
        box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, show_footer=True
    )
    headline = build_headline(result)
    footers = (
        "score",
        "",
        "",
        "",
        "",
        "",
        "-" if headline.score == NOT_MEASURED else headline.score,
    )
    names = ("term", "candidate", "baseline", "ratio", "capped", "weight", "points")
    for name, footer in zip(names, footers, strict=True):
        table.add_column(
            name,
            footer=footer,
            justify="left" if name == "term" else "right",
            header_style="dim",
            footer_style="bold",
            overflow="fold",
            no_wrap=name == "term",
        )
    for term in build_terms(result):
        interval = term.interval.replace(" to ", "-")
        ratio = term.ratio if interval == NOT_MEASURED else f"{term.ratio}\n{interval}"
        weight = "-" if term.weight is None else f"{term.weight * 100:g} %"
        capped = "-" if term.capped == NOT_MEASURED else term.capped
        if term.is_capped:
            capped += f"\ncap {term.cap}"
        points = "-" if term.points is None else f"{term.points:.2f}"
        label = f"{term.label}\n{term.unit}"
        table.add_row(label, term.candidate, term.baseline, ratio, capped, weight, points)
    return table


def _render(table: Table) -> RenderableType:
    if not table.rows or len(table.columns) < 2:
        body: RenderableType = Text(NOT_MEASURED)
    else:
        body = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        for index, name in enumerate(table.columns):
            body.add_column(
                Text(name, style="dim"),
                justify="right" if index else "left",
                overflow="fold",
            )
        for row in table.rows:
            body.add_row(*(Text(cell) for cell in row))
    note = [Text(table.note, style="dim")] if table.note else []
    return Group(Text(f"\n{table.title}", style="bold"), body, *note)


def _print_lines(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
