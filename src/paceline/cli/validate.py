"""paceline validate: is this draft folder acceptable, and if not, what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import console, plural, print_facts, print_hanging, say

if TYPE_CHECKING:
    from paceline.validate import Finding, Report, Rule

__all__ = ["print_findings", "validate"]


def validate(
    draft: Annotated[
        str | None, typer.Argument(help="A draft folder or a bundled draft's name.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="The target the draft is for.")
    ] = None,
    rules: Annotated[
        str | None, typer.Option("--rules", help="Contest rules to check against, e.g. emc2-2027.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every tensor's values too.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Start it on vLLM in a sandbox, and look at it.")
    ] = False,
    run_tokens: Annotated[
        int | None,
        typer.Option("--run-tokens", help="Its long prompt; else the contest's context."),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option("--family", help="Family of a folder without spec.json, as vLLM gets it."),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Drafted tokens a step of such a folder.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings exit with 1.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write a JUnit XML file for CI.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="RULE", help="Explain one rule, or 'all', and stop."),
    ] = None,
) -> None:
    """Check a draft folder: files, formats, fit to its target.

    Exit 0 for pass and warn (1 for warn under --strict), 2 for fail.
    """
    from paceline.draft import resolve_draft
    from paceline.errors import DraftError
    from paceline.records import write_text
    from paceline.rules import read_rules
    from paceline.target import read_target
    from paceline.validate import render_junit, validate_draft

    if explain is not None:
        _explain(
            explain,
            as_json,
            alone=not (draft or target or rules or deep or run or family or k or strict or junit),
        )
        return
    if draft is None:
        raise DraftError(
            "no draft was named",
            where="paceline validate",
            expected="a draft folder or a bundled draft's name",
            fix="paceline validate DRAFT --target TARGET",
        )
    facts = read_target(target) if target else None
    contest = read_rules(rules) if rules else None
    folder = resolve_draft(draft)
    by_hand = {"family": family, "num_speculative_tokens": k} if family or k else None
    report = validate_draft(
        folder, target=facts, rules=contest, deep=deep, run=run, by_hand=by_hand
    )
    if run or run_tokens is not None:
        from paceline.cli.run_draft import add_run

        report = add_run(
            report,
            folder,
            facts,
            contest,
            run=run,
            run_tokens=run_tokens,
            by_hand=by_hand,
            quiet=as_json,
        )
    if junit is not None:
        write_text(junit, render_junit(report, name=draft, strict=strict))
    if as_json:
        typer.echo(json.dumps(report.to_json_dict(), indent=2, ensure_ascii=False))
    else:
        print_findings(report)
    if report.verdict == "fail":
        raise typer.Exit(2)
    if report.verdict == "warn" and strict:
        raise typer.Exit(1)


_SEVERITIES = ("error", "warning", "note")
_STYLE = {"error": "bold red", "warning": "yellow", "note": "dim"}
_VERDICT_STYLE = {"fail": "bold red", "warn": "yellow", "pass": "green"}


def print_findings(report: Report) -> None:
    """Findings grouped by file: the file with the worst finding first, its worst finding first."""
    from rich.text import Text

    for file, findings in _group_by_file(report.findings):
        console.print(Text(file or "the folder", style="bold"))
        for finding in findings:
            print_hanging(
                Text.assemble(
                    (f"  {finding.severity}", _STYLE[finding.severity]),
                    (f" {finding.rule}  ", "dim"),
                ),
                " ".join(_sentence(part) for part in (_complete(finding), finding.fix) if part),
                indent=4,
            )
    bad = next((f.rule for f in report.findings if f.severity != "note"), None)
    if bad is not None:
        say(f"`paceline validate --explain {bad}` says why there is such a rule.")
    counts = [
        plural(sum(1 for f in report.findings if f.severity == severity), severity)
        for severity in _SEVERITIES
    ]
    verdict = Text.assemble("verdict: ", (report.verdict, _VERDICT_STYLE[report.verdict]))
    console.print(verdict.append(f" ({', '.join(counts)})"), soft_wrap=True)


def _complete(finding: Finding) -> str:
    """The message, with what was found and expected where it does not say so itself."""
    text = finding.message
    if finding.severity == "note":
        return text
    if finding.where and finding.where not in text and finding.where not in finding.fix:
        text = f"{finding.where}: {text}"
    ends = ""
    if finding.found not in (text + finding.file) and len(finding.found) <= 60:
        ends += f"; found {finding.found}"
    if finding.expected and finding.expected not in text:
        ends += f"; expected {finding.expected}"
    return text.removesuffix(".") + ends if ends else text


def _group_by_file(findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    groups: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda f: (_SEVERITIES.index(f.severity), f.file)):
        groups.setdefault(finding.file, []).append(finding)
    return list(groups.items())


def _explain(rule_id: str, as_json: bool, *, alone: bool) -> None:
    """Prints one row of the rule table, or all of them in short; as JSON in full."""
    from rich.text import Text

    from paceline.errors import RulesError
    from paceline.validate import RULES, find_rule

    if not alone:
        raise RulesError(
            "--explain checks no draft",
            where="--explain",
            expected="no other argument or option but --json",
            fix="Give one or the other.",
        )
    shown = list(RULES.values()) if rule_id == "all" else [find_rule(rule_id)]
    if as_json:
        typer.echo(json.dumps([asdict(rule) for rule in shown], indent=2, ensure_ascii=False))
        return
    if rule_id != "all":
        (rule,) = shown
        print_facts(f"{rule.rule_id}: {rule.summary}", _list_facts(rule))
        return
    last = None
    for rule in shown:
        if rule.group != last:
            say(f"{chr(10) if last else ''}{rule.group}")
            last = rule.group
        head = Text.assemble(
            f"  {rule.rule_id:<16}", (f"{rule.severity:<9}", _STYLE[rule.severity])
        )
        print_hanging(head, rule.summary, indent=27)


def _list_facts(rule: Rule) -> list[tuple[str, str]]:
    from paceline.validate.rules import name_input

    facts = {key: value for key, value in asdict(rule).items() if isinstance(value, str)}
    shown = [(key, facts[key]) for key in ("severity", "why", "message", "fix")]
    for label, names in (("needs", rule.needs), ("in part needs", rule.partly)):
        if names:
            shown.append((label, ", ".join(map(name_input, names))))
    module, _, function = rule.by.rpartition(".")
    return [*shown, ("checked by", f"paceline.{module}: {function}")]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."
