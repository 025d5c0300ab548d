"""A contest's rules as sections for people, out of the rules file's plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.report.formats import clean_text, format_bytes, format_count

__all__ = ["build_contest"]

_TERMS = {
    "tau": ("Acceptance length", "tau ÷ baseline's tau", "tokens per pass of the target"),
    "memory": ("Draft memory", "baseline's bytes ÷ bytes", "for one sequence of the context"),
    "tpot": ("Time per token", "baseline's time ÷ time", "one request at a time"),
}
_STATISTICS = {
    "ratio_of_medians": "ratio of the two medians over prompts",
    "paired_geomean": "geometric mean of the ratios paired by prompt",
}


def build_contest(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the contest's pages say. Unpublished values are marked provisional."""
    provisional = set(rules["provisional"])

    def value(dotted: str, text: str) -> tuple[str, bool]:
        return text, dotted in provisional

    def number(dotted: str, unit: str = "") -> tuple[str, bool]:
        found = _find(rules, dotted)
        return value(dotted, f"{_plain(found)}{unit}")

    contest = rules.get("contest")
    sampling = rules["sampling"]
    return {
        "title": clean_text(rules["title"]),
        "name": clean_text(rules["name"]),
        "version": clean_text(rules["version"]),
        "sha256": rules["sha256"],
        "organiser": clean_text(contest["organiser"]) if contest else None,
        "baseline_score": f"{rules['baseline_score']:g}",
        "num_provisional": len(provisional),
        "terms": [
            {
                "key": key,
                "label": label,
                "ratio": ratio,
                "note": note,
                "weight": (f"{rules['terms'][key]['weight'] * 100:g} %", False),
                "cap": value(
                    f"terms.{key}.cap",
                    "no cap" if (cap := rules["terms"][key]["cap"]) is None else f"{cap:g}",
                ),
            }
            for key, (label, ratio, note) in _TERMS.items()
        ],
        "gate": number("gate.minimum_tau_ratio"),
        "statistic": _STATISTICS[rules["terms"]["tpot_statistic"]],
        "limits": [
            ("Families", value("limits.families", ", ".join(rules["limits"]["families"]))),
            (
                "Parameters, at most",
                value("limits.max_parameters", format_count(rules["limits"]["max_parameters"])),
            ),
            (
                "All files together, at most",
                value(
                    "limits.max_files_bytes",
                    f"{rules['limits']['max_files_bytes'] / 1e9:g} GB "
                    f"({format_bytes(rules['limits']['max_files_bytes'])})",
                ),
            ),
            (
                "Context",
                value(
                    "limits.context_tokens",
                    f"{format_count(rules['limits']['context_tokens'])} tokens",
                ),
            ),
        ],
        "setting": [
            (
                "Target",
                (f"{clean_text(rules['target']['name'])}, {rules['target']['dtype']}", False),
            ),
            (
                "Engine",
                (f"{rules['engine']['name']} {rules['engine']['version']}, unmodified", False),
            ),
            ("Baseline", (clean_text(rules["speculation"]["baseline_family"]), False)),
            ("K of the baseline", number("speculation.baseline_num_speculative_tokens")),
            ("K of an entry", number("speculation.entry_num_speculative_tokens")),
            ("Temperature", number("sampling.temperature")),
            ("Longest answer", number("sampling.max_tokens", " tokens")),
            ("Prompts", (clean_text(rules["prompts"]["name"]), False)),
            ("Categories", number("prompts.num_categories")),
            ("Prompts a category, at least", number("prompts.min_prompts_per_category")),
            (
                "Interval",
                value("statistics.confidence", f"{rules['statistics']['confidence']:.0%}"),
            ),
        ],
        "greedy": sampling["temperature"] == 0,
        "withheld_when": _list_withheld(rules),
        "dates": [
            tuple(clean_text(part, limit=200) for part in date.split(": ", 1))
            for date in (contest["dates"] if contest else ())
        ],
        "steps": [_split_command(step) for step in _clean(contest, "how_to_submit")],
        "not_allowed": _clean(contest, "not_allowed"),
        "max_entries": number("contest.max_entries_per_team") if contest else None,
        "is_contest": contest is not None,
    }


def _list_withheld(rules: Mapping[str, Any]) -> list[str]:
    """When a measured run is not ranked, from the rules' own tolerances."""
    fidelity, protocol = rules["fidelity"], rules["protocol"]
    return [
        f"acceptance length below {rules['gate']['minimum_tau_ratio']:g} of the baseline's",
        f"more than {fidelity['max_real_fork_share']:.0%} of the answers really fork from the "
        "target's own text",
        f"more than {protocol['max_failure_share']:.0%} of the requests fail",
        "the engine's acceptance rule or sampler is not the stock one",
        "acceptance that depends on the order of requests",
    ]


def _find(rules: Mapping[str, Any], dotted: str) -> Any:
    found: Any = rules
    for key in dotted.split("."):
        found = found[key]
    return found


def _plain(found: Any) -> str:
    return f"{found:,}" if isinstance(found, int) else f"{found:g}"


def _clean(contest: Mapping[str, Any] | None, key: str) -> list[str]:
    return [clean_text(text) for text in contest[key]] if contest else []


def _split_command(step: str) -> tuple[str, str]:
    """ "Check it: paceline validate X" -> ("Check it:", "paceline validate X")."""
    text, mark, command = step.partition(": paceline ")
    return (f"{text}:", f"paceline {command}") if mark else (step, "")
