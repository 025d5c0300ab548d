"""The one visible table of rules is rules.toml beside this module; every finding names one row."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from paceline.errors import RulesError

__all__ = ["GROUPS", "INPUTS", "RULES", "Rule", "find_rule", "list_unchecked", "name_input"]

SEVERITIES = ("error", "warning", "note")
INPUTS = ("target", "rules", "deep", "run", "fetch")
_TEXTS = ("severity", "summary", "why", "message", "fix", "by")

# The part of an id before the dot, and what it is about.
GROUPS: dict[str, str] = {
    "rev": "Where it comes from",
    "repo": "Where it comes from",
    "lfs": "Where it comes from",
    "fs": "Files",
    "json": "JSON",
    "spec": "spec.json and metadata.json",
    "k": "spec.json and metadata.json",
    "meta": "spec.json and metadata.json",
    "rules": "spec.json and metadata.json",
    "cfg": "config.json",
    "q": "Quantization",
    "st": "safetensors",
    "idx": "Shards",
    "ten": "Tensors",
    "mem": "Memory",
    "run": "Served in a sandbox",
    "not": "What was not looked at",
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row.

    severity: "error" refuses the draft, "warning" asks for a look, "note" only tells; a milder
    case of the same rule can be told with a milder severity. message: its form, {words} stand for
    what was found. by: dotted name of the function that checks it, below `paceline`.
    needs: inputs without which nothing of it is checked; partly: without which a part is not.
    """

    rule_id: str
    severity: str
    summary: str
    why: str
    message: str
    fix: str
    by: str
    needs: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return GROUPS[self.rule_id.split(".")[0]]


def _read_table() -> dict[str, Rule]:
    text = (resources.files("paceline.validate") / "rules.toml").read_text(encoding="utf-8")
    found: dict[str, Rule] = {}
    for group, rows in tomllib.loads(text).items():
        for name, row in rows.items():
            found[f"{group}.{name}"] = _build_rule(f"{group}.{name}", row)
    return found


def _build_rule(rule_id: str, row: dict[str, Any]) -> Rule:
    needs, partly = (tuple(row.get(key, ())) for key in ("needs", "partly"))
    sound = (
        set(row) <= {*_TEXTS, "needs", "partly"}
        and all(isinstance(row.get(key), str) and row[key] for key in _TEXTS)
        and row["severity"] in SEVERITIES
        and {*needs, *partly} <= set(INPUTS)
        and rule_id.split(".")[0] in GROUPS
    )
    if not sound:  # the table ships with the package: a wrong row is our bug
        raise AssertionError(f"rules.toml: {rule_id}")
    texts = {key: row[key] for key in _TEXTS}
    return Rule(rule_id=rule_id, needs=needs, partly=partly, **texts)


RULES: dict[str, Rule] = _read_table()


def name_input(name: str) -> str:
    """How a user gives an input: "--deep", or the command that leaves it."""
    return "paceline fetch" if name == "fetch" else f"--{name}"


def find_rule(rule_id: str) -> Rule:
    """The row of one rule. Raises RulesError that names the nearest ids for an unknown one."""
    rule = RULES.get(rule_id)
    if rule is not None:
        return rule
    raise RulesError(
        f"there is no rule '{rule_id}'",
        where="--explain",
        expected=", ".join(_near(rule_id)) or "an id such as cfg.rope",
        fix="`paceline validate --explain all` lists them.",
    )


def _near(rule_id: str) -> list[str]:
    """Ids that look alike, or that share the group or the word after the dot."""
    wanted = rule_id[:64].lower()
    close = difflib.get_close_matches(wanted, RULES, n=5, cutoff=0.6)
    word = wanted.split(".")[-1]
    same = [other for other in RULES if word and word in other.split(".")]
    return list(dict.fromkeys([*same, *close]))[:6]


@cache
def list_unchecked(missing: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(rules that need the input `missing` at all, rules of which a part needs it)."""
    return (
        tuple(rule.rule_id for rule in RULES.values() if missing in rule.needs),
        tuple(rule.rule_id for rule in RULES.values() if missing in rule.partly),
    )
