"""Finished runs side by side: which differences are real, and which the same machine makes itself.

Every run is a candidate against its own measurement of one baseline; runs are compared through
their scores and ratios, paired by prompt. Runs under unlike settings are refused, not adjusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ResultError
from paceline.eval.figures import Figure, spread_over_prompts
from paceline.eval.pairing import build_pairing, included_for_tpot
from paceline.eval.ranks import Difference, Standing, compare_standings, rank_standings
from paceline.eval.ratios import (
    Measured,
    describe_ratios,
    find_score_parts,
    measure_pairing,
)
from paceline.eval.score import score_run
from paceline.rules import Rules, parse_rules

__all__ = ["compare_runs", "find_unlike"]

Result = Mapping[str, Any]

_ALIKE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("rules", ("rules", "sha256")),
    ("target weights", ("target", "weights_fingerprint")),
    ("target tokenizer", ("target", "tokenizer_sha256")),
    ("chat template", ("target", "chat_template_sha256")),
    ("prompt set", ("prompts", "sha256")),
    ("prompt counts", ("prompts", "categories")),
    ("sampling", ("sampling",)),
    ("thinking", ("thinking",)),
    ("seed", ("seed",)),
    ("cache state", ("cache_state",)),
    ("protocol", ("protocol", "kind")),
    ("machine", ("provenance", "machine")),
    ("baseline draft", ("arms", "baseline", "draft", "sha256")),
)
_ENGINE = (
    "method",
    "num_speculative_tokens",
    "vllm_version",
    "platform",
    "device_name",
    "target_architecture",
    "dtype",
    "max_model_len",
    "prefix_caching",
    "enforce_eager",
)


def compare_runs(run_dirs: Sequence[str | Path]) -> dict[str, Any]:
    """{"runs", "differences", "noise_floor"}, JSON-ready; each run is recomputed from its files.

    runs: name, candidate, score, ratios, withheld, rank (best and worst that is left open).
    differences: every pair by score and by each ratio, with a half-width and a verdict. Raises
    ResultError for fewer than two runs, unlike settings, or a run without a baseline.
    """
    names = [str(path) for path in run_dirs]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ResultError(
            f"{len(set(names))} run{'' if len(set(names)) == 1 else 's'} to compare",
            expected="two or more different run folders",
        )
    results = dict(zip(names, (score_run(path) for path in run_dirs), strict=True))
    unlike = find_unlike(results)
    if unlike:
        raise ResultError(
            "the runs cannot be compared: " + "; ".join(unlike),
            where="compare",
            expected="the same settings for every run",
            fix="Measure them again under one set of settings.",
        )
    first = results[names[0]]
    rules = parse_rules(first["rules"]["text"], where=f"{names[0]}: rules.text")
    found = {name: _measure(result, rules) for name, result in results.items()}
    floors = [result["noise_floor"] for result in results.values() if result.get("noise_floor")]
    floor = {key: max(f[key] for f in floors) for key in ("score", "tau", "tpot")} if floors else {}
    confidence = rules.statistics.confidence
    scored = [
        standing
        for name, result in results.items()
        if (standing := _score_standing(name, result, found[name], rules)) is not None
    ]
    by_score = compare_standings(scored, confidence=confidence, floor=floor.get("score"))
    ranks = rank_standings(scored, by_score)
    differences = [_describe(found, "score") for found in by_score]
    for key in ("tau", "tpot"):
        standings = [
            standing
            for name in names
            if (standing := _ratio_standing(name, found[name], key)) is not None
        ]
        width = math.log1p(floor[key]) if key in floor else None
        pairs = compare_standings(standings, confidence=confidence, floor=width)
        differences += [_describe(pair, key) for pair in pairs]
    return {
        "confidence": confidence,
        "noise_floor": floor or None,
        "runs": [_describe_run(name, results[name], ranks.get(name)) for name in names],
        "differences": differences,
    }


def find_unlike(results: Mapping[str, Result]) -> list[str]:
    """One clause a setting in which the runs differ, with each run's value."""
    unlike: list[str] = []
    for label, keys in (
        *_ALIKE,
        *((fact, ("arms", "baseline", "engine", fact)) for fact in _ENGINE),
    ):
        values = {name: _pick(result, keys) for name, result in results.items()}
        if len({repr(value) for value in values.values()}) > 1:
            shown = ", ".join(f"{_show(value)} in {name}" for name, value in values.items())
            unlike.append(f"{label} is {shown}")
    ids = {name: _list_ids(result) for name, result in results.items()}
    if len(set(ids.values())) > 1 and not any(text.startswith("prompt") for text in unlike):
        unlike.append("the prompts differ")
    return unlike


