"""report.html: one self-contained page out of a run folder's JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from paceline.errors import ResultError
from paceline.records import read_json, read_jsonl, write_text
from paceline.report.definitions import DEFINITIONS
from paceline.report.fields import (
    list_arms,
    pick_dict,
    pick_list,
    pick_number,
    pick_text,
    require_format,
)
from paceline.report.formats import NOT_MEASURED, clean_text, format_number, format_token
from paceline.report.plots import (
    draw_categories,
    draw_mark,
    draw_memory,
    draw_paired,
    draw_positions,
    draw_times,
)
from paceline.report.samples import build_samples
from paceline.report.score_view import (
    build_headline,
    build_terms,
    list_deviations,
    list_notes,
    list_provisional,
    list_replay_lines,
    name_draft,
)
from paceline.report.settings_view import (
    build_engine_table,
    build_setup_rows,
    build_version_rows,
    list_draft_facts,
)
from paceline.report.tables import (
    MEMORY_PARTS,
    build_acceptance_table,
    build_category_table,
    build_fidelity_table,
    build_memory_table,
    build_position_table,
    build_timing_table,
    list_drafting_arms,
    read_shares,
)
from paceline.report.times import pair_times, read_times
from paceline.report.trust_view import build_slices_table, describe_protocol, list_trust_lines

__all__ = ["build_page", "write_report"]

Result = Mapping[str, Any]
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_CASES = 20


def write_report(run_dir: str | Path) -> Path:
    """Writes report.html into a run folder and returns its path.

    Reads result.json and, where present, requests.jsonl. Raises ResultError for a folder without
    a readable result and StorageError when the page cannot be written.
    """
    run_dir = Path(run_dir)
    result = read_json(
        run_dir / "result.json", expected="a run folder, as `paceline eval --out` writes it"
    )
    requests_path = run_dir / "requests.jsonl"
    rows = read_jsonl(requests_path) if requests_path.exists() else []
    path = run_dir / "report.html"
    write_text(path, build_page(result, rows))
    return path


def build_page(result: Result, requests: Iterable[Mapping[str, Any]] = ()) -> str:
    """The whole page as text; the same input gives the same bytes. Raises ResultError."""
    require_format(result)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    times = read_times(requests, pick_dict(result, "aliases"))
    page = environment.get_template("report.html.j2").render(
        css=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        not_measured=NOT_MEASURED,
        arms=[clean_text(arm, limit=24) for arm in list_drafting_arms(result)],
        candidate=name_draft(result, "candidate"),
        baseline=name_draft(result, "baseline"),
        created_at=_write_moment(pick_text(result, "provenance", "created_at") or ""),
        headline=build_headline(result),
        terms=build_terms(result),
        bars=_build_bars(result),
        provisional=list_provisional(result),
        notes=list_notes(result),
        deviations=list_deviations(result),
        replay=list_replay_lines(result),
        trust=list_trust_lines(result),
        slices=build_slices_table(result),
        setup=[*build_setup_rows(result), ("protocol", describe_protocol(result))],
        acceptance=build_acceptance_table(result),
        positions=build_position_table(result),
        categories=build_category_table(result),
        heat=_build_heat(result),
        timing=build_timing_table(result),
        memory=build_memory_table(result),
        fidelity=build_fidelity_table(result),
        cases=_list_cases(result),
        samples=build_samples(result),
        num_samples=len(pick_list(result, "samples")),
        engine=build_engine_table(result),
        drafts=list_draft_facts(result),
        versions=build_version_rows(result),
        definitions=DEFINITIONS,
        plots=_draw_plots(result, times),
        memory_parts=MEMORY_PARTS,
        paired=_summarise_pairs(pair_times(times)),
        mark=draw_mark,
    )
    return page if page.endswith("\n") else page + "\n"


def _build_bars(result: Result) -> dict[str, Any] | None:
    """Widths in percent for the two bars of points; None without three measured terms."""
    terms = build_terms(result)
    sizes = [(term.weight, term.points) for term in terms]
    if any(weight is None or points is None for weight, points in sizes):
        return None
    total = sum(points or 0.0 for _, points in sizes)
    scale = max(total, 100.0) * 1.02

    def widths(values: Iterable[float]) -> list[dict[str, Any]]:
        return [
            {
                "key": term.key,
                "width": f"{max(value, 0.0) / scale * 100:.2f}",
                "text": format_number(value, 1) if value / scale > 0.1 else "",
            }
            for term, value in zip(terms, values, strict=True)
        ]

    return {
        "candidate": widths(points or 0.0 for _, points in sizes),
        "baseline": widths((weight or 0.0) * 100 for weight, _ in sizes),
        "total": format_number(total, 1),
    }


def _build_heat(result: Result) -> list[dict[str, Any]]:
    """Acceptance by position and category, one grid an arm; shade is the share in percent."""
    grids = []
    for arm in list_drafting_arms(result):
        by_category = pick_dict(result, "arms", arm, "position_acceptance_by_category")
        rows = []
        for name in by_category:
            shares = read_shares(by_category, name)
            cells = [
                {"text": "-" if share is None else f"{share:.2f}", "shade": round(_unit(share))}
                for share in shares
            ]
            rows.append((clean_text(name, limit=40), cells))
        if rows:
            depth = max(len(cells) for _, cells in rows)
            grids.append({"arm": clean_text(arm, limit=24), "rows": rows, "depth": depth})
    return grids


def _unit(share: float | None) -> float:
    return 0.0 if share is None else min(max(share, 0.0), 1.0) * 100


def _draw_plots(result: Result, times: Mapping[str, Mapping[str, float]]) -> dict[str, Markup]:
    """The plots that have something to show, by name."""
    arms = list_drafting_arms(result)
    plots: dict[str, Markup] = {}
    for key, label in (
        ("position_acceptance", "Share of steps held, by draft position"),
        ("conditional_acceptance", "Share held given that earlier positions held"),
    ):
        series = {arm: read_shares(result, "arms", arm, "vllm", key) for arm in arms}
        series = {arm: shares for arm, shares in series.items() if shares}
        if series:
            plots[key] = draw_positions(series, label)
    rows = _category_rows(result, arms)
    if rows:
        plots["categories"] = draw_categories(rows, "Acceptance length by category")
    timed = {
        clean_text(arm, limit=24): list(times[arm].values())
        for arm in list_arms(result)
        if arm in times
    }
    if timed:
        plots["times"] = draw_times(timed, "Time per token of each request")
    ratios = pair_times(times)
    if ratios:
        plots["paired"] = draw_paired(ratios, "Baseline over candidate time per token, by prompt")
    split = [(clean_text(arm, limit=24), _memory_split(result, arm)) for arm in arms]
    split = [(arm, parts) for arm, parts in split if parts]
    if split:
        plots["memory"] = draw_memory(split, "Draft memory by kind")
    return plots


def _category_rows(
    result: Result, arms: Iterable[str]
) -> list[tuple[str, dict[str, float | None]]]:
    rows: dict[str, dict[str, float | None]] = {}
    for arm in arms:
        by_category = pick_dict(result, "arms", arm, "tau", "by_category")
        for name in by_category:
            value = pick_number(by_category, name, "value")
            if value is not None:
                rows.setdefault(clean_text(name, limit=40), {})[arm] = value
    return list(rows.items())


def _memory_split(result: Result, arm: str) -> list[tuple[str, float]]:
    split = []
    for key, _ in MEMORY_PARTS:
        size = pick_number(result, "arms", arm, "memory", key)
        if size is not None:
            split.append((key.removesuffix("_bytes"), size))
    return split


def _summarise_pairs(ratios: list[float]) -> str:
    if not ratios:
        return ""
    if all(ratio == 1 for ratio in ratios):
        return "Candidate and baseline are one measurement."
    faster = sum(ratio > 1 for ratio in ratios)
    return f"The candidate is faster on {faster} of {len(ratios)} prompts."


def _write_moment(text: str) -> str:
    """2027-02-03T10:20:30Z -> 2027-02-03 10:20 UTC; anything else as it is."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\dZ", text)
    return f"{match[1]} {match[2]} UTC" if match else clean_text(text, limit=40)


