"""docs/results/families.md from the records of table.py.

A record is one machine's: `families/NAME.json` beside the page, {"machine", "cells": {cell: ...}}.
Every record in that folder becomes a table of the page, so runs of several machines, or of several
ten-minute leases, merge by lying there together. Figures that were not measured are said to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from goals import GOALS
from needed import needed_lines, term_lines

from paceline.records import read_json, write_text
from paceline.rules import read_rules

__all__ = ["render_table"]

_NOT_MEASURED = "not measured"
_MACHINES = ("2-cores", "one-h200")  # those the page is to have
_GOAL, _FLOOR = 150.0, 140.0

Cells = dict[str, dict[str, Any]]


def render_table(folder: Path, page: Path, speeds: Path | None = None) -> None:
    """families.md from every record in `folder`; speeds: a folder of bench/train_families.py's."""
    records = [read_json(path) for path in sorted(folder.glob("*.json"))]
    lines = [
        "# Every family, plain and quantised",
        "",
        "Written by `python recipes/families/table.py` from the records in `families/`; do not "
        "edit. Length: delivered tokens ÷ target steps, bonus included, ± half of a 95 % interval "
        "over prompts. M: draft memory of one sequence of 16,384 tokens. Score: under the rules "
        "named, against their baseline, measured beside it prompt by prompt. Bold: the best "
        "quantised of a family by its score. Trained = served: steps that the trainer's own "
        "forward takes as the server did.",
    ]
    for target in sorted(GOALS):
        lines += ["", f"## `{target}`", ""]
        if not any(_cells(target, record) for record in records):
            lines.append("Not measured on any machine yet.")
            continue
        lines += _drafts(target, records)
        for record in records:
            lines += _served(target, record)
        lines += _best(target, records)
        for path in sorted(speeds.glob("train_families-*.json")) if speeds is not None else ():
            lines += _speed(target, read_json(path))
    known = [record["machine"] for record in records]
    lines += ["", *(f"On {name}: not measured." for name in _MACHINES if name not in known), ""]
    write_text(page, "\n".join(lines))


def _cells(target: str, record: Mapping[str, Any]) -> Cells:
    """Of one target, family by family, plain before quantised."""
    found = {key: cell for key, cell in record["cells"].items() if key.startswith(target + "/")}
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(key: str) -> tuple[str, bool, str]:
    _, family, kind = key.split("/")
    return family, kind != "bf16", kind


def _drafts(target: str, records: list[dict[str, Any]]) -> list[str]:
    heads = [
        "draft",
        "parameters",
        "files",
        "rows",
        "steps",
        "tokens seen",
        "minutes",
        "trained on",
    ]
    lines = [_row(heads), _row(["---", *["---:"] * 6, "---"])]
    merged: dict[str, dict[str, Any]] = {}
    for record in records:
        for key, cell in _cells(target, record).items():
            if "draft" in cell:
                merged.setdefault(key, cell["draft"])
    for key, draft in sorted(merged.items(), key=lambda item: _order(item[0])):
        cells = [
            _name(key),
            f"{draft['num_parameters'] / 1e6:.2f} M",
            f"{draft['files_bytes'] / 1e6:.2f} MB",
            *(_count(draft.get(name)) for name in ("num_rows", "num_steps", "tokens_seen")),
            "" if draft["minutes"] is None else f"{draft['minutes']:.1f}",
            draft.get("trained_on") or "",
        ]
        lines.append(_row(cells))
    return lines


def _served(target: str, record: Mapping[str, Any]) -> list[str]:
    cells = _cells(target, record)
    if not cells:
        return []
    measured = [cell["measured"] for cell in cells.values() if "measured" in cell]
    categories = sorted({name for m in measured for name in m["length"]} - {"all"})
    heads = ["draft", "M, MB (foreseen)", "length", *categories, "TPOT, ms", "score"]
    heads.append("trained = served")
    lines = ["", f"### {target} on {record['machine']}", ""]
    lines += [f"{_conditions(measured)} Rules `{GOALS[target].rules}`.", ""] if measured else []
    lines += [_row(heads), _row(["---", *["---:"] * (len(heads) - 2), "---"])]
    best = _best_quantised(cells)
    for key, cell in cells.items():
        name = f"**{_name(key)}**" if key in best else _name(key)
        m = cell.get("measured")
        if m is None:
            said = [name, "not served here" if "reason" in cell else _NOT_MEASURED]
            lines.append(_row([*said, *[""] * (len(heads) - len(said))]))
            continue
        lines.append(
            _row(
                [
                    name,
                    _megabytes(m["memory_bytes"]) + _foreseen(cell.get("foreseen_bytes")),
                    *(_length(m["length"].get(name)) for name in ("all", *categories)),
                    _NOT_MEASURED if m["tpot_ms"] is None else f"{m['tpot_ms']:.3f}",
                    _NOT_MEASURED if m["score"] is None else _score(m["score"]),
                    _replay(m["replay"]),
                ]
            )
        )
    reasons = [
        f"- {_name(key)}: {cell['reason']}." for key, cell in cells.items() if "reason" in cell
    ]
    notes = [f"- {note}" for note in record.get("notes", []) if note.startswith(f"{target}: ")]
    below = [*reasons, *notes]
    return [*lines, *([""] if below else []), *below]


