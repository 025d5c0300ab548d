"""The measured facts as tables of strings, shared by the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.fields import (
    list_arms,
    pick_dict,
    pick_list,
    pick_number,
)
from paceline.report.formats import (
    NOT_MEASURED,
    clean_text,
    format_bytes,
    format_count,
    format_number,
    format_share,
)

__all__ = [
    "MEMORY_PARTS",
    "Table",
    "build_acceptance_table",
    "build_category_table",
    "build_fidelity_table",
    "build_memory_table",
    "build_position_table",
    "build_timing_table",
    "list_drafting_arms",
    "read_shares",
]

Result = Mapping[str, Any]
MEMORY_PARTS = (
    ("weights_bytes", "weights"),
    ("kv_bytes", "KV cache"),
    ("state_bytes", "recurrent state"),
    ("buffers_bytes", "buffers"),
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """First column is a label, the others are right-aligned values; rows are already strings."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def list_drafting_arms(result: Result) -> tuple[str, ...]:
    """Arms that speculate: all but "plain"."""
    return tuple(arm for arm in list_arms(result) if arm != "plain")


def read_shares(result: Result, *keys: str) -> tuple[float | None, ...]:
    """A list of numbers or nulls at a path."""
    values = pick_list(result, *keys)
    return tuple(
        pick_number({keys[-1]: {str(i): value}}, keys[-1], str(i)) for i, value in enumerate(values)
    )


def _by_arm(
    result: Result,
    title: str,
    arms: Sequence[str],
    measures: Sequence[tuple[str, tuple[str, ...], Callable[[float | None], str]]],
    note: str = "",
) -> Table:
    rows = tuple(
        (label, *(write(pick_number(result, "arms", arm, *path)) for arm in arms))
        for label, path, write in measures
    )
    columns = ("", *(clean_text(arm, limit=24) for arm in arms))
    return Table(title=title, columns=columns, rows=rows, note=note)


def build_acceptance_table(result: Result) -> Table:
    """tau and vLLM's own counters side by side, one column an arm."""
    return _by_arm(
        result,
        "Acceptance",
        list_drafting_arms(result),
        (
            ("acceptance length, scored (tau)", ("tau", "value"), format_number),
            ("acceptance length, vLLM's own", ("vllm", "acceptance_length"), format_number),
            ("acceptance rate", ("vllm", "acceptance_rate"), format_share),
            ("coverage (steps with a draft)", ("coverage",), format_share),
            ("drafting steps", ("vllm", "num_steps"), format_count),
            ("drafted tokens", ("vllm", "num_drafted"), format_count),
            ("accepted tokens", ("vllm", "num_accepted"), format_count),
        ),
        note="Both lengths include the target's own token, so 1.000 means that no draft held.",
    )


def build_position_table(result: Result) -> Table:
    """Share of steps whose first i drafted tokens held, and the same given that earlier held."""
    arms = list_drafting_arms(result)
    columns = ["position"]
    values: list[tuple[float | None, ...]] = []
    for arm in arms:
        name = clean_text(arm, limit=24)
        columns += [name, "given earlier"]
        values.append(read_shares(result, "arms", arm, "vllm", "position_acceptance"))
        values.append(read_shares(result, "arms", arm, "vllm", "conditional_acceptance"))
    depth = max((len(shares) for shares in values), default=0)
    rows = tuple(
        (
            str(i + 1),
            *(format_number(shares[i]) if i < len(shares) else "-" for shares in values),
        )
        for i in range(depth)
    )
    return Table(title="Acceptance by position", columns=tuple(columns), rows=rows)


def build_category_table(result: Result) -> Table:
    """tau by prompt category, candidate beside baseline."""
    arms = list_drafting_arms(result)
    categories = pick_dict(result, "prompts", "categories")
    names = dict.fromkeys(categories)
    for arm in arms:
        names.update(dict.fromkeys(pick_dict(result, "arms", arm, "tau", "by_category")))
    rows = []
    for name in names:
        taus = [
            pick_number(result, "arms", arm, "tau", "by_category", name, "value") for arm in arms
        ]
        row = [clean_text(name, limit=40), format_count(pick_number(categories, name))]
        row += [format_number(tau) for tau in taus]
        if arms[:2] == ("candidate", "baseline"):
            ours, theirs = taus[:2]
            row.append(format_number(ours / theirs if ours is not None and theirs else None))
        rows.append(tuple(row))
    columns = ("", "prompts", *(clean_text(arm, limit=24) for arm in arms))
    if arms[:2] == ("candidate", "baseline"):
        columns = (*columns, "ratio")
    return Table(title="Acceptance length by category", columns=columns, rows=tuple(rows))


