"""One booted draft as the `run.*` rules see it, and what they tell."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.draft import Draft
from paceline.problems import Problem
from paceline.serve.smoke import Observed

__all__ = ["RunCase", "Told", "finding"]


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """seen: what was observed of `draft`. context_tokens: the contest's length.

    num_long_tokens: length of the one long prompt, None without one. estimate_bytes: memory as
    foreseen, None where it is not. is_hybrid: of the target.
    """

    draft: Draft
    seen: Observed
    context_tokens: int
    num_long_tokens: int | None
    estimate_bytes: int | None
    is_hybrid: bool = False

    @property
    def doubt(self) -> str | None:
        """Severity of what was held against the engine for EAGLE-3 on plain targets and for MTP.

        Elsewhere names and pools may differ for reasons of vLLM's: then it is a warning.
        """
        family = self.draft.family
        held = family == "mtp" or (family == "eagle3" and not self.is_hybrid)
        return None if held else "warning"


@dataclass(frozen=True, kw_only=True)
class Told:
    """One thing to tell. severity: None is that of the rule in the table of validate."""

    problem: Problem
    severity: str | None


def finding(
    rule: str,
    file: str,
    message: str,
    *,
    where: str = "",
    found: str = "",
    expected: str = "",
    fix: str = "",
    severity: str | None = None,
) -> Told:
    problem = Problem(
        rule=rule,
        file=file,
        where=where,
        found=found,
        expected=expected,
        message=message,
        fix=fix,
    )
    return Told(problem=problem, severity=severity)