def _conditions(measured: Sequence[Mapping[str, Any]]) -> str:
    """How many prompts of how many tokens, where all cells have the same."""
    counts = {m.get("prompts", {}).get("num_prompts") for m in measured}
    lengths = {m.get("max_tokens") for m in measured}
    if len(counts) > 1 or len(lengths) > 1 or None in counts | lengths:
        return "Cells of several runs."
    return f"{counts.pop()} held-out prompts, answers up to {lengths.pop()} tokens, greedy."


def _best_quantised(cells: Cells) -> set[str]:
    """Of each family the quantised cell of the highest score."""
    best: dict[str, tuple[float, str]] = {}
    for key, cell in cells.items():
        _, family, kind = key.split("/")
        score = cell.get("measured", {}).get("score")
        if kind != "bf16" and score is not None:
            best[family] = max(best.get(family, (0.0, "")), (score["value"], key))
    return {key for _, key in best.values()}


def _best(target: str, records: list[dict[str, Any]]) -> list[str]:
    """The best draft's points by term, and what the goal would ask for."""
    scored = [
        (cell["measured"]["score"]["value"], key, record["machine"], cell["measured"])
        for record in records
        for key, cell in _cells(target, record).items()
        if "terms" in (cell.get("measured", {}).get("score") or {})
    ]
    if not scored or GOALS[target].baseline is not None:  # a contest is against the native head
        return []
    _, key, machine, best = max(scored, key=lambda one: one[0])
    score, baseline = best["score"], best["baseline_tau"]
    rules = read_rules(GOALS[target].rules)
    k = rules.speculation.entry_num_speculative_tokens
    low = "not known" if score["low"] is None else f"{score['low']:.1f}"
    reached = score["value"] >= _GOAL and (score["low"] or 0.0) > _FLOOR
    return [
        "",
        f"### {target}: {_GOAL:g} points, the interval above {_FLOOR:g}",
        "",
        f"{'Reached' if reached else 'Not reached'}: the best draft here is {_name(key)} on "
        f"{machine}, {_score(score)}, so its interval begins at {low}. By term:",
        "",
        *term_lines(score["terms"]),
        "",
        f"What it asks for, memory at its cap: the ratio of acceptance lengths (in brackets the "
        f"length, the baseline's being {baseline:.2f} in that run; K = {k} allows {k + 1} at most) "
        "by the ratio of step times. Time per token is step time ÷ length, so a longer length "
        "counts in two terms. `python recipes/families/needed.py` makes this table for any rules.",
        "",
        *needed_lines(rules, [_FLOOR, _GOAL], baseline_length=baseline),
    ]


def _speed(target: str, record: Mapping[str, Any]) -> list[str]:
    """Training, beside the roofline of the machine that it ran on."""
    if record["target"] != target:
        return []
    peaks = record["peaks"]
    heads = [
        "draft",
        "tokens/s",
        "memory, GiB",
        "M operations a token",
        "kB a token",
        "of roofline",
    ]
    lines = [
        "",
        f"### {target}: training on {record['provenance']['machine']} ({record['device']})",
        "",
        f"`bench/train_families.py`; the target's features kept. Peaks measured there: "
        f"{peaks['operations_per_s'] / 1e12:.2f} T operations/s (bf16), "
        f"{peaks['bytes_per_s'] / 1e9:.1f} GB/s. Roofline: the larger of operations ÷ peak and "
        "bytes ÷ bandwidth, over the time it took.",
        "",
        _row(heads),
        _row(["---", *["---:"] * 5]),
    ]
    for name, found in sorted(record["families"].items()):
        cells = [name, f"{found['tokens_per_s']:,.0f}", f"{found['memory_bytes'] / 2**30:.2f}"]
        cells.append(f"{found['operations_per_token'] / 1e6:,.0f}")
        epoch = found["an_epoch"]
        cells.append(f"{epoch['bytes'] / epoch['tokens'] / 1e3:,.0f}")
        lines.append(_row([*cells, f"{100 * found['roofline']['share']:.0f} %"]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _name(key: str) -> str:
    _, family, kind = key.split("/")
    return family if kind == "bf16" else f"{family}, {kind}"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _megabytes(number: int | None) -> str:
    return _NOT_MEASURED if number is None else f"{number / 1e6:.2f}"


def _foreseen(number: int | None) -> str:
    return "" if number is None else f" ({_megabytes(number)})"


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
