"""Finished trials on disk, so that a killed search goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ResultError
from paceline.records import append_jsonl, read_jsonl

__all__ = ["Journal"]

_FORMAT = "paceline-tune/1"


class Journal:
    """trials.jsonl in a search's folder: what is searched, then one line a trial, in order.

    header: whatever must be the same for a search to go on. Raises ResultError for another's file.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.path = folder / "trials.jsonl"
        self._trials: dict[str, dict[str, Any]] = {}
        wanted = {"format": _FORMAT, **header}
        rows = read_jsonl(self.path) if self.path.exists() else []
        if not rows:
            append_jsonl(self.path, wanted)
            return
        if rows[0] != wanted:
            different = sorted(key for key in wanted if rows[0].get(key) != wanted[key])
            raise ResultError(
                f"another search is kept here (it differs in {', '.join(different)})",
                where=str(self.path),
                fix="Choose another --out, or give the options of that search.",
            )
        for row in rows[1:]:
            self._trials[row["key"]] = row

    @property
    def seconds(self) -> float:
        """What all trials took, those of killed runs included."""
        return sum(float(row["seconds"]) for row in self._trials.values())

    def find(self, key: str) -> dict[str, Any] | None:
        return self._trials.get(key)

    def add(self, trial: Mapping[str, Any]) -> None:
        """Keeps one finished trial. Its key is written once."""
        append_jsonl(self.path, trial)
        self._trials[trial["key"]] = dict(trial)

    def trials(self) -> list[dict[str, Any]]:
        return list(self._trials.values())
