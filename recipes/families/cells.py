"""What table.py knows of each cell, and how docs/results/families.md shows it.

A record is one machine's: `families/NAME.json` beside the page, {"machine", "cells": {cell: ...}}.
Every record in that folder becomes a table of the page, so runs of several machines, or of several
ten-minute leases, merge by lying there together. Figures that were not measured are said to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.draft import Draft
from paceline.eval.statistics import half_width, measure_spread
from paceline.forecast import CachePlan, measure_memory, parse_design, read_shape
from paceline.records import read_json, write_text

__all__ = ["FORMAT", "design_of", "foresee_bytes", "length_by_category", "render_table"]

FORMAT = "paceline-families/1"
CONTEXT = 16_384
CONFIDENCE = 0.95
_NOT_MEASURED = "not measured"
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "draft_vocab_size": "draft_vocab_size",
}
_KEYS = {
    "mtp": (),
    "medusa": ("num_hidden_layers",),
    "eagle3": tuple(key for key in _SIZES if key not in ("num_hidden_layers", "hidden_size")),
    "dflash": tuple(key for key in _SIZES if key != "hidden_size"),
    "draft_model": tuple(key for key in _SIZES if key != "draft_vocab_size"),
}


def design_of(draft: Draft, kind: str) -> str:
    """A draft as a design on paper (`paceline forecast`)."""
    config = draft.config
    lines = [
        f'family = "{draft.family}"',
        f"num_speculative_tokens = {draft.num_speculative_tokens}",
        *(f"{_SIZES[key]} = {config[key]}" for key in _KEYS[draft.family] if key in config),
    ]
    if draft.family == "medusa":
        lines.append(f"one_head = {json.dumps(config.get('original_lm_head') is True)}")
    if draft.family in ("eagle3", "dflash"):
        taps = config.get("eagle_aux_hidden_state_layer_ids")
        taps = taps or config.get("dflash_config", {}).get("target_layer_ids")
        lines.append(f"num_taps = {len(taps)}")
    if draft.family == "eagle3" and config.get("mask_token_id") is not None:
        lines.append("parallel = true")
    if draft.family == "draft_model":
        lines.append(f"own_head = {json.dumps(not config.get('tie_word_embeddings', False))}")
    if config.get("sliding_window"):
        lines.append(f"window = {config['sliding_window']}")
    if kind != "bf16":
        lines.append(f'weights = "{kind}"')
        group = _group_size(config)
        if group:
            lines.append(f"group_size = {group}")
    return "\n".join(lines) + "\n"


def _group_size(config: Mapping[str, Any]) -> int:
    groups = config.get("quantization_config", {}).get("config_groups", {})
    sizes = [group.get("weights", {}).get("group_size") for group in groups.values()]
    return next((int(size) for size in sizes if size and size > 0), 0)


def foresee_bytes(draft: Draft, kind: str, target: Path, device: str) -> int | None:
    """M at 16,384 tokens by arithmetic; None for a scheme that the forecast has no sizes for."""
    if kind == "w8a8":
        return None
    shape = read_shape(str(target))
    design = parse_design(design_of(draft, kind), shape)
    plan = CachePlan(device=device)
    return measure_memory(design, shape, context_tokens=CONTEXT, plan=plan).total_bytes


def length_by_category(requests: list[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Delivered tokens a target step, each category and `all`, with half of a 95 % interval.

    A ratio of sums d / s over prompts; prompts are the clusters, so the cell of one is its
    (d - ratio s) / mean s.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for request in requests:
        groups.setdefault(str(request["category"]), []).append(request)
    found: dict[str, dict[str, float | None]] = {}
    for name, group in [*sorted(groups.items()), ("all", list(requests))]:
        delivered = np.array([float(r["delivered"]) for r in group])
        steps = np.array([float(r["steps"]) for r in group])
        if not steps.sum():
            continue
        ratio = float(delivered.sum() / steps.sum())
        spread = measure_spread([((delivered - ratio * steps) / steps.mean())[:, None]])
        half = None if spread is None else half_width(spread, confidence=CONFIDENCE)
        found[name] = {"value": ratio, "half_width": half, "num_prompts": len(group)}
    return found


def render_table(folder: Path, page: Path) -> None:
    """families.md from every record in `folder`."""
    records = [read_json(path) for path in sorted(folder.glob("*.json"))]
    machines = [record["machine"] for record in records]
    lines = [
        "# Every family, plain and quantised",
        "",
        "Written by `python recipes/families/table.py` from the records in `families/`; do not "
        "edit. Length: delivered tokens ÷ target steps, bonus included, ± half of a 95 % interval "
        "over prompts. M: draft memory of one sequence of 16,384 tokens.",
    ]
    for target in sorted({key.split("/")[0] for record in records for key in record["cells"]}):
        lines += ["", f"## `{target}`", "", *_drafts(target, records)]
        for record in records:
            lines += _served(target, record)
    lines += ["", f"Machines: {'; '.join(machines) or 'none yet'}.", ""]
    write_text(page, "\n".join(lines))


def _drafts(target: str, records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| draft | parameters | files | trained on | for |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    merged: dict[str, dict[str, Any]] = {}
    for record in records:
        for key, cell in record["cells"].items():
            if key.startswith(target + "/") and "draft" in cell:
                merged.setdefault(key, cell["draft"])
    for key, draft in sorted(merged.items()):
        minutes = "" if draft["minutes"] is None else f"{draft['minutes']:.1f} min"
        lines.append(
            f"| {_name(key)} | {draft['num_parameters'] / 1e6:.2f} M "
            f"| {draft['files_bytes'] / 1e6:.2f} MB | {draft['tokens_seen']:,} tokens | {minutes} |"
        )
    return lines


def _served(target: str, record: Mapping[str, Any]) -> list[str]:
    cells = {key: c for key, c in record["cells"].items() if key.startswith(target + "/")}
    if not cells:
        return []
    categories = sorted(
        {name for c in cells.values() for name in c.get("measured", {}).get("length", {})} - {"all"}
    )
    heads = ["draft", "M, MB (foreseen)", "length", *categories, "TPOT, ms", "score"]
    heads.append("trained = served")
    lines = ["", f"### {target} on {record['machine']}", "", _row(heads)]
    lines.append(_row(["---", *["---:"] * (len(heads) - 2), "---"]))
    for key, cell in sorted(cells.items()):
        m = cell.get("measured")
        if m is None:
            said = [_name(key), "not served here" if "reason" in cell else _NOT_MEASURED]
            lines.append(_row([*said, *[""] * (len(heads) - len(said))]))
            continue
        lines.append(
            _row(
                [
                    _name(key),
                    f"{_megabytes(m['memory_bytes'])} ({_megabytes(cell.get('foreseen_bytes'))})",
                    *(_length(m["length"].get(name)) for name in ("all", *categories)),
                    _NOT_MEASURED if m["tpot_ms"] is None else f"{m['tpot_ms']:.3f}",
                    _NOT_MEASURED if m["score"] is None else _score(m["score"]),
                    _replay(m["replay"]),
                ]
            )
        )
    reasons = [
        f"- {_name(key)}: {c['reason']}." for key, c in sorted(cells.items()) if "reason" in c
    ]
    return [*lines, *([""] if reasons else []), *reasons]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _name(key: str) -> str:
    _, family, kind = key.split("/")
    return family if kind == "bf16" else f"{family}, {kind}"


def _megabytes(number: int | None) -> str:
    return _NOT_MEASURED if number is None else f"{number / 1e6:.2f}"


def _length(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return _NOT_MEASURED
    half = value["half_width"]
    return f"{value['value']:.2f}" + ("" if half is None else f" ± {half:.2f}")


def _score(score: Mapping[str, Any]) -> str:
    if score["low"] is None or score["high"] is None:
        return f"{score['value']:.1f}"
    return f"{score['value']:.1f} ({score['low']:.1f} to {score['high']:.1f})"


def _replay(replay: Mapping[str, Any] | None) -> str:
    if replay is None:
        return _NOT_MEASURED
    num = replay["num_near_tie"]
    ties = f", {num} near tie{'' if num == 1 else 's'}" if num else ""
    real = f", {replay['num_real']} real" if replay["num_real"] else ""
    return f"{replay['num_agree']} of {replay['num_steps']}{ties}{real}"