def _pick(result: Result, keys: Sequence[str]) -> Any:
    value: Any = result
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _show(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    is_hash = len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
    return text[:12] if is_hash else text[:80]


def _list_ids(result: Result) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted({(e["category"], e["id"]) for e in result["arms"]["candidate"]["requests"]})
    )


def _measure(result: Result, rules: Rules) -> Measured:
    arms = result["arms"]
    if "baseline" not in arms:
        raise ResultError("a run has no baseline", where="compare", expected="one in every run")
    entries = {name: arm["requests"] for name, arm in arms.items()}
    included, _ = included_for_tpot(entries, min_tokens=rules.protocol.min_tokens_for_tpot)
    pairing = build_pairing(entries["baseline"], entries["candidate"], included, by_name=True)
    return measure_pairing(pairing, rules, seed=result["seed"])


def _score_standing(name: str, result: Result, found: Measured, rules: Rules) -> Standing | None:
    """None for a run without a score: withheld, or a term not measured."""
    if result["score"] is None:
        return None
    parts = find_score_parts(found, *describe_ratios(found, rules), rules)
    return Standing(
        name=name,
        value=result["score"]["value"],
        cells=() if parts is None else parts.cells,
        deviations=np.empty(0) if parts is None else parts.deviations,
    )


def _ratio_standing(name: str, found: Measured, key: str) -> Standing | None:
    figure: Figure | None = found.tau if key == "tau" else found.tpot
    if figure is None or found.replicates is None:
        return None
    moved = found.replicates.log_tau - figure.log if key == "tau" else found.replicates.tpot
    cells = figure.cells if key == "tau" else spread_over_prompts(figure)
    return Standing(name=name, value=figure.log, cells=tuple(cells), deviations=moved)


def _describe(found: Difference, figure: str) -> dict[str, Any]:
    """Ratios are compared in logs, and shown as one ratio over the other."""
    as_ratio = figure != "score"
    half = found.half_width
    low = None if half is None else found.value - half
    high = None if half is None else found.value + half
    return {
        "figure": figure,
        "first": found.first,
        "second": found.second,
        "value": math.exp(found.value) if as_ratio else found.value,
        "low": math.exp(low) if as_ratio and low is not None else low,
        "high": math.exp(high) if as_ratio and high is not None else high,
        "verdict": found.verdict,
    }


def _describe_run(name: str, result: Result, ranks: tuple[int, int] | None) -> dict[str, Any]:
    score, draft = result["score"], result["arms"]["candidate"]["draft"]
    ratios = result["ratios"]
    return {
        "run": name,
        "candidate": draft["name"] if draft else result["arms"]["candidate"]["engine"]["method"],
        "k": result["arms"]["candidate"]["engine"]["num_speculative_tokens"],
        "score": None if score is None else {key: score[key] for key in ("value", "low", "high")},
        "ranked": None if score is None else score["ranked"],
        "withheld": dict(result.get("withheld") or {}),
        "rank": None if ranks is None else list(ranks),
        "ratios": {
            key: {part: ratios[key][part] for part in ("value", "low", "high")}
            for key in ("tau", "memory", "tpot")
        },
        "worst_category": ratios.get("worst_category"),
    }