def _list_cases(result: Result) -> list[tuple[str, ...]]:
    """First differences, real ones before near ties: arm, id, kind, position, gap, two tokens."""
    cases: list[tuple[str, ...]] = []
    for arm in list_arms(result):
        for index, case in enumerate(pick_list(result, "fidelity", arm, "cases")):
            if not isinstance(case, Mapping):
                raise ResultError(
                    "is not an object", where=f"result.json: fidelity.{arm}.cases.{index}"
                )
            kind = clean_text(pick_text(case, "kind") or "", limit=20)
            cases.append(
                (
                    clean_text(arm, limit=24),
                    clean_text(pick_text(case, "id") or "", limit=40),
                    kind.replace("_", " "),
                    format_number(pick_number(case, "position"), 0),
                    _write_gap(case, kind),
                    _write_token(case.get("plain_token")),
                    _write_token(case.get("token")),
                )
            )
    cases.sort(key=lambda row: row[2] != "real fork")
    return cases[:_MAX_CASES]


def _write_gap(case: Mapping[str, Any], kind: str) -> str:
    gap = pick_number(case, "gap")
    if gap is None:
        return "beyond the best" if kind == "real_fork" else "-"
    return format_number(gap)


def _write_token(token: object) -> str:
    """A token's text, or its id as a number; "-" where the text had ended."""
    if token is None:
        return "-"
    return f"id {token}" if isinstance(token, int) else format_token(token)