def _two_digits(value: float | None) -> str:
    return format_number(value, 2)


def build_timing_table(result: Result) -> Table:
    return _by_arm(
        result,
        "Time",
        list_arms(result),
        (
            ("time per token, geometric mean, ms", ("tpot_ms", "geomean"), _two_digits),
            ("time per token, median, ms", ("tpot_ms", "median"), _two_digits),
            ("time to first token, median, ms", ("ttft_ms", "median"), _two_digits),
            ("step time, ms", ("step_ms",), _two_digits),
            ("requests timed", ("tpot_ms", "num_requests"), format_count),
            ("requests too short to time", ("tpot_ms", "num_excluded"), format_count),
            ("failed requests", ("failures",), format_count),
        ),
    )


def build_memory_table(result: Result) -> Table:
    arms = list_drafting_arms(result)
    parts = [(label, ("memory", key), format_bytes) for key, label in MEMORY_PARTS]
    total = ("total", ("memory", "total_bytes"), format_bytes)
    exact = ("total in bytes", ("memory", "total_bytes"), format_count)
    contexts = {pick_number(result, "arms", arm, "memory", "context_tokens") for arm in arms}
    contexts.discard(None)
    note = ""
    if contexts:
        lengths = " and ".join(format_count(tokens) for tokens in sorted(contexts, key=str))
        note = f"What the draft adds, for one sequence of {lengths} tokens."
    return _by_arm(result, "Draft memory", arms, (*parts, total, exact), note=note)


def _write_widest(fidelity: Mapping[str, Any]) -> str:
    if pick_number(fidelity, "near_tie") == 0:
        return "none"
    return format_number(pick_number(fidelity, "max_near_tie_gap"))


_DIFFERENCES = (
    ("less likely, nat a token", "nll_nats", 3),
    ("longer, tokens", "num_tokens", 1),
    ("more end by themselves", "eos_share", 3),
    ("more varied", "distinct_2", 3),
)


def _write_difference(found: Mapping[str, Any], digits: int) -> str:
    """ "+0.012 ± 0.020": the mean over texts, and what chance explains."""
    mean, half = pick_number(found, "mean"), pick_number(found, "half_width")
    if mean is None:
        return NOT_MEASURED
    if not mean and not half:
        return "none"
    text = f"{mean:+.{digits}f}"
    return text if half is None else f"{text} ± {half:.{digits}f}"


def build_fidelity_table(result: Result) -> Table:
    """Texts compared with the target's own, one column an arm."""
    found = pick_dict(result, "fidelity")
    arms = tuple(arm for arm in list_arms(result) if arm in found)
    measures: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
        ("texts compared", "num_texts", format_count),
        ("identical", "identical", format_count),
        ("differ at a near tie", "near_tie", format_count),
        ("differ for real", "real_fork", format_count),
        ("same but shorter or longer", "num_shorter", format_count),
        ("near-tie tolerance, nat", "tolerance", format_number),
    )
    rows = tuple(
        (label, *(write(pick_number(found, arm, key)) for arm in arms))
        for label, key, write in measures
    )
    gaps = (_write_widest(pick_dict(found, arm)) for arm in arms)
    rows = (*rows, ("widest near tie, nat", *gaps))
    for label, key in (("loops, with the draft", "arm"), ("loops, target alone", "plain")):
        counts = (pick_number(found, arm, "loops", key, "num_looping") for arm in arms)
        rows = (*rows, (label, *(format_count(count) for count in counts)))
    for label, key, digits in _DIFFERENCES:
        cells = (
            _write_difference(pick_dict(found, arm, "differences", key), digits) for arm in arms
        )
        rows = (*rows, (label, *cells))
    if not arms:
        rows = (("texts compared", NOT_MEASURED),)
    columns = ("", *(clean_text(arm, limit=24) for arm in arms)) if arms else ("", "")
    return Table(title="Fidelity to the target's own text", columns=columns, rows=rows)
