"""What was run on what: target, engine, sampling, prompts, drafts, versions, as labelled text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from paceline.report.fields import list_arms, pick, pick_dict, pick_list, pick_number, pick_text
from paceline.report.formats import NOT_MEASURED, clean_text, format_bytes, format_count
from paceline.report.tables import Table

__all__ = [
    "build_engine_table",
    "build_setup_rows",
    "build_version_rows",
    "flatten",
    "list_draft_facts",
]

Result = Mapping[str, Any]
Row = tuple[str, str]
_MAX_ROWS = 200
_ENGINE_KEYS = (
    ("vLLM", "vllm_version"),
    ("device", "device_name"),
    ("method", "method"),
    ("K (drafted tokens per step)", "num_speculative_tokens"),
    ("runner", "runner"),
    ("target architecture", "target_architecture"),
    ("draft architecture", "draft_architecture"),
    ("rejection sampling", "rejection_sample_method"),
    ("draft sampling", "draft_sample_method"),
    ("dtype", "dtype"),
    ("longest sequence", "max_model_len"),
    ("prefix caching", "prefix_caching"),
    ("eager mode", "enforce_eager"),
    ("engine start, s", "start_s"),
)


def flatten(value: Mapping[str, Any], prefix: str = "") -> list[Row]:
    """Nested objects as dotted labels with cleaned text values; at most 200 rows."""
    rows: list[Row] = []
    for key, item in value.items():
        label = f"{prefix}{clean_text(key, limit=60)}"
        if isinstance(item, Mapping) and item:
            rows += flatten(item, f"{label}.")
        else:
            rows.append((label, _write(item)))
        if len(rows) > _MAX_ROWS:
            return [*rows[:_MAX_ROWS], ("...", "more is in result.json")]
    return rows


def _write(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(_write(item) for item in value[:40]) + ("..." if len(value) > 40 else "")
    return clean_text(value)


def build_setup_rows(result: Result) -> list[Row]:
    """The few lines that say what was measured."""
    target = pick_dict(result, "target")
    layers, hidden = pick(target, "num_hidden_layers"), pick(target, "hidden_size")
    name = clean_text(pick_text(target, "name") or NOT_MEASURED, limit=60)
    shape = f" ({_write(layers)} layers, hidden size {_write(hidden)})" if layers else ""
    prompts = pick_dict(result, "prompts")
    categories = pick_dict(prompts, "categories")
    kinds = f" in {len(categories)} categor{'y' if len(categories) == 1 else 'ies'}"
    count = format_count(pick_number(prompts, "num_prompts"))
    prompt_name = clean_text(pick_text(prompts, "name") or "prompts", limit=40)
    sampling = ", ".join(f"{key} {text}" for key, text in flatten(pick_dict(result, "sampling")))
    arm = next((arm for arm in list_arms(result)), "candidate")
    engine = pick_dict(result, "arms", arm, "engine")
    served = (
        f"vLLM {_write(engine.get('vllm_version'))}, {_write(engine.get('device_name'))}, "
        f"{_write(engine.get('dtype'))}"
    )
    return [
        ("target", name + shape),
        ("prompts", f"{prompt_name}: {count}{kinds if categories else ''}"),
        ("sampling", sampling or NOT_MEASURED),
        ("thinking", clean_text(pick_text(result, "thinking") or NOT_MEASURED, limit=40)),
        ("caches", clean_text(pick_text(result, "cache_state") or NOT_MEASURED, limit=80)),
        ("engine", served if engine else NOT_MEASURED),
    ]


def build_engine_table(result: Result) -> Table:
    """What each started engine said it was, one column an arm."""
    arms = list_arms(result)
    engines = [pick_dict(result, "arms", arm, "engine") for arm in arms]
    rows = tuple(
        (label, *(_write(engine[key]) if key in engine else NOT_MEASURED for engine in engines))
        for label, key in _ENGINE_KEYS
    )
    columns = ("", *(clean_text(arm, limit=24) for arm in arms))
    return Table(title="Engine", columns=columns, rows=rows)


def list_draft_facts(result: Result) -> list[tuple[str, list[Row]]]:
    """(heading, rows) for each arm's draft: size, hash and its own metadata."""
    facts = []
    for arm in list_arms(result):
        draft = pick_dict(result, "arms", arm, "draft")
        if not draft:
            continue
        rows = [
            ("name", clean_text(pick_text(draft, "name") or "unnamed")),
            ("family", clean_text(pick_text(draft, "family") or NOT_MEASURED)),
            ("K", _write(draft.get("num_speculative_tokens"))),
            ("parameters", format_count(pick_number(draft, "num_parameters"))),
            ("files", format_bytes(pick_number(draft, "files_bytes"))),
            ("sha256", clean_text(pick_text(draft, "sha256") or NOT_MEASURED)),
        ]
        rows += [row for row in flatten(pick_dict(draft, "metadata")) if row[0] != "name"]
        facts.append((clean_text(arm, limit=24), rows))
    return facts


def build_version_rows(result: Result) -> list[Row]:
    """Where the result came from, and the hashes that pin its inputs."""
    made = pick_dict(result, "provenance")
    command = shlex.join(str(word) for word in pick_list(made, "command"))
    rows = [("command", clean_text(command, limit=1000) or NOT_MEASURED)]
    rows += [row for row in flatten(made) if row[0] != "command"]
    for room in ("rules", "target", "prompts"):
        for label, text in flatten(pick_dict(result, room)):
            if label.endswith(("sha256", "fingerprint")):
                rows.append((f"{room} {label}", text))
    return rows
