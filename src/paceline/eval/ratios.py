"""The candidate against the baseline: three ratios, the score, and their intervals.

Everything here is a pure function of per-request entries (see result.json, "requests"), memory
totals, rules and a seed, so that a score can be recomputed from its file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ResultError
from paceline.eval.statistics import draw_resamples, interval
from paceline.rules import Rules, Score, compute_score

__all__ = ["compute_ratios", "included_for_tpot", "memory_ratio"]

Entry = Mapping[str, Any]
Array = NDArray[np.float64]


def included_for_tpot(
    arms: Mapping[str, Sequence[Entry]], *, min_tokens: int
) -> tuple[set[str], int]:
    """Ids with enough tokens and a time in every arm, and how many were excluded."""
    included: set[str] | None = None
    everything: set[str] = set()
    for entries in arms.values():
        good = {
            e["id"] for e in entries if e["tpot_ms"] is not None and e["num_tokens"] >= min_tokens
        }
        everything |= {e["id"] for e in entries}
        included = good if included is None else included & good
    return included or set(), len(everything) - len(included or set())


def memory_ratio(baseline_bytes: int | None, candidate_bytes: int | None) -> float | None:
    """M_B / M; infinite for a candidate of 0 bytes, 1.0 for two of 0; None when not measured."""
    if baseline_bytes is None or candidate_bytes is None:
        return None
    if candidate_bytes == 0:
        return 1.0 if baseline_bytes == 0 else math.inf
    return baseline_bytes / candidate_bytes


def compute_ratios(
    arms: Mapping[str, Sequence[Entry]],
    memory_bytes: Mapping[str, int | None],
    rules: Rules,
    *,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Any] | None, list[str]]:
    """(ratios, score, notes) as result.json holds them; score None when a term is missing.

    arms: "baseline" and "candidate" (and "plain") -> entries of the same prompts.
    """
    included, num_excluded = included_for_tpot(arms, min_tokens=rules.protocol.min_tokens_for_tpot)
    table = _Table(arms, included)
    notes = []
    memory = memory_ratio(memory_bytes["baseline"], memory_bytes["candidate"])
    every = [np.arange(size)[None, :] for size in table.sizes]
    draws = None
    if all(size >= 2 for size in table.sizes):
        draws = draw_resamples(table.sizes, num_resamples=rules.statistics.num_resamples, seed=seed)
    else:
        notes.append("no intervals: they need two prompts in every category")
    freedom = sum(size - 1 for size in table.sizes)

    def measure(figure: Callable[[list[NDArray[np.int64]]], Array]) -> tuple[dict[str, Any], Any]:
        value = _number(figure(every)[0])
        replicates = None if draws is None or value is None else figure(draws)
        low, high = None, None
        if replicates is not None and bool(np.all(np.isfinite(replicates))):
            low, high = interval(
                replicates, confidence=rules.statistics.confidence, degrees_of_freedom=freedom
            )
        return {"value": value, "low": low, "high": high}, replicates

    tau, tau_draws = measure(table.tau_ratio)
    medians, median_draws = measure(table.ratio_of_medians)
    paired, paired_draws = measure(table.paired_geomean)
    by_medians = rules.terms.tpot_statistic == "ratio_of_medians"
    tpot, tpot_draws = (medians, median_draws) if by_medians else (paired, paired_draws)
    finite = memory if memory is not None and math.isfinite(memory) else None
    ratios = {
        "tau": tau,
        "memory": {
            "value": finite,
            "low": finite,
            "high": finite,
            "unbounded": memory is not None and finite is None,
        },
        "tpot": {
            **tpot,
            "statistic": rules.terms.tpot_statistic,
            "ratio_of_medians": medians["value"],
            "paired_geomean": paired["value"],
            "num_prompts": len(included),
            "num_excluded": num_excluded,
        },
    }
    missing = [
        name
        for name, value in (("tau", tau["value"]), ("memory", memory), ("tpot", tpot["value"]))
        if value is None
    ]
    if missing:
        notes.append(f"no score: {', '.join(missing)} not measured")
        return ratios, None, notes
    score = build_score(ratios, rules)
    if tau["low"] is not None and tpot["low"] is not None:
        values = np.array(
            [
                compute_score(rules, tau_ratio=a, memory_ratio=memory or 0.0, tpot_ratio=b).value
                for a, b in zip(tau_draws.tolist(), tpot_draws.tolist(), strict=True)
            ]
        )
        score["low"], score["high"] = interval(
            values, confidence=rules.statistics.confidence, degrees_of_freedom=freedom
        )
    return ratios, score, notes


def build_score(ratios: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """The score from three ratios alone, as result.json holds it, without an interval."""
    memory = math.inf if ratios["memory"]["unbounded"] else ratios["memory"]["value"]
    score: Score = compute_score(
        rules,
        tau_ratio=ratios["tau"]["value"],
        memory_ratio=memory,
        tpot_ratio=ratios["tpot"]["value"],
    )
    return {
        "value": score.value,
        "low": None,
        "high": None,
        "terms": {
            term.name: {
                "ratio": term.ratio if math.isfinite(term.ratio) else None,
                "capped_ratio": term.capped_ratio,
                "cap": term.cap,
                "weight": term.weight,
                "points": term.points,
            }
            for term in score.terms
        },
        "gate": {"minimum_tau_ratio": score.minimum_tau_ratio, "passed": score.ranked},
    }


class _Table:
    """Entries as arrays, one row a prompt, rows grouped by category; both sorted by name."""

    def __init__(self, arms: Mapping[str, Sequence[Entry]], included: set[str]) -> None:
        by_id = {arm: {e["id"]: e for e in arms[arm]} for arm in ("baseline", "candidate")}
        ids = sorted(by_id["baseline"])
        if ids != sorted(by_id["candidate"]):
            raise ResultError("the arms answered different prompts", where="arms")
        groups: dict[str, list[str]] = {}
        for name in ids:
            groups.setdefault(by_id["baseline"][name]["category"], []).append(name)
        self.groups = [groups[category] for category in sorted(groups)]
        self.sizes = [len(group) for group in self.groups]
        self._delivered = self._read(by_id, lambda e: float(e["delivered"]))
        self._steps = self._read(by_id, lambda e: float(e["steps"]))
        self._tpot = self._read(
            by_id, lambda e: float(e["tpot_ms"]) if e["id"] in included else math.nan
        )

    def _read(
        self, by_id: Mapping[str, Mapping[str, Entry]], read: Callable[[Entry], float]
    ) -> dict[str, list[Array]]:
        return {
            arm: [np.array([read(entries[name]) for name in group]) for group in self.groups]
            for arm, entries in by_id.items()
        }

    def tau_ratio(self, draws: list[NDArray[np.int64]]) -> Array:
        return self._tau("candidate", draws) / self._tau("baseline", draws)

    def _tau(self, arm: str, draws: list[NDArray[np.int64]]) -> Array:
        by_category = []
        for delivered, steps, index in zip(
            self._delivered[arm], self._steps[arm], draws, strict=True
        ):
            total = steps[index].sum(axis=1)
            with np.errstate(invalid="ignore", divide="ignore"):
                by_category.append(
                    np.where(total > 0, delivered[index].sum(axis=1) / total, math.nan)
                )
        return _mean_of_known(np.stack(by_category))

    def ratio_of_medians(self, draws: list[NDArray[np.int64]]) -> Array:
        medians = {}
        for arm, groups in self._tpot.items():
            drawn = [values[index] for values, index in zip(groups, draws, strict=True)]
            medians[arm] = _median_of_known(np.concatenate(drawn, axis=1))
        return medians["baseline"] / medians["candidate"]

    def paired_geomean(self, draws: list[NDArray[np.int64]]) -> Array:
        """Mean over categories of the mean log ratio, so that every category counts alike."""
        by_category = [
            _mean_of_known(np.log(base[index] / mine[index]).T)
            for base, mine, index in zip(
                self._tpot["baseline"], self._tpot["candidate"], draws, strict=True
            )
        ]
        return np.asarray(np.exp(_mean_of_known(np.stack(by_category))), dtype=np.float64)


def _mean_of_known(values: Array) -> Array:
    """Mean over the first axis without NaN; NaN where nothing is known."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(count > 0, total / count, math.nan), dtype=np.float64)


def _median_of_known(values: Array) -> Array:
    """Median of each row without NaN; NaN where nothing is known."""
    known = (~np.isnan(values)).sum(axis=1)
    ordered = np.sort(values, axis=1)  # NaN sorts last
    rows = np.arange(len(values))
    upper = ordered[rows, np.minimum(known // 2, values.shape[1] - 1)]
    lower = ordered[rows, np.maximum((known - 1) // 2, 0)]
    return np.asarray(np.where(known > 0, (upper + lower) / 2, math.nan), dtype=np.float64)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
