"""All commands in one place. Options are frozen by tests/contract/test_cli_options.py."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import (
    bench,
    compare,
    data,
    demo,
    evaluate,
    fetch,
    forecast,
    interchange,
    judge,
    leaderboard,
    quality,
    quantize,
    serve,
    submit,
    target,
    train,
    tune,
    validate,
)

__all__ = ["app"]

app = typer.Typer(
    name="paceline",
    help="Build, check, measure and serve drafts for speculative decoding on vLLM 0.31.0.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.add_typer(target.app, name="target")
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("validate")(validate.validate)
app.command("eval")(evaluate.evaluate)
app.command("score")(evaluate.score)
app.command("compare")(compare.compare)
app.command("report")(evaluate.report)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("quality")(quality.quality)
app.command("quantize")(quantize.quantize)
app.command("tune")(tune.tune)
app.command("forecast")(forecast.forecast)
app.command("submit")(submit.submit)
app.command("fetch")(fetch.fetch)
app.add_typer(interchange.app, name="draft")
app.add_typer(judge.app, name="judge")
app.command("leaderboard")(leaderboard.leaderboard)
