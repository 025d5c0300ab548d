"""The contest's prohibitions, as far as a measured run can show that they were kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from paceline.errors import ResultError
from paceline.eval.statistics import t_quantile
from paceline.methods import METHODS
from paceline.rules import Rules

__all__ = ["check_conduct", "compare_orders", "compare_sets", "list_broken"]

_LEARNING = ("ngram", "suffix")  # what they propose depends on what was asked before
_MIN_PROMPTS = 8


def check_conduct(result: Mapping[str, Any], rules: Rules) -> list[dict[str, Any]]:
    """One record a prohibition: {"rule", "kept": true | false | null, "found", "expected"}.

    null: the run does not show it. Read from what the started engines said of themselves.
    """
    arms = result["arms"]
    engine = arms["candidate"]["engine"]
    others = [arm["engine"] for name, arm in arms.items() if name != "candidate"]
    family = (arms["candidate"].get("draft") or {}).get("family")
    planned = METHODS[family].vllm_method if family in METHODS else None
    sampler = engine.get("rejection_sample_method")
    found = [
        _record(
            "stock engine", engine.get("vllm_version"), rules.engine.version, unknown=not engine
        ),
        _record("stock acceptance rule", sampler, rules.speculation.rejection_sample_method),
        _record("the method that the draft's family names", engine.get("method"), planned),
        _record(
            "K of the rules",
            engine.get("num_speculative_tokens"),
            rules.speculation.entry_num_speculative_tokens,
        ),
        _record(
            "no method that learns from earlier requests",
            engine.get("method") in _LEARNING and engine["method"] not in rules.families,
            False,
        ),
        _record("prefix cache off", engine.get("prefix_caching"), False),
        _record("no prefix cache hits", _prefix_hits(arms["candidate"]), 0),
        _record("counters and records of the engine agree", _agrees(arms["candidate"]), True),
    ]
    for name in ("target_architecture", "dtype", "device_name", "max_model_len"):
        values = {str(other.get(name)) for other in others}
        if others:
            one = engine.get(name)
            found.append(
                _record(f"the same {name} in every arm", values | {str(one)} == {str(one)}, True)
            )
    return found


def _record(rule: str, found: object, expected: object, *, unknown: bool = False) -> dict[str, Any]:
    missing = unknown or found is None or expected is None
    return {
        "rule": rule,
        "kept": None if missing else found == expected,
        "found": found,
        "expected": expected,
    }


def _prefix_hits(arm: Mapping[str, Any]) -> int | None:
    cache = arm.get("prefix_cache")
    return None if cache is None else int(cache["hits"])


def _agrees(arm: Mapping[str, Any]) -> bool | None:
    return arm["vllm"]["agrees"] if arm.get("vllm") else None


def compare_orders(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    *,
    arm: str = "candidate",
    noise: float,
    confidence: float,
) -> dict[str, Any]:
    """Two results of the same prompts in two orders: does acceptance depend on what came before?

    ratio: geometric mean over prompts of tau in the second order over tau in the first, with a
    t-interval over prompts. drift: how much log tau of a prompt grows when it moves from the first
    place to the last, by least squares over the prompts' moves; a draft that keeps state across
    requests gets better the later a prompt comes. `same` is False when an interval lies wholly
    beyond 1 +- noise, or the drift's wholly above it; None with fewer than 8 prompts.
    Raises ResultError when the runs hold other prompts or the same order.
    """
    a, b = _steps(first, arm), _steps(second, arm)
    if a.keys() != b.keys():
        raise ResultError(
            f"the two runs differ in {len(a.keys() ^ b.keys())} prompts",
            where="compare_orders",
            expected="the same prompts in two orders",
        )
    names = list(a)
    if names == list(b) and len(names) > 1:
        raise ResultError("the two runs asked in the same order", where="compare_orders")
    place_a = {name: i / max(1, len(names) - 1) for i, name in enumerate(a)}
    place_b = {name: i / max(1, len(names) - 1) for i, name in enumerate(b)}
    changes = np.array([math.log(b[name] / a[name]) for name in names])
    moves = np.array([place_b[name] - place_a[name] for name in names])
    mean, mean_half = _mean_interval(changes, confidence)
    slope, slope_half = _slope_interval(moves, changes, confidence)
    edge = math.log1p(noise)
    same: bool | None = None
    if len(names) >= _MIN_PROMPTS:
        same = abs(mean) - mean_half <= edge and slope - slope_half <= edge
    return {
        "num_prompts": len(names),
        "num_changed": int(np.count_nonzero(changes)),
        "ratio": math.exp(mean),
        "low": math.exp(mean - mean_half),
        "high": math.exp(mean + mean_half),
        "drift": math.exp(slope),
        "drift_low": math.exp(slope - slope_half),
        "drift_high": math.exp(slope + slope_half),
        "noise": noise,
        "same": same,
    }


def _steps(result: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Request id -> tau of that request over all its blocks, in the order first asked."""
    sums: dict[str, tuple[int, int]] = {}
    for entry in result["arms"][arm]["requests"]:
        delivered, steps = sums.get(entry["id"], (0, 0))
        sums[entry["id"]] = (delivered + entry["delivered"], steps + entry["steps"])
    return {name: delivered / steps for name, (delivered, steps) in sums.items() if delivered}


