"""`not.checked`: what an input that was not given left unchecked, rule by rule."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.validate.case import Case
from paceline.validate.provenance import has_manifest
from paceline.validate.report import Finding, finding
from paceline.validate.rules import list_unchecked

__all__ = ["DEFAULT_RULES", "tell_unchecked"]

DEFAULT_RULES = "emc2-2027"  # sizes are compared to these where no contest is named


def tell_unchecked(case: Case, has_weights: bool, deep: bool, run: bool) -> Iterator[Finding]:
    """Names every rule that was not checked for want of an input, or not in full."""
    if case.target is None and has_weights:
        yield finding(
            "not.checked",
            "",
            "no target was given, so the fit to one was not checked: " + _name_rules("target"),
            where="--target",
            expected="all rules",
            fix="Give --target.",
        )
    if not case.is_contest:
        yield finding(
            "not.checked",
            "",
            f"no rules were given: sizes and context are compared to {DEFAULT_RULES}, families"
            f" are not checked: {_name_rules('rules')}",
            where="--rules",
            expected="all rules",
            fix="Give --rules for a contest.",
        )
    if not deep and has_weights:
        yield finding(
            "not.checked",
            "",
            f"weight values were not read: {_name_rules('deep')}",
            where="--deep",
            expected="all rules",
            fix="Give --deep.",
        )
    if not has_manifest(case):
        yield finding(
            "not.checked",
            "",
            f"the folder was not fetched from the Hub: {_name_rules('fetch')}",
            where="paceline fetch",
            expected="a folder with its manifest beside it",
            fix="`paceline fetch OWNER/NAME@COMMIT` checks these, and keeps what it saw.",
        )
    if not run:
        yield finding(
            "not.checked",
            "",
            f"the draft was not started: {_name_rules('run')}",
            where="--run",
            expected="all rules",
            fix="Give --run, with vLLM installed.",
        )


def _name_rules(missing: str) -> str:
    """ "cfg.hidden, meta.target; in part cfg.aux, cfg.dtype"."""
    whole, part = list_unchecked(missing)
    return "; in part ".join(", ".join(ids) for ids in (whole, part) if ids)
