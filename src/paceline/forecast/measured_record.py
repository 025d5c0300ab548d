"""What was measured by shape, as lines for a person, held against the forecast."""

from __future__ import annotations

import dataclasses

from paceline.forecast.design import build_design
from paceline.forecast.measure import Measured
from paceline.forecast.memory import measure_memory
from paceline.forecast.shape import CachePlan, TargetShape
from paceline.forecast.steps import StepPoint, StepRun

__all__ = ["describe_measured", "describe_memory", "foresee_memory", "shape_as_run"]


def describe_measured(
    found: Measured, shape: TargetShape
) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(label, value)]): step times a configuration, memory beside the forecast's."""
    sections = []
    for run in found.runs:
        lines = [(f"{p.context_tokens:,} tokens", _time(p)) for p in run.points]
        if run.memory is not None:
            lines.append(("M", describe_memory(run, shape)))
        sections.append((f"{run.name} ({_what(run)})", lines))
    about = [("on", f"{run.machine}, {run.engine}") for run in found.runs[:1]]
    about.append(("measured before", f"{found.num_cached} configurations"))
    about += [(f"{name} FAILED", why) for name, why in found.failed.items()]
    if found.left:
        about.append(("not reached", f"{', '.join(found.left)}; run the same command again"))
    return [*sections, ("Runs by shape", about)]


def describe_memory(run: StepRun, shape: TargetShape) -> str:
    """Bytes that the started engine holds for the draft, and how far off the forecast is."""
    assert run.memory is not None
    total, foreseen = run.memory["total_bytes"], foresee_memory(run, shape)
    off = f"{foreseen / total - 1:+.2%}" if total else "both nothing" if not foreseen else "all"
    return f"{total:,} bytes held, {foreseen:,} foreseen ({off})"


def foresee_memory(run: StepRun, shape: TargetShape) -> int:
    """M of a run's design by the forecast, for the context at which its engine was asked."""
    assert run.memory is not None
    shape = shape_as_run(shape)
    return measure_memory(
        build_design(run.settings, shape, where=run.name),
        shape,
        context_tokens=run.memory["context_tokens"],
        plan=CachePlan(device="cpu" if run.machine.startswith("cpu ") else "cuda"),
    ).total_bytes


def shape_as_run(shape: TargetShape) -> TargetShape:
    """Runs by shape leave M-RoPE out, and then a draft may share the target's rotary table."""
    rope = {k: v for k, v in shape.facts.rope_parameters.items() if not k.startswith("mrope")}
    return dataclasses.replace(shape, facts=dataclasses.replace(shape.facts, rope_parameters=rope))


def _what(run: StepRun) -> str:
    if not run.settings:
        return "the target alone"
    decree = "acceptance as it falls"
    if run.acceptance_length is not None:
        decree = f"acceptance {run.acceptance_length:.2f} by decree"
    return f"{run.settings['family']}, K = {run.num_speculative_tokens}, {decree}"


def _time(point: StepPoint) -> str:
    text = (
        f"{point.step_ms:.3f} ms a step ({point.step_ms_low:.3f} to {point.step_ms_high:.3f}),"
        f" {point.tpot_ms:.3f} ms a token"
    )
    if point.ratio is None:
        return text
    return (
        f"{text}; {point.ratio:.3f} of the reference's step"
        f" ({point.ratio_low:.3f} to {point.ratio_high:.3f}, {point.num_repeats} pairs)"
    )
