"""paceline leaderboard: result files -> a static site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import say

__all__ = ["leaderboard"]


def leaderboard(
    results: Annotated[
        list[Path], typer.Argument(help="Run folders, or a folder of `paceline judge publish`.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The site's folder; an earlier one goes.")],
    rules: Annotated[str, typer.Option("--rules", help="Rules by name or file.")] = "emc2-2027",
) -> None:
    """Rank results on a page with ties, plots, every entry's report and the contest's rules."""
    from dataclasses import asdict

    from paceline.report import read_submissions, write_leaderboard
    from paceline.rules import read_rules

    rows = write_leaderboard(read_submissions(results), asdict(read_rules(rules)), out)
    for row in rows:
        place = "-" if row.rank is None else str(row.rank)
        if row.is_tied:
            place += f" to {row.rank_worst}"
        score = "no score" if row.score is None else f"{row.score:.1f}"
        why = f"; {row.state}: {'; '.join(row.reasons)}" if row.state != "ranked" else ""
        team = f", {row.entry.team}" if row.entry.team else ""
        say(f"{place:>8}  {score:>8}  {row.entry.name}{team}{why}")
    ranked = sum(1 for row in rows if row.rank is not None)
    entries = "1 entry" if len(rows) == 1 else f"{len(rows)} entries"
    say(f"leaderboard: {out / 'index.html'}: {entries}, {ranked} ranked")
