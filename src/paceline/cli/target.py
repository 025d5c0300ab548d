"""paceline target: what a draft must match."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.console import print_facts

__all__ = ["app"]

app = typer.Typer(help="Look at a target model.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    pass


@app.command("show")
def show(
    target: Annotated[str, typer.Argument(help="A folder, or a bundled name such as smollm2.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the facts a draft must match."""
    from paceline.target import describe_target, read_target

    facts = read_target(target)
    if as_json:
        import dataclasses
        import json

        typer.echo(json.dumps(dataclasses.asdict(facts), indent=2, default=str))
        return
    print_facts(f"Target {facts.name}", describe_target(facts))
