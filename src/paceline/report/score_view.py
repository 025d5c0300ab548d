"""The score, its three terms and the plain lines around them, as strings for both reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.report.fields import list_arms, pick, pick_dict, pick_list, pick_number, pick_text
from paceline.report.formats import (
    NOT_MEASURED,
    clean_text,
    format_bytes,
    format_count,
    format_interval,
    format_ms,
    format_number,
    format_share,
)

__all__ = [
    "Headline",
    "Term",
    "build_headline",
    "build_terms",
    "list_deviations",
    "list_notes",
    "list_provisional",
    "list_replay_lines",
    "list_withheld",
    "name_draft",
]

Result = Mapping[str, Any]
_LABELS = {"tau": "Acceptance length", "memory": "Draft memory", "tpot": "Time per token"}
_UNITS = {"tau": "tokens per step", "memory": "added bytes", "tpot": "geometric mean"}
_CONTEXT = {
    "tau": "tokens per step, more is better",
    "memory": "bytes added, fewer is better",
    "tpot": "less is better",
}
_ABSOLUTE = {
    "tau": ("tau", "value"),
    "memory": ("memory", "total_bytes"),
    "tpot": ("tpot_ms", "geomean"),
}


@dataclass(frozen=True, kw_only=True)
class Headline:
    """state: "ranked" | "unranked" | "withheld" | "not scored"; the last two have no score.

    interval is "" when there is no score. withheld: the fidelity gate held an arm back.
    """

    score: str
    interval: str
    state: str
    reasons: tuple[str, ...]
    gate: str
    rules: str


@dataclass(frozen=True, kw_only=True)
class Term:
    """One of the score's three terms. points and weight stay numbers for the bars."""

    key: str
    label: str
    unit: str
    context: str
    candidate: str
    baseline: str
    ratio: str
    interval: str
    capped: str
    cap: str
    is_capped: bool
    weight: float | None
    points: float | None


def name_draft(result: Result, arm: str, *, limit: int = 60) -> str:
    """The draft's own name, made safe; what the arm is when it has none."""
    if not pick_dict(result, "arms", arm):
        return NOT_MEASURED
    draft = pick_dict(result, "arms", arm, "draft")
    if not draft:
        return "no draft"
    name = pick_text(draft, "name") or pick_text(draft, "family")
    return clean_text(name, limit=limit) if name else "unnamed draft"


def build_headline(result: Result) -> Headline:
    """The score with its interval, and whether it counts."""
    value = pick_number(result, "score", "value")
    gate, passed = _describe_gate(result)
    ranked = pick(result, "score", "ranked")
    withheld = list_withheld(result)
    if withheld:
        state, reasons = "withheld", [*withheld]
        value = None
    elif value is None:
        state, reasons = "not scored", [_why_no_score(result)]
    elif ranked is True:
        state, reasons = "ranked", ["The acceptance gate is met."] if passed else []
    else:
        state = "unranked"
        reasons = [
            clean_text(reason, limit=300) for reason in pick_list(result, "score", "reasons")
        ]
        if not reasons and passed is False:
            reasons = ["The acceptance gate is not met."]
    low, high = pick_number(result, "score", "low"), pick_number(result, "score", "high")
    name = clean_text(pick_text(result, "rules", "name") or "rules not recorded", limit=40)
    version = pick(result, "rules", "version")
    return Headline(
        score=format_number(value, 1),
        interval="" if value is None else format_interval(low, high, 1),
        state=state,
        reasons=tuple(reasons),
        gate=gate,
        rules=name if version is None else f"{name}, version {clean_text(version, limit=20)}",
    )


def list_withheld(result: Result) -> tuple[str, ...]:
    """Why an arm was held back from scoring, one sentence a reason; empty when none was."""
    found = pick_dict(result, "withheld")
    return tuple(
        f"{clean_text(arm, limit=24)} withheld from scoring: {clean_text(reason, limit=300)}"
        for arm in found
        for reason in pick_list(result, "withheld", arm)
    )


def _why_no_score(result: Result) -> str:
    arms = list_arms(result)
    missing = [arm for arm in ("candidate", "baseline") if arm not in arms]
    if missing:
        return f"No {' and no '.join(missing)} was measured, so there is nothing to compare."
    absent = [_LABELS[key].lower() for key in _LABELS if _ratio(result, key) is None]
    return f"Not measured: {', '.join(absent)}." if absent else "The run holds no score."


def _describe_gate(result: Result) -> tuple[str, bool | None]:
    minimum = pick_number(result, "score", "gate", "minimum_tau_ratio")
    passed = pick(result, "score", "gate", "passed")
    found = _ratio(result, "tau")
    if pick(result, "score") is None or list_withheld(result):
        return "acceptance gate not decided", None
    if minimum is None:
        return "no acceptance gate in these rules", None
    text = f"acceptance ratio {format_number(found)}, at least {format_number(minimum)} needed"
    if passed is None:
        return f"{text}: not decided", None
    return f"{text}: {'passed' if passed else 'not passed'}", bool(passed)


