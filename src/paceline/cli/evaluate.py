"""paceline eval, score and report: measure a draft, recompute its score, show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import console, say

__all__ = ["evaluate", "report", "score"]


def evaluate(
    draft: Annotated[str, typer.Argument(help="A draft folder, a bundled draft, ngram or none.")],
    target: Annotated[str, typer.Option("--target", help="A folder or a bundled name.")],
    out: Annotated[Path, typer.Option("--out", help="The run folder; an unfinished one goes on.")],
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="What scores 100: a draft, ngram or none.")
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="A JSONL file or a bundled set.")
    ] = "held-out",
    rules: Annotated[str, typer.Option("--rules", help="Rules by name or file.")] = "emc2-2027",
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--k", min=1, help="Drafted tokens a step; from the rules.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=2, help="New tokens; from the rules.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.")] = None,
    plain: Annotated[
        bool, typer.Option(help="Serve the target alone as well, and compare the texts.")
    ] = True,
    replay: Annotated[
        bool, typer.Option(help="Check that trained acceptance equals served acceptance.")
    ] = True,
) -> None:
    """Measure a draft on unmodified vLLM: acceptance, memory, time, fidelity, score."""
    from paceline.cli.measure import measure_drafts
    from paceline.report import print_report, write_report

    result = measure_drafts(
        draft,
        baseline,
        target_name=target,
        prompts=prompts,
        rules_name=rules,
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        device=device,
        with_plain=plain,
        with_replay=replay,
        out=out,
    )
    print_report(result, console)
    say(f"report: {write_report(out)}")


def score(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Recompute the score of a run from its result.json alone."""
    from paceline.eval import score_run
    from paceline.report import render_score_table

    result = score_run(run)
    if as_json:
        typer.echo(json.dumps(result["score"], indent=2))
    else:
        console.print(render_score_table(result))


def report(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Write report.html of a run again and print the table."""
    from paceline.records import read_json
    from paceline.report import print_report, write_report

    path = write_report(run)
    print_report(read_json(run / "result.json"), console)
    say(f"report: {path}")
