"""The noise floor of a machine: what the baseline differs from itself by, served twice.

Measured with the same protocol as the scores that it stands beside (`paceline eval --noise-floor`),
kept in the user's cache, looked up by machine, target and rules. Differences below it are ties.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ResultError
from paceline.eval.pairing import build_pairing, included_for_tpot
from paceline.eval.ratios import measure_intervals
from paceline.records import read_json, sha256_bytes, write_json
from paceline.rules import Rules
from paceline.target import cache_folder

__all__ = [
    "FLOOR_CONFIDENCE",
    "add_noise_floor",
    "find_noise_floor",
    "is_tie",
    "keep_noise_floor",
    "measure_noise_floor",
]

# twenty runs of twenty of the same draft stay inside with 95 % probability: 0.95 ** (1 / 20)
FLOOR_CONFIDENCE = 0.9974
_FORMAT = "paceline-noise/1"
_KEYS = ("machine", "vllm_version", "target", "rules", "protocol")


def measure_noise_floor(result: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """The floor from a run of one draft against itself on servers of its own.

    Half-widths at FLOOR_CONFIDENCE, or what was seen where that is wider: score in points, tau and
    tpot in ratio - 1. Raises ResultError for a run of two drafts, or too small a one.
    """
    arms = result["arms"]
    drafts = [(arms[name]["draft"] or {}).get("sha256") for name in ("baseline", "candidate")]
    methods = [arms[name]["engine"]["method"] for name in ("baseline", "candidate")]
    if drafts[0] != drafts[1] or methods[0] != methods[1] or result["aliases"]:
        raise ResultError(
            "baseline and candidate are not one draft on two servers",
            where="noise floor",
            expected="a run that `paceline eval --noise-floor` made",
        )
    statistics = dataclasses.replace(rules.statistics, confidence=FLOOR_CONFIDENCE)
    strict = dataclasses.replace(rules, statistics=statistics)
    entries = {name: arms[name]["requests"] for name in ("baseline", "candidate")}
    everyone = {name: arm["requests"] for name, arm in arms.items()}
    included, _ = included_for_tpot(everyone, min_tokens=rules.protocol.min_tokens_for_tpot)
    pairing = build_pairing(entries["baseline"], entries["candidate"], included)
    tau, tpot, score = measure_intervals(pairing, 1.0, strict, seed=result["seed"])
    if score is None or score["low"] is None:
        raise ResultError(
            f"the run gives no interval ({tau['not_measured'] or tpot['not_measured']})",
            where="noise floor",
            fix="Use more prompts.",
        )
    return {
        "format": _FORMAT,
        "score": max(score["high"] - score["value"], abs(score["value"] - rules.baseline_score)),
        "tau": max(tau["high"] / tau["value"] - 1, abs(tau["value"] - 1)),
        "tpot": max(tpot["high"] / tpot["value"] - 1, abs(tpot["value"] - 1)),
        "confidence": FLOOR_CONFIDENCE,
        "num_prompts": sum(pairing.sizes),
        **_describe_place(result),
        "measured_at": result["provenance"].get("created_at"),
    }


def keep_noise_floor(floor: Mapping[str, Any]) -> Path:
    """Writes the floor into the user's cache; an older one of the same place is replaced."""
    path = _path(floor)
    write_json(path, floor)
    return path


def find_noise_floor(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The floor measured at this machine, target, rules and protocol; None when there is none.

    A floor of more prompts or cycles than the run has would be too low for it, and is not taken.
    """
    place = _describe_place(result)
    path = _path(place)
    if not path.exists():
        return None
    floor = read_json(path)
    fits = floor.get("format") == _FORMAT and all(floor.get(key) == place[key] for key in _KEYS)
    if not fits or floor["num_prompts"] > result["prompts"]["num_prompts"]:
        return None
    return floor if (floor["num_cycles"] or 0) <= (place["num_cycles"] or 0) else None


def add_noise_floor(
    result: Mapping[str, Any], floor: Mapping[str, Any] | None, rules: Rules
) -> dict[str, Any]:
    """The result with its floor, and with whether its score is a tie with the baseline."""
    score = result["score"]
    if score is not None:
        score = {**score, "tie": is_tie(score["value"], floor, rules)}
    return {**result, "score": score, "noise_floor": None if floor is None else dict(floor)}


def is_tie(value: float, floor: Mapping[str, Any] | None, rules: Rules) -> bool | None:
    """Whether a score lies within the floor of the baseline's; None without a floor."""
    if floor is None:
        return None
    return bool(abs(value - rules.baseline_score) <= floor["score"])


def _describe_place(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a floor holds for: a name of the machine would say more than anybody needs."""
    engine = result["arms"]["baseline"]["engine"]
    protocol = result["protocol"]
    return {
        "machine": {
            "host_sha256": sha256_bytes(platform.node().encode())[:16],
            "device_name": engine["device_name"],
            "platform": engine["platform"],
            "num_cpus": len(os.sched_getaffinity(0)),
        },
        "vllm_version": engine["vllm_version"],
        "target": result["target"]["weights_fingerprint"],
        "rules": result["rules"]["sha256"],
        "protocol": protocol["kind"],
        "num_cycles": protocol.get("num_cycles"),
    }


def _path(place: Mapping[str, Any]) -> Path:
    name = sha256_bytes(repr([place[key] for key in _KEYS]).encode())[:24]
    return cache_folder() / "noise" / f"{name}.json"
