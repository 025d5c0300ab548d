"""Reads a rules file strictly: a missing key, a spare key or a wrong type is an error."""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from paceline.errors import RulesError
from paceline.records import sha256_bytes
from paceline.rules.contest import TPOT_STATISTICS, Contest, Rules

__all__ = ["list_rules", "parse_rules", "read_rules"]

_NOT_IN_EVERY_FILE = ("contest", "provisional", "text", "sha256")


def list_rules() -> tuple[str, ...]:
    """Names of the bundled rules of draft contests, sorted; challenges have gates instead."""
    folder = resources.files("paceline.rules")
    found = (p for p in folder.iterdir() if p.name.endswith(".toml"))
    return tuple(
        sorted(
            p.name.removesuffix(".toml")
            for p in found
            if "\n[gates." not in p.read_text(encoding="utf-8")
        )
    )


def read_rules(name_or_path: str | Path) -> Rules:
    """Reads bundled rules by name ("emc2-2027") or a TOML file by path. Raises RulesError."""
    name = str(name_or_path)
    if name in list_rules():
        text = (resources.files("paceline.rules") / f"{name}.toml").read_text(encoding="utf-8")
        return parse_rules(text, where=f"rules/{name}.toml")
    path = Path(name_or_path)
    if not path.is_file():
        raise RulesError(
            "there are no such rules",
            where=name,
            expected=f"a TOML file, or one of: {', '.join(list_rules())}",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RulesError(f"cannot be read: {problem}", where=name) from None
    return parse_rules(text, where=name)


def parse_rules(text: str, *, where: str = "rules") -> Rules:
    """Parses the text of a rules file; `where` names it in errors. Raises RulesError."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise RulesError(f"is not valid TOML: {problem}", where=where) from None
    provisional: list[str] = []
    contest = table.pop("contest", None)
    if contest is not None and not isinstance(contest, dict):
        raise _wrong_type("contest", contest, "a table", where)
    fields = _read_fields(Rules, table, where, "", provisional, skip=_NOT_IN_EVERY_FILE)
    if contest is not None:
        contest = Contest(**_read_fields(Contest, contest, where, "contest.", provisional))
    rules = Rules(
        **fields,
        contest=contest,
        provisional=tuple(provisional),
        text=text,
        sha256=sha256_bytes(text.encode("utf-8")),
    )
    _require_sane(rules, where)
    return rules


def _read_fields(
    record: type[Any],
    table: dict[str, Any],
    where: str,
    prefix: str,
    provisional: list[str],
    *,
    skip: Sequence[str] = (),
) -> dict[str, Any]:
    hints = get_type_hints(record)
    names = [f.name for f in dataclasses.fields(record) if f.name not in skip]
    optional = {f.name for f in dataclasses.fields(record) if f.default is not dataclasses.MISSING}
    for key in table:
        if key not in names:
            raise RulesError(
                f"key '{prefix}{key}' is unknown",
                where=where,
                expected=f"only {', '.join(names)}",
                fix="Remove it; a setting without effect is an error.",
            )
    result = {}
    for name in names:
        dotted = f"{prefix}{name}"
        if name not in table and name in optional:
            continue
        if name not in table:
            raise RulesError(f"key '{dotted}' is missing", where=where, fix="Add it.")
        value, hint = table[name], hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise _wrong_type(dotted, value, "a table", where)
            inner = _read_fields(hint, value, where, f"{dotted}.", provisional)
            result[name] = hint(**inner)
            continue
        if isinstance(value, dict):
            if set(value) != {"value", "provisional"} or value["provisional"] is not True:
                raise _wrong_type(dotted, value, "{ value = ..., provisional = true }", where)
            value = value["value"]
            provisional.append(dotted)
        result[name] = _read_value(value, hint, dotted, where)
    return result


def _read_value(value: Any, hint: Any, dotted: str, where: str) -> Any:
    if isinstance(hint, types.UnionType):  # float | None, the only union in the records
        if value == "none":
            return None
        hint = float
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    item = {tuple[str, ...]: str, tuple[int, ...]: int}.get(hint)
    if item is not None and isinstance(value, list) and all(type(v) is item for v in value):
        return tuple(value)
    expected = {
        float: "a finite number",
        int: "a whole number",
        str: "a text",
        bool: "true or false",
    }.get(hint, f"a list of {'texts' if item is str else 'whole numbers'}")
    raise _wrong_type(dotted, value, expected, where)


def _wrong_type(dotted: str, value: Any, expected: str, where: str) -> RulesError:
    return RulesError(f"key '{dotted}' is {value!r}", where=where, expected=expected)


def _require_sane(rules: Rules, where: str) -> None:
    """Raises RulesError for a value that no contest can mean."""

    def require(holds: bool, dotted: str, value: object, expected: str) -> None:
        if not holds:
            raise RulesError(f"key '{dotted}' is {value!r}", where=where, expected=expected)

    for name, weight in rules.weights.items():
        require(0 < weight <= 1, f"terms.{name}.weight", weight, "more than 0, at most 1")
    for name, cap in rules.caps.items():
        # below 1 the baseline itself would be cut, and not score baseline_score
        require(cap is None or cap >= 1, f"terms.{name}.cap", cap, 'at least 1, or "none"')
    total = math.fsum(rules.weights.values())
    require(abs(total - 1) < 1e-9, "terms.*.weight", total, "weights that add up to 1")
    require(
        rules.terms.tpot_statistic in TPOT_STATISTICS,
        "terms.tpot_statistic",
        rules.terms.tpot_statistic,
        f"one of {', '.join(TPOT_STATISTICS)}",
    )
    require(bool(rules.families), "limits.families", list(rules.families), "at least one family")
    edges = rules.prompts.length_buckets
    require(
        list(edges) == sorted(set(edges)) and all(edge > 0 for edge in edges),
        "prompts.length_buckets",
        list(edges),
        "ascending numbers of tokens",
    )
    shares = {
        "gate.minimum_tau_ratio": rules.gate.minimum_tau_ratio,
        "sampling.top_p": rules.sampling.top_p,
        "protocol.max_failure_share": rules.protocol.max_failure_share,
        "protocol.max_prefix_hit_share": rules.protocol.max_prefix_hit_share,
        "protocol.max_other_cpu_share": rules.protocol.max_other_cpu_share,
        "protocol.max_clock_difference": rules.protocol.max_clock_difference,
        "fidelity.max_real_fork_share": rules.fidelity.max_real_fork_share,
        "fidelity.max_repeated_share": rules.fidelity.max_repeated_share,
        "fidelity.max_extra_looping_share": rules.fidelity.max_extra_looping_share,
        "fidelity.max_length_change": rules.fidelity.max_length_change,
        "fidelity.max_eos_change": rules.fidelity.max_eos_change,
        "fidelity.max_distinct_2_drop": rules.fidelity.max_distinct_2_drop,
        "replay.minimum_share": rules.replay.minimum_share,
        "replay.max_position_1_difference": rules.replay.max_position_1_difference,
    }
    for dotted, share in shares.items():
        require(0 <= share <= 1, dotted, share, "between 0 and 1")
    require(rules.sampling.top_p > 0, "sampling.top_p", rules.sampling.top_p, "more than 0")
    confidence = rules.statistics.confidence
    require(0.5 <= confidence < 1, "statistics.confidence", confidence, "between 0.5 and 1")
    require(rules.baseline_score > 0, "baseline_score", rules.baseline_score, "more than 0")
    require(
        rules.sampling.temperature >= 0, "sampling.temperature", rules.sampling.temperature, ">= 0"
    )
    for dotted, width in (
        ("fidelity.tolerance_nats", rules.fidelity.tolerance_nats),
        ("fidelity.max_extra_nll_nats", rules.fidelity.max_extra_nll_nats),
        ("replay.near_tie_logits", rules.replay.near_tie_logits),
    ):
        require(width >= 0, dotted, width, ">= 0")
    counts = {
        "limits.max_parameters": rules.limits.max_parameters,
        "limits.max_files_bytes": rules.limits.max_files_bytes,
        "limits.context_tokens": rules.limits.context_tokens,
        "speculation.baseline_num_speculative_tokens": (
            rules.speculation.baseline_num_speculative_tokens
        ),
        "speculation.entry_num_speculative_tokens": (
            rules.speculation.entry_num_speculative_tokens
        ),
        "sampling.max_tokens": rules.sampling.max_tokens,
        "prompts.num_categories": rules.prompts.num_categories,
        "prompts.min_prompts_per_category": rules.prompts.min_prompts_per_category,
        "protocol.min_tokens_for_tpot": rules.protocol.min_tokens_for_tpot - 1,  # at least 2
        "statistics.num_resamples": rules.statistics.num_resamples,
        "fidelity.loop_ngram": rules.fidelity.loop_ngram,
        "checks.min_steps_without_acceptance": rules.checks.min_steps_without_acceptance,
    }
    if rules.contest is not None:
        counts["contest.max_entries_per_team"] = rules.contest.max_entries_per_team
        effect = rules.contest.max_order_effect
        require(0 < effect < 1, "contest.max_order_effect", effect, "between 0 and 1")
        final = rules.contest.num_final_entries_per_team
        require(final == 1, "contest.num_final_entries_per_team", final, "1")
        for date in rules.contest.dates:
            require(": " in date, "contest.dates", date, '"when: what"')
    for dotted, count in counts.items():
        require(count >= 1, dotted, count, "at least 1")
    for dotted, count in {
        "sampling.top_k": rules.sampling.top_k,
        "protocol.num_warm_up_requests": rules.protocol.num_warm_up_requests,
    }.items():
        require(count >= 0, dotted, count, "at least 0")
