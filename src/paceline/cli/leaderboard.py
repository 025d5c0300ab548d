"""paceline leaderboard: result files -> a static site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import say

if TYPE_CHECKING:
    from paceline.report.leaderboard_read import Submitted

__all__ = ["leaderboard"]


def leaderboard(
    results: Annotated[
        list[Path], typer.Argument(help="Run folders, or a folder of `paceline judge publish`.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The site's folder; an earlier one goes.")],
    rules: Annotated[str, typer.Option("--rules", help="Rules by name or file.")] = "emc2-2027",
) -> None:
    """Rank results on a page, ties, plots and reports included.

    Ties are found by differences that are paired by prompt; where results cannot be paired, by
    each entry's own interval.
    """
    from dataclasses import asdict

    from paceline.report import list_ranked, read_submissions, write_leaderboard
    from paceline.rules import read_rules

    contest = read_rules(rules)
    entries = read_submissions(results)
    _recompute(entries)
    places = _compare(list_ranked(entries, rules_sha256=contest.sha256))
    rows = write_leaderboard(entries, asdict(contest), out, places=places)
    for row in rows:
        place = "-" if row.rank is None else str(row.rank)
        if row.is_tied:
            place += f" to {row.rank_worst}"
        score = "no score" if row.score is None else f"{row.score:.1f}"
        why = f"; {row.state}: {'; '.join(row.reasons)}" if row.state != "ranked" else ""
        team = f", {row.entry.team}" if row.entry.team else ""
        say(f"{place:>8}  {score:>8}  {row.entry.name}{team}{why}")
    num_ranked = sum(1 for row in rows if row.rank is not None)
    total = "1 entry" if len(rows) == 1 else f"{len(rows)} entries"
    say(f"leaderboard: {out / 'index.html'}: {total}, {num_ranked} ranked")


def _recompute(entries: Sequence[Submitted]) -> None:
    """Every score from its own file again. Raises ResultError for one that does not add up."""
    from paceline.eval import score_run

    for entry in entries:
        if entry.folder is not None:
            score_run(entry.folder)


def _compare(ranked: Sequence[Submitted]) -> dict[str, tuple[int, int]] | None:
    """Identity -> best and worst place; None where the results cannot be paired, which is told."""
    from paceline.errors import ResultError
    from paceline.eval import compare_runs

    folders = {str(entry.folder): entry.identity for entry in ranked}
    if len(folders) < 2:
        return None
    try:
        found = compare_runs(list(folders))
    except ResultError as problem:
        if problem.where != "compare":
            raise
        say(f"note: ties follow from each entry's own interval, not from pairs: {problem.what}")
        return None
    return {folders[run["run"]]: (run["rank"][0], run["rank"][1]) for run in found["runs"]}
