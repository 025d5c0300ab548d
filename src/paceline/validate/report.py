"""Findings and the report that holds them: the fixed JSON contract of `paceline validate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.problems import Problem, show_text, show_value
from paceline.validate.rules import RULES

__all__ = ["Finding", "Report", "build_report", "finding", "from_problem"]

_ORDER = ("error", "warning", "note")
_MAX_OF_A_RULE = 100


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding. All fields are text, safe to print; "" where there is nothing to say."""

    rule: str
    severity: str
    file: str
    where: str
    found: str
    expected: str
    message: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """verdict: "fail" with any error, else "warn" with any warning, else "pass".

    unchecked: rules of which nothing was checked for want of an input; not part of the JSON.
    """

    verdict: str
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()

    def to_json_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "findings": [asdict(item) for item in self.findings]}


def finding(
    rule: str,
    file: str,
    message: str,
    *,
    where: str = "",
    found: Any = "",
    expected: str = "",
    fix: str = "",
    severity: str | None = None,
) -> Finding:
    """Builds one finding; the severity comes from the table unless a milder case is stated."""
    return Finding(
        rule=rule,
        severity=severity or RULES[rule].severity,
        file=show_value(file),
        where=show_value(where),
        found=show_value(found),
        expected=show_text(expected),
        message=show_text(message),
        fix=show_text(fix),
    )


def from_problem(problem: Problem) -> Finding:
    return finding(
        problem.rule,
        problem.file,
        problem.message,
        where=problem.where,
        found=problem.found,
        expected=problem.expected,
        fix=problem.fix,
    )


def _shorten(findings: list[Finding]) -> list[Finding]:
    """No rule fills the screen: past its first hundred of one severity the last one counts."""
    many = Counter((item.rule, item.severity) for item in findings)
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for item in findings:
        kind = (item.rule, item.severity)
        seen[kind] += 1
        if seen[kind] < _MAX_OF_A_RULE:
            kept.append(item)
        elif seen[kind] == _MAX_OF_A_RULE:
            more = many[kind] - seen[kind]
            kept.append(replace(item, message=f"{item.message} ({more:,} more)") if more else item)
    return kept


def build_report(findings: Iterable[Finding], *, unchecked: Iterable[str] = ()) -> Report:
    """Worst first, each once, in a fixed order; of one rule at most so many, and how many more."""
    unique = {(item.rule, item.file, item.where, item.message): item for item in findings}
    ordered = _shorten(sorted(unique.values(), key=lambda item: _ORDER.index(item.severity)))
    worst = ordered[0].severity if ordered else "note"
    return Report(
        verdict={"error": "fail", "warning": "warn", "note": "pass"}[worst],
        findings=tuple(ordered),
        unchecked=tuple(unchecked),
    )
