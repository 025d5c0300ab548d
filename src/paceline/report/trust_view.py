"""How far a score is to be trusted: protocol, noise floor, coverage, and what its mean may hide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.report.fields import pick, pick_dict, pick_list, pick_number, pick_text
from paceline.report.formats import clean_text, format_count, format_interval, format_number
from paceline.report.tables import Table

__all__ = ["build_slices_table", "describe_protocol", "list_trust_lines"]

Result = Mapping[str, Any]


def describe_protocol(result: Result) -> str:
    """One line: how many servers and blocks stand behind the figures."""
    kind = pick_text(result, "protocol", "kind")
    if kind == "quick":
        return "quick: one pass, all servers side by side"
    if kind != "cycles":
        return "not recorded"
    number = pick_number(result, "protocol", "num_cycles")
    text = f"{format_count(number)} cycle{'' if number == 1 else 's'} of A B B A, fresh servers"
    if pick_text(result, "protocol", "stopped_by") == "width":
        text += ", stopped at the width asked for"
    return text


def list_trust_lines(result: Result) -> tuple[str, ...]:
    """Sentences on noise floor, coverage, other work on the machine and void blocks."""
    lines = [_tell_floor(result), _tell_coverage(result), *_tell_load(result)]
    voids = pick_list(result, "protocol", "voids")
    if voids:
        lines.append(f"Blocks that did not count and were measured again: {len(voids)}.")
    return tuple(line for line in lines if line)


def _tell_floor(result: Result) -> str:
    if not pick_dict(result, "score"):
        return ""
    floor = pick_number(result, "noise_floor", "score")
    if floor is None:
        return "Noise floor of this machine: not measured (paceline eval --noise-floor)."
    text = f"Noise floor of this machine: {format_number(floor, 2)} points"
    if pick(result, "score", "tie") is True:
        return f"{text}; the score is a tie with the baseline."
    return f"{text}; the score lies beyond it."


def _tell_coverage(result: Result) -> str:
    found = pick_dict(result, "score", "coverage")
    low, high = pick_number(found, "low"), pick_number(found, "high")
    number = pick_number(found, "num_per_category")
    if low is None or high is None or number is None:
        if pick_number(result, "score", "low") is None:
            return ""
        return "How often such an interval holds the truth: not measured for so few prompts."
    return (
        f"Such intervals held the truth in {low * 100:.0f} to {high * 100:.0f} % of simulated runs"
        f" with {format_count(number)} prompts a category."
    )


def _tell_load(result: Result) -> list[str]:
    shares = []
    for index, load in enumerate(pick_list(result, "protocol", "loads")):
        share = pick_number(load, "other_share") if isinstance(load, Mapping) else None
        if share is not None:
            shares.append((share, index))
    if not shares:
        return []
    return [f"Other work on the CPU while measuring: at most {max(shares)[0] * 100:.0f} % of it."]


def build_slices_table(result: Result) -> Table:
    """Both ratios in each category and each length of prompt; empty without a baseline."""
    worst = pick_text(result, "ratios", "worst_category")
    rows = []
    for group in ("by_category", "by_prompt_tokens"):
        for name in pick_dict(result, "ratios", group):
            found = pick_dict(result, "ratios", group, name)
            label = clean_text(name, limit=24)
            if group == "by_prompt_tokens":
                label += " tokens"
            elif name == worst:
                label += " (worst)"
            cells = [label, format_count(pick_number(found, "num_prompts"))]
            for key in ("tau", "tpot"):
                cells += _write_ratio(pick_dict(found, key))
            rows.append(tuple(cells))
    return Table(
        title="Against the baseline, by category and length of prompt",
        columns=("", "prompts", "acceptance", "interval", "time", "interval"),
        rows=tuple(rows),
        note="Above 1 the candidate is better. A dash: too few prompts for an interval."
        if rows
        else "",
    )


def _write_ratio(found: Mapping[str, Any]) -> list[str]:
    value = pick_number(found, "value")
    low, high = pick_number(found, "low"), pick_number(found, "high")
    interval = "-" if low is None or high is None else format_interval(low, high, 2)
    return ["-" if value is None else format_number(value), interval.replace(" to ", "-")]