def _is_unbounded(result: Result, key: str) -> bool:
    """The candidate adds no bytes at all, so the ratio has no value."""
    return pick(result, "ratios", key, "unbounded") is True


def _by_medians(result: Result) -> bool:
    return pick_text(result, "ratios", "tpot", "statistic") == "ratio_of_medians"


def _ratio(result: Result, key: str) -> float | None:
    found = pick_number(result, "ratios", key, "value")
    return found if found is not None else pick_number(result, "score", "terms", key, "ratio")


def _absolute(result: Result, key: str, arm: str) -> str:
    path = _ABSOLUTE[key]
    if key == "tpot" and _by_medians(result):
        path = ("tpot_ms", "median")
    value = pick_number(result, "arms", arm, *path)
    if value is None and arm == "candidate" and _is_unbounded(result, key):
        value = 0.0
    if key == "tau":
        return format_number(value)
    return format_bytes(value) if key == "memory" else format_ms(value)


def build_terms(result: Result) -> tuple[Term, ...]:
    """The three terms in the rules' order: acceptance, memory, time."""
    terms = []
    for key, label in _LABELS.items():
        term = pick_dict(result, "score", "terms", key)
        ratio, capped = _ratio(result, key), pick_number(term, "capped_ratio")
        low = pick_number(result, "ratios", key, "low")
        high = pick_number(result, "ratios", key, "high")
        cap, is_exact = pick_number(term, "cap"), low is not None and low == high
        if _is_unbounded(result, key):
            is_exact = True
        terms.append(
            Term(
                key=key,
                label=label,
                unit="median" if key == "tpot" and _by_medians(result) else _UNITS[key],
                context=_CONTEXT[key],
                candidate=_absolute(result, key, "candidate"),
                baseline=_absolute(result, key, "baseline"),
                ratio="unlimited" if _is_unbounded(result, key) else format_number(ratio),
                interval="exact" if key == "memory" and is_exact else format_interval(low, high),
                capped=format_number(capped),
                cap="no cap" if term and cap is None else format_number(cap),
                is_capped=capped is not None
                and (_is_unbounded(result, key) or (ratio is not None and capped < ratio)),
                weight=pick_number(term, "weight"),
                points=pick_number(term, "points"),
            )
        )
    return tuple(terms)


def list_provisional(result: Result) -> tuple[str, ...]:
    """Dotted names of the rules' values that the organiser has not published."""
    return tuple(clean_text(name, limit=80) for name in pick_list(result, "rules", "provisional"))


def list_notes(result: Result) -> tuple[str, ...]:
    """What the run noted as a whole and for each arm; arms that are one arm are noted once."""
    notes = [clean_text(note, limit=600) for note in pick_list(result, "notes")]
    aliases = pick_dict(result, "aliases")
    for arm in (arm for arm in list_arms(result) if arm not in aliases):
        name = clean_text(arm, limit=24)
        for note in pick_list(result, "arms", arm, "notes"):
            notes.append(f"{name}: {clean_text(note, limit=600)}")
    return tuple(notes)


def list_deviations(result: Result) -> tuple[str, ...]:
    """Where the run differs from its rules: the score is then not the contest's."""
    return tuple(clean_text(text, limit=300) for text in pick_list(result, "score", "deviations"))


def list_replay_lines(result: Result) -> tuple[str, ...]:
    """Trained against served, one sentence an arm; one "not measured" when nothing was replayed."""
    found = pick_dict(result, "replay")
    lines = []
    for arm in (arm for arm in list_arms(result) if found.get(arm)):
        passed = pick(found, arm, "passed")
        verdict = "not decided" if passed is None else "passed" if passed else "NOT passed"
        lines.append(
            f"{clean_text(arm, limit=24)}: {format_count(pick_number(found, arm, 'num_agree'))} of "
            f"{format_count(pick_number(found, arm, 'num_steps'))} steps agree "
            f"({format_share(pick_number(found, arm, 'share'))})"
            f"{_tell_differing(found, arm)}; first position "
            f"{format_number(pick_number(found, arm, 'position_1_served'))} served, "
            f"{format_number(pick_number(found, arm, 'position_1_trained'))} trained: {verdict}"
        )
    return tuple(lines) or (NOT_MEASURED,)


def _tell_differing(found: Result, arm: str) -> str:
    """The kinds of steps that differ; nothing where a run did not tell them apart."""
    num_near, num_real = (pick_number(found, arm, key) for key in ("num_near_tie", "num_real"))
    if num_near is None and num_real is None:
        return ""
    within = format_number(pick_number(found, arm, "near_tie_logits"), digits=2)
    return (
        f", {format_count(num_near)} differ at near ties of the draft's own logits (within"
        f" {within}), {format_count(num_real)} for real"
    )
