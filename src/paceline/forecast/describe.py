"""A forecast in lines for a person."""

from __future__ import annotations

import dataclasses

from paceline.forecast.design import Design
from paceline.forecast.memory import DraftMemory
from paceline.forecast.run import Forecast
from paceline.forecast.score import Goal

__all__ = ["describe_bytes", "describe_design", "describe_forecast"]

_TERMS = {"tau": "acceptance", "memory": "memory", "tpot": "time"}


def describe_forecast(forecast: Forecast) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(label, value)]): the design, its bytes, its limits, the score."""
    memory = forecast.memory
    sections = [
        ("Design", describe_design(forecast.design)),
        (
            f"Bytes at {memory.context_tokens:,} tokens, {_ON[forecast.device]}",
            describe_bytes(memory),
        ),
        (
            "Limits",
            [
                (
                    name.replace("_", " "),
                    f"{value:,} of {limit:,}: {'holds' if ok else 'TOO LARGE'}",
                )
                for name, (value, limit, ok) in forecast.limits.items()
            ],
        ),
    ]
    if forecast.baseline is not None and forecast.baseline_memory is not None:
        base = forecast.baseline
        lines = [("design", f"{base.family}, K = {base.num_speculative_tokens}")]
        sections.append(("Baseline", lines + _memory(forecast.baseline_memory)))
    kind = "assumed" if forecast.step_source is None else "fitted to measured runs"
    sections.append((f"Step time ({kind})", _step(forecast)))
    if forecast.goals is not None and forecast.best is not None:
        lines = [_goal(goal) for goal in forecast.goals]
        label, text = _goal(forecast.best)
        sections.append(("Score", [*lines, ("at most", f"{label} with {text}")]))
    if forecast.provisional:
        used = [name for name in forecast.provisional if name.split(".")[0] in _USED]
        sections.append(("Provisional in the rules", [("values", ", ".join(used))]))
    if forecast.warnings:
        sections.append(("Warnings", [("-", text) for text in forecast.warnings]))
    return sections


_ON = {"cuda": "on a GPU", "cpu": "on a CPU"}
_USED = ("terms", "gate", "limits", "speculation")


def describe_bytes(memory: DraftMemory) -> list[tuple[str, str]]:
    """Parameters, files, M by its parts and what loading takes, as (label, value)."""
    sizes = memory.sizes
    return [
        ("parameters", f"{sizes.num_parameters:,}"),
        ("files", f"{sizes.files_bytes:,} bytes"),
        *_memory(memory),
        ("load peak", f"{sizes.load_peak_bytes:,} bytes of weights"),
        ("attention block", f"{memory.block_tokens:,} tokens"),
    ]


def describe_design(design: Design) -> list[tuple[str, str]]:
    """Every setting with where it comes from, as (label, value)."""
    lines = []
    for field in dataclasses.fields(design):
        value = getattr(design, field.name)
        if field.name == "stated" or value in (0, False, ""):
            continue
        source = "" if field.name in ("family", *design.stated) else "  (from the target)"
        if field.name in ("weights", "kv_dtype", "num_layers", "num_taps", "one_head", "parallel"):
            source = source and "  (default)"
        if field.name == "num_heads" and source:
            source = "  (the target's, or the most that divide hidden_size)"
        text = f"{value:,}" if type(value) is int else str(value).lower()
        lines.append((field.name, text + source))
    return lines


def _memory(memory: DraftMemory) -> list[tuple[str, str]]:
    sizes = memory.sizes
    return [
        ("M", f"{memory.total_bytes:,} bytes ({_size(memory.total_bytes)})"),
        ("  weights", f"{sizes.weights_bytes:,}"),
        ("  buffers", f"{sizes.buffers_bytes:,}"),
        ("  keys and values", f"{memory.kv_bytes:,}"),
        ("  recurrent states", f"{memory.state_bytes:,}"),
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def _ms(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _step(forecast: Forecast) -> list[tuple[str, str]]:
    step = forecast.step
    context = f"{forecast.length_tokens:,} tokens of context"
    source = (
        "assumption",
        f"bytes moved at {step.bandwidth_gb_s:,.0f} GB/s, {context};"
        " launches, arithmetic and wider verification cost nothing",
    )
    if forecast.step_source is not None:
        source = ("model", f"{forecast.step_source}; {context}")
    lines = [
        source,
        ("target alone", f"{_ms(forecast.plain_step.step_ms)} ms"),
        ("design", f"{_ms(step.step_ms)} ms a step, {_size(step.draft_bytes)} for drafting"),
    ]
    if forecast.baseline_step is not None and forecast.step_ratio is not None:
        lines += [
            ("baseline", f"{_ms(forecast.baseline_step.step_ms)} ms a step"),
            (
                "TPOT_B / TPOT",
                f"{forecast.step_ratio:.3f} x the ratio of acceptance lengths; baseline's assumed:"
                f" {forecast.baseline_acceptance_length:.2f}",
            ),
            ("M_B / M", f"{forecast.memory_ratio:.3f}"),
        ]
    return lines


def _goal(goal: Goal) -> tuple[str, str]:
    label = f"{goal.score:.0f}"
    capped = ", ".join(_TERMS[name] for name in goal.capped)
    if goal.acceptance_length is None:
        return label, f"out of reach at any acceptance length: capped: {capped}"
    points = " + ".join(f"{_TERMS[name]} {value:.1f}" for name, value in goal.points.items())
    text = f"acceptance length {goal.acceptance_length:.2f} ({points})"
    if capped:
        text += f"; capped: {capped}"
    if goal.gated:
        text += "; the gate decides, the score is higher"
    if not goal.reachable:
        text += "; OUT OF REACH: above K + 1"
    return label, text
