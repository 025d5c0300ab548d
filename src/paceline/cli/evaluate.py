"""paceline eval, score and report: measure a draft, recompute its score, show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import console, say
from paceline.cli.data import THINKING_HELP
from paceline.data import Thinking
from paceline.errors import PlanError

__all__ = ["evaluate", "report", "score"]


def evaluate(
    draft: Annotated[
        str,
        typer.Argument(help="A draft folder, a bundled draft, native, ngram, suffix or none."),
    ],
    target: Annotated[str, typer.Option("--target", help="A folder or a bundled name.")],
    out: Annotated[Path, typer.Option("--out", help="The run folder; an unfinished one goes on.")],
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="What scores 100: a draft, ngram, native (an MTP head)."),
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="A JSONL file or a bundled prompt set.")
    ] = "held-out",
    rules: Annotated[str, typer.Option("--rules", help="Rules by name or file.")] = "emc2-2027",
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--k", min=1, help="Drafted tokens a step; else from the rules."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=2, help="Longest answer; else from the rules.")
    ] = None,
    thinking: Annotated[Thinking, typer.Option("--thinking", help=THINKING_HELP)] = "none",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; found by itself.")
    ] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain/--no-plain", help="Serve the target alone too; compare the texts."),
    ] = True,
    replay: Annotated[
        bool,
        typer.Option("--replay/--no-replay", help="Check trained against served acceptance."),
    ] = True,
    cycles: Annotated[
        int | None,
        typer.Option("--cycles", min=1, help="Fresh servers in A B B A blocks, so many times."),
    ] = None,
    stop_at: Annotated[
        float | None,
        typer.Option(
            "--stop-at", help="Stop once the score's half-width is this; --cycles is the most."
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, max=2**32 - 1, help="Of the arms' order and of the resamples."
        ),
    ] = 0,
    noise_floor: Annotated[
        bool,
        typer.Option("--noise-floor", help="Measure the draft against itself; keep what differs."),
    ] = False,
) -> None:
    """Measure and score a draft on unmodified vLLM.

    Acceptance, memory, time per token and fidelity to the target's own text, beside a baseline.
    Without --cycles the run is a quick one: all servers side by side, every prompt once.
    """
    from paceline.cli.measure import measure_drafts
    from paceline.eval import Cycles
    from paceline.report import print_report, write_report

    if stop_at is not None and (cycles is None or stop_at <= 0):
        raise PlanError(
            f"--stop-at {stop_at:g}" + (" without --cycles" if cycles is None else ""),
            expected="a width above 0, and --cycles for the most cycles there may be",
        )
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
        thinking=thinking,
        cycles=None if cycles is None else Cycles(num_cycles=cycles, stop_at=stop_at),
        against_itself=noise_floor,
        seed=seed,
    )
    print_report(result, console)
    say(f"report: {write_report(out)}")


def score(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Recompute the score of a run from its files alone."""
    from paceline.eval import score_run
    from paceline.report import render_score_table

    result = score_run(run)
    if as_json:
        typer.echo(json.dumps(result["score"], indent=2))
    else:
        console.print(render_score_table(result))


def report(
    run: Annotated[Path | None, typer.Argument(help="A run folder.")] = None,
    phase_1: Annotated[
        Path | None, typer.Option("--phase1", help="REPORT.toml: a team's report of forecasts.")
    ] = None,
    phase_2: Annotated[
        Path | None,
        typer.Option("--phase2", help="REPORT.toml with the run folder's figures in their place."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of a team's report.")] = None,
) -> None:
    """Write a run's report.html again, or a team's report."""
    from paceline.records import read_json
    from paceline.report import print_report, write_report

    source = phase_1 or phase_2
    if (phase_1 is not None and (phase_2 is not None or run is not None)) or (
        source is None and (run is None or out is not None)
    ):
        raise PlanError(
            "these go together: RUN; --phase1 REPORT.toml --out DIR; RUN --phase2 REPORT.toml"
            " --out DIR",
            expected="one of the three",
        )
    if source is not None:
        from paceline.cli.phase_report import write_phase_report

        if out is None or (phase_2 is not None and run is None):
            raise PlanError(
                "a folder is missing", expected="--out DIR, and with --phase2 the run folder"
            )
        write_phase_report(source, out, run)
        return
    assert run is not None
    path = write_report(run)
    print_report(read_json(run / "result.json"), console)
    say(f"report: {path}")
