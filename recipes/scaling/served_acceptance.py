"""Acceptance of several trainings of one draft, served by vLLM on the same held-out prompts.

Greedy, so that every draft is asked along the same text up to near ties; pairs are by prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import Prompt, build_requests, plain_thinking, read_prompts
from paceline.draft import read_draft
from paceline.endpoint import Answer, Sampling
from paceline.eval.statistics import half_width, measure_spread
from paceline.serve import build_plan, start
from paceline.target import TargetFacts

_CONFIDENCE = 0.95


def answer_held_out(
    target: TargetFacts,
    folder: Path,
    *,
    num_prompts: int,
    max_tokens: int,
    concurrency: int = 1,
    **engine: Any,
) -> tuple[list[Prompt], list[Answer]]:
    """Every so many of the held-out prompts, and the draft's greedy answers in their order.

    engine: more of `paceline.serve.build_plan`.
    """
    prompts = read_prompts("held-out").prompts
    chosen = prompts[:: max(1, len(prompts) // num_prompts)][:num_prompts]
    sampling = Sampling(max_tokens=max_tokens)
    requests = build_requests(chosen, target, sampling, thinking=plain_thinking(target))
    plan = build_plan(target, read_draft(folder), **engine)
    with start(plan, log_path=folder.with_name(folder.name + ".engine.log")) as endpoint:
        answers = endpoint.generate(requests, concurrency=concurrency)
    return list(chosen), answers


def measure_lengths(
    target: TargetFacts,
    folder: Path,
    *,
    device: str,
    threads: int | None,
    num_prompts: int,
    max_tokens: int,
) -> list[float]:
    """Acceptance length of each held-out prompt's answer: 1 + accepted tokens a drafting step."""
    _, answers = answer_held_out(
        target,
        folder,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        device=device,
        num_threads=threads,
    )
    return [1.0 + float(np.mean(answer.per_step_accepted or (0,))) for answer in answers]


def compare_lengths(one: list[float], other: list[float]) -> dict[str, Any]:
    """Mean acceptance lengths over the prompts and their difference, other - one, with 95 %.

    within_noise: None where there are too few prompts for an interval.
    """
    differences = np.array(other) - np.array(one)
    spread = measure_spread([differences[:, None]])
    width = None if spread is None else half_width(spread, confidence=_CONFIDENCE)
    mean = float(differences.mean())
    same = None if width is None else abs(mean) <= width
    return {
        "num_prompts": len(one),
        "acceptance_length": [float(np.mean(one)), float(np.mean(other))],
        "difference": mean,
        "half_width": width,
        "within_noise": True if not differences.any() else same,
    }
