"""paceline compare: finished runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import console

__all__ = ["compare"]


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare runs: which differences are real and which are noise.

    Runs under unlike settings are refused, with what differs.
    """
    from paceline.eval import compare_runs
    from paceline.report import render_comparison

    found = compare_runs(runs)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console.print(render_comparison(found))
