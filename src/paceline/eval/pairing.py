"""Baseline and candidate side by side: arrays [prompts, blocks] for each category."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ResultError

__all__ = ["Arm", "Pairing", "build_pairing", "included_for_tpot"]

Array = NDArray[np.float64]
Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm's measurements, one array [prompts, blocks] a category.

    delivered, steps: see acceptance. log_tpot: NaN for a prompt whose time does not count.
    """

    delivered: tuple[Array, ...]
    steps: tuple[Array, ...]
    log_tpot: tuple[Array, ...]


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """categories, sorted, and the ids in each; the j-th blocks of both arms are a pair."""

    categories: tuple[str, ...]
    ids: tuple[tuple[str, ...], ...]
    baseline: Arm
    candidate: Arm

    @property
    def sizes(self) -> list[int]:
        return [len(group) for group in self.ids]

    @property
    def is_same(self) -> bool:
        """Both arms are one measurement, so that nothing is left to chance."""
        return all(
            np.array_equal(a, b, equal_nan=True)
            for one, other in (
                (self.baseline.delivered, self.candidate.delivered),
                (self.baseline.steps, self.candidate.steps),
                (self.baseline.log_tpot, self.candidate.log_tpot),
            )
            for a, b in zip(one, other, strict=True)
        )

    @property
    def num_blocks(self) -> int:
        return self.baseline.steps[0].shape[1] if self.ids else 0


def included_for_tpot(
    arms: Mapping[str, Sequence[Entry]], *, min_tokens: int
) -> tuple[set[str], int]:
    """Ids with enough tokens and a time in every arm and block, and how many were excluded."""
    everything: set[str] = set()
    short: set[str] = set()
    for entries in arms.values():
        everything |= {e["id"] for e in entries}
        short |= {e["id"] for e in entries if e["tpot_ms"] is None or e["num_tokens"] < min_tokens}
    for entries in arms.values():
        short |= everything - {e["id"] for e in entries}
    return everything - short, len(short)


def build_pairing(
    baseline: Sequence[Entry],
    candidate: Sequence[Entry],
    included: set[str],
    *,
    by_name: bool = False,
) -> Pairing:
    """Pairs two arms by prompt and block. Raises ResultError where one lacks what the other has.

    Prompts stand in the order in which the baseline answered them, so that a file whose ids were
    replaced by pseudonyms gives the same draws; by_name: sorted, so that two runs line up.
    """
    tables = {"baseline": _by_id(baseline), "candidate": _by_id(candidate)}
    ids = sorted(tables["baseline"]) if by_name else list(tables["baseline"])
    blocks = {len(found) for table in tables.values() for found in table.values()}
    if set(ids) != set(tables["candidate"]) or len(blocks) > 1:
        raise ResultError("the arms answered different prompts", where="arms")
    groups: dict[str, list[str]] = {}
    for name in ids:
        groups.setdefault(tables["baseline"][name][0]["category"], []).append(name)
    categories = tuple(sorted(groups))
    order = tuple(tuple(groups[category]) for category in categories)
    return Pairing(
        categories=categories,
        ids=order,
        baseline=_build_arm(tables["baseline"], order, included),
        candidate=_build_arm(tables["candidate"], order, included),
    )


def _by_id(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries of each prompt in the order of their blocks."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.get("block") or 0):
        found.setdefault(entry["id"], []).append(entry)
    return found


def _build_arm(
    table: Mapping[str, Sequence[Entry]], ids: Sequence[Sequence[str]], included: set[str]
) -> Arm:
    def read(value: Any) -> tuple[Array, ...]:
        return tuple(
            np.array([[value(entry) for entry in table[name]] for name in group], dtype=np.float64)
            for group in ids
        )

    return Arm(
        delivered=read(lambda entry: float(entry["delivered"])),
        steps=read(lambda entry: float(entry["steps"])),
        log_tpot=read(
            lambda entry: math.log(entry["tpot_ms"]) if entry["id"] in included else math.nan
        ),
    )
