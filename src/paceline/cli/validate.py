"""paceline validate: is this draft folder acceptable, and if not, what to do."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from paceline.cli.console import console, plural, print_hanging, say

__all__ = ["print_findings", "validate"]


def validate(
    draft: Annotated[str, typer.Argument(help="A draft folder or a bundled draft's name.")],
    target: Annotated[
        str | None, typer.Option("--target", help="The target the draft is for.")
    ] = None,
    rules: Annotated[
        str | None, typer.Option("--rules", help="Contest rules to check against, e.g. emc2-2027.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every tensor's values too.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings exit with 1.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a draft folder: files, formats, fit to its target.

    Exit 0 for pass and warn (1 for warn under --strict), 2 for fail.
    """
    from paceline.draft import resolve_draft
    from paceline.rules import read_rules
    from paceline.target import read_target
    from paceline.validate import validate_draft

    facts = read_target(target) if target else None
    limits = read_rules(rules).limits if rules else None
    report = validate_draft(resolve_draft(draft), target=facts, limits=limits, deep=deep)
    if as_json:
        typer.echo(json.dumps(report.to_json_dict(), indent=2, ensure_ascii=False))
    else:
        print_findings(report)
    if report.verdict == "fail":
        raise typer.Exit(2)
    if report.verdict == "warn" and strict:
        raise typer.Exit(1)


_STYLE = {"error": "bold red", "warning": "yellow", "note": "dim"}


def print_findings(report: object) -> None:
    """Findings grouped by file, worst first."""
    from rich.text import Text

    findings = sorted(
        getattr(report, "findings", ()),
        key=lambda f: (f.file, ("error", "warning", "note").index(f.severity), f.rule),
    )
    last_file = None
    for finding in findings:
        if finding.file != last_file:
            console.print(Text(finding.file or "the folder", style="bold"))
            last_file = finding.file
        print_hanging(
            Text.assemble(
                (f"  {finding.severity}", _STYLE[finding.severity]),
                (f" {finding.rule}  ", "dim"),
            ),
            " ".join(_sentence(part) for part in (finding.message, finding.fix) if part),
            indent=4,
        )
    counts = {
        severity: sum(1 for f in findings if f.severity == severity)
        for severity in ("error", "warning", "note")
    }
    summary = ", ".join(plural(n, severity) for severity, n in counts.items())
    say(f"verdict: {getattr(report, 'verdict', '?')} ({summary})")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."
