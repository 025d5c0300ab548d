"""A report as JUnit XML, which every CI system reads: one test case a rule."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from paceline.validate.report import Finding, Report
from paceline.validate.rules import RULES, Rule, name_input

__all__ = ["render_junit"]


def render_junit(report: Report, *, name: str, strict: bool = False) -> str:
    """The XML text. A rule fails with an error, under `strict` with a warning too.

    Milder findings of a rule are its output; a rule that lacked an input is skipped. `name` is
    what the suite is called, usually the draft folder.
    """
    by_rule: dict[str, list[Finding]] = {}
    for item in report.findings:
        by_rule.setdefault(item.rule, []).append(item)
    groups: dict[str, list[str]] = {}
    counts = {"failures": 0, "skipped": 0}
    for rule in RULES.values():
        found = by_rule.get(rule.rule_id, [])
        bad = [item for item in found if _is_failure(item, strict)]
        is_skipped = not found and rule.rule_id in report.unchecked
        counts["failures"] += bool(bad)
        counts["skipped"] += is_skipped
        groups.setdefault(rule.group, []).append(_render_case(rule, found, bad, is_skipped))
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites name="paceline validate" tests="{len(RULES)}"'
        f' failures="{counts["failures"]}" errors="0" skipped="{counts["skipped"]}">',
    ]
    for group, cases in groups.items():
        failures = sum("<failure" in case for case in cases)
        skipped = sum("<skipped" in case for case in cases)
        lines.append(
            f"<testsuite name={_attribute(f'{name}: {group}')}"
            f' tests="{len(cases)}" failures="{failures}" errors="0" skipped="{skipped}">'
        )
        lines += [*cases, "</testsuite>"]
    return "\n".join([*lines, "</testsuites>", ""])


def _is_failure(item: Finding, strict: bool) -> bool:
    return item.severity == "error" or (strict and item.severity == "warning")


def _render_case(
    rule: Rule, found: Sequence[Finding], bad: Sequence[Finding], is_skipped: bool
) -> str:
    head = f"<testcase classname={_attribute(rule.group)} name={_attribute(rule.rule_id)}"
    body = []
    if is_skipped:
        needs = " and ".join(map(name_input, rule.needs))
        body.append(f"<skipped message={_attribute(f'needs {needs}')}/>")
    for item in bad[:1]:  # one failure a case; its text holds all of them
        text = "\n".join(map(_describe, bad))
        body.append(
            f"<failure type={_attribute(item.severity)} message={_attribute(item.message)}>"
            f"{escape(text)}</failure>"
        )
    rest = [item for item in found if item not in bad]
    if rest:
        lines = "\n".join(f"{item.severity}: {_describe(item)}" for item in rest)
        body.append(f"<system-out>{escape(lines)}</system-out>")
    return f"{head}>{''.join(body)}</testcase>" if body else f"{head}/>"


def _describe(item: Finding) -> str:
    place = ": ".join(part for part in (item.file, item.where) if part)
    text = f"{place}: {item.message}" if place else item.message
    for label, value in (("found", item.found), ("expected", item.expected), ("fix", item.fix)):
        if value:
            text += f"\n  {label}: {value}"
    return text


def _attribute(text: str) -> str:
    """Quoted; a character that XML cannot hold has been escaped by show_text already."""
    return quoteattr("".join(char if char.isprintable() else "?" for char in text))
