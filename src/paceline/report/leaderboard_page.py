"""The leaderboard as a site of static files: ranking, contest pages, and every entry's report.

index.html  contest.html  submit.html  entries/<entry>/index.html  leaderboard.json
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from paceline.errors import ResultError
from paceline.records import atomic_folder, read_jsonl, write_json, write_text
from paceline.report.contest_view import build_contest
from paceline.report.leaderboard import (
    Row,
    describe_field,
    rank_entries,
    read_noise,
)
from paceline.report.leaderboard_plots import draw_field
from paceline.report.leaderboard_read import Submitted
from paceline.report.leaderboard_view import (
    build_categories,
    build_glance,
    build_marks,
    build_record,
    build_rows,
    name_folders,
)
from paceline.report.page import build_page

__all__ = ["build_leaderboard", "write_leaderboard"]

RECORD_NAME = "leaderboard.json"
_TEMPLATES = Path(__file__).parent / "templates"


def write_leaderboard(
    entries: Sequence[Submitted],
    rules: Mapping[str, Any],
    out: str | Path,
    *,
    places: Mapping[str, tuple[int, int]] | None = None,
) -> list[Row]:
    """Writes the whole site, or nothing; an earlier one is replaced. Returns the ranked rows.

    rules: a contest's rules as plain data (`dataclasses.asdict`). places: see `rank_entries`.
    Raises ResultError for results of other rules and for a folder that holds something else.
    """
    out = Path(out)
    if out.exists() and any(out.iterdir()) and not (out / RECORD_NAME).exists():
        raise ResultError(
            "the folder holds something else",
            where=str(out),
            expected="a new folder, or one that `paceline leaderboard` wrote",
        )
    rows = rank_entries(entries, rules_sha256=str(rules["sha256"]), noise=read_noise(entries))
    folders = name_folders(rows)
    with atomic_folder(out, replace=True) as site:
        for name, page in build_leaderboard(rows, rules, is_paired=places is not None).items():
            write_text(site / name, page)
        for row in rows:
            if row.entry.result is not None:
                page = build_page(row.entry.result, _read_requests(row.entry))
                write_text(site / "entries" / folders[row.entry.identity] / "index.html", page)
        write_json(site / RECORD_NAME, build_record(rows, rules, folders))
    return rows


def _read_requests(entry: Submitted) -> list[dict[str, Any]]:
    """Times of single requests, for the report's plots; a judged entry has none to show."""
    path = entry.folder / "requests.jsonl" if entry.folder is not None else None
    return read_jsonl(path) if path is not None and path.exists() else []


def build_leaderboard(
    rows: Sequence[Row], rules: Mapping[str, Any], *, is_paired: bool
) -> dict[str, str]:
    """File name -> page. The same rows give the same bytes. is_paired: how ties were found."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _read("leaderboard.js")
    contest = build_contest(rules)
    folders = name_folders(rows)
    gate = rules["gate"]["minimum_tau_ratio"]
    shared = {
        "css": Markup(_read("report.css") + _read("leaderboard.css")),
        "contest": contest,
        "pages": (
            ("index.html", "Leaderboard"),
            ("contest.html", "Rules and dates"),
            ("submit.html", "How to submit"),
        ),
    }
    noise = read_noise([row.entry for row in rows])
    plots = {
        key: draw_field(
            build_marks(rows, key, folders),
            name=key,
            x_label=label,
            gate=gate,
            label=f"Acceptance length against {label}",
        )
        for key, label in (
            ("memory", "draft memory, baseline = 1"),
            ("time", "time per token, baseline = 1"),
        )
    }
    pages = {
        "index.html": environment.get_template("leaderboard.html.j2").render(
            **shared,
            policy=f"script-src 'sha256-{_hash(script)}'",
            script=Markup(script),
            rows=build_rows(rows, folders),
            is_paired=is_paired,
            glance=build_glance(describe_field(rows), rows, noise),
            families=sorted({row.entry.family for row in rows}),
            categories=build_categories(rows, folders),
            plots=plots,
        ),
    }
    for name in ("contest", "submit"):
        template = environment.get_template(f"{name}.html.j2")
        pages[f"{name}.html"] = template.render(**shared, policy="script-src 'none'")
    return {name: page if page.endswith("\n") else page + "\n" for name, page in pages.items()}


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """What the page's own policy lets run: this script and no other."""
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
