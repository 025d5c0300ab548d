"""A rules file in lines for a person."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.rules.contest import Rules

__all__ = ["describe_rules"]

_NOT_SHOWN = ("name", "version", "title", "provisional", "text", "sha256")


def describe_rules(rules: Rules) -> list[tuple[str, str]]:
    """(dotted name, value) in file order; unpublished values end with "(provisional)"."""
    lines = [("rules", f"{rules.title} ({rules.name}, version {rules.version})")]
    _describe(rules, "", rules, lines)
    return lines


def _describe(record: Any, prefix: str, rules: Rules, lines: list[tuple[str, str]]) -> None:
    for field in dataclasses.fields(record):
        dotted = f"{prefix}{field.name}"
        value = getattr(record, field.name)
        if dotted in _NOT_SHOWN:
            continue
        if dataclasses.is_dataclass(value):
            _describe(value, f"{dotted}.", rules, lines)
            continue
        text = _show(value)
        lines.append((dotted, f"{text} (provisional)" if dotted in rules.provisional else text))


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ", ".join(_show(item) for item in value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