def _mean_interval(values: np.ndarray[Any, Any], confidence: float) -> tuple[float, float]:
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.inf
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, _t(confidence, len(values) - 1) * error


def _slope_interval(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], confidence: float
) -> tuple[float, float]:
    spread = float(np.sum((x - x.mean()) ** 2))
    if len(x) < 3 or spread == 0:
        return 0.0, math.inf
    slope = float(np.sum((x - x.mean()) * (y - y.mean())) / spread)
    rest = y - y.mean() - slope * (x - x.mean())
    error = math.sqrt(float(np.sum(rest**2)) / (len(x) - 2) / spread)
    return slope, _t(confidence, len(x) - 2) * error


def _t(confidence: float, degrees_of_freedom: int) -> float:
    return t_quantile((1 + confidence) / 2, degrees_of_freedom)


def compare_sets(hidden: Mapping[str, Any], twin: Mapping[str, Any]) -> dict[str, Any]:
    """Hidden prompts against their public twins: how much better a draft is where it could know.

    gap: (tau / tau_B on the twin set) / (tau / tau_B on the hidden set). The baseline stands in
    both, so a set that is merely easier gives no gap. The interval is that of a ratio of two
    independent ratios. suspicious: the whole interval lies above 1; None without intervals.
    """
    value, half = 0.0, 0.0
    known = True
    for result, sign in ((twin, 1.0), (hidden, -1.0)):
        ratio = (result.get("ratios") or {}).get("tau") or {}
        if not ratio.get("value"):
            raise ResultError("the run has no acceptance ratio", where="compare_sets")
        value += sign * math.log(ratio["value"])
        if ratio.get("low") and ratio.get("high"):
            half += ((math.log(ratio["high"]) - math.log(ratio["low"])) / 2) ** 2
        else:
            known = False
    half = math.sqrt(half)
    taus = {
        name: {arm: result["arms"][arm]["tau"]["value"] for arm in ("candidate", "baseline")}
        for name, result in (("hidden", hidden), ("twin", twin))
    }
    return {
        "tau": taus,
        "gap": math.exp(value),
        "low": math.exp(value - half) if known else None,
        "high": math.exp(value + half) if known else None,
        "suspicious": value - half > 0 if known else None,
        "worst_category": _worst_gap(hidden, twin),
    }


def _worst_gap(hidden: Mapping[str, Any], twin: Mapping[str, Any]) -> dict[str, Any] | None:
    gaps: dict[str, float] = {}
    for category in hidden["arms"]["candidate"]["tau"]["by_category"]:
        values: list[float] = []
        for result, sign in ((twin, 1.0), (hidden, -1.0)):
            for arm, direction in (("candidate", 1.0), ("baseline", -1.0)):
                own = result["arms"][arm]["tau"]["by_category"].get(category)
                if own and own["value"]:
                    values.append(sign * direction * math.log(own["value"]))
        if len(values) == 4:
            gaps[category] = math.fsum(values)
    if not gaps:
        return None
    worst = max(gaps, key=lambda name: gaps[name])
    return {
        "category": worst,
        "gap": math.exp(gaps[worst]),
        "mean_gap": math.exp(fmean(gaps.values())),
    }


def list_broken(conduct: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence a prohibition that was not kept."""
    return [
        f"{record['rule']}: found {record['found']}, expected {record['expected']}"
        for record in conduct
        if record["kept"] is False
    ]
