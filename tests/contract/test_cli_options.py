"""The command line is a contract: a new, renamed or removed option shows up here."""

from __future__ import annotations

import typer.main
from click import Command, Group

from paceline.cli.app import app

OPTIONS: dict[str, list[str]] = {"": ["--version"]}


def _walk(command: Command, path: str) -> dict[str, list[str]]:
    if isinstance(command, Group):
        found: dict[str, list[str]] = {}
        for name, child in command.commands.items():
            found |= _walk(child, f"{path} {name}".strip())
        return found
    names = sorted(
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    )
    return {path: names}


def test_options_are_frozen() -> None:
    assert _walk(typer.main.get_command(app), "") == OPTIONS
