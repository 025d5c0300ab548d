"""Whether a draft still helps: acceptance lengths over the last steps, of all and by category.

Fed with vLLM's own counters (all traffic) and with the speculation record of each answer (by the
label that the request carried). Knows no network.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.serve.exposition import read_sample

__all__ = ["AcceptanceWatch", "Window", "read_counters"]

MAX_CATEGORIES = 64
OTHER = "other"


class Window:
    """Steps and accepted tokens over at least the last `num_steps` drafting steps."""

    def __init__(self, num_steps: int) -> None:
        self._limit = num_steps
        self._parts: collections.deque[tuple[int, int]] = collections.deque()
        self.num_steps = 0
        self.num_accepted = 0

    def add(self, num_steps: int, num_accepted: int) -> None:
        if num_steps <= 0:
            return
        self._parts.append((num_steps, num_accepted))
        self.num_steps += num_steps
        self.num_accepted += num_accepted
        while self.num_steps - self._parts[0][0] >= self._limit:
            old_steps, old_accepted = self._parts.popleft()
            self.num_steps -= old_steps
            self.num_accepted -= old_accepted

    @property
    def is_full(self) -> bool:
        return self.num_steps >= self._limit

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps, the bonus token included; None before the first step."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None


class AcceptanceWatch:
    """All traffic, and each category of it, held against the least that helps.

    minimum: acceptance length below which a draft costs more than it saves; window: steps over
    which it is judged. A category beyond the 64th counts as "other".
    """

    def __init__(self, *, minimum: float, window: int) -> None:
        self.minimum = minimum
        self._num_steps = window
        self.overall = Window(window)
        self.categories: dict[str, Window] = {}
        self._last: tuple[int, int] | None = None
        self._names: set[str] = set()

    def read(self, counters: tuple[int, int] | None) -> None:
        """Takes vLLM's monotonic (drafting steps, accepted tokens); a restart begins anew."""
        if counters is None:
            return
        steps, accepted = counters
        if self._last is not None and steps >= self._last[0]:
            self.overall.add(steps - self._last[0], accepted - self._last[1])
        self._last = counters

    def forget(self) -> None:
        """Another server: its counters begin at nothing, and so does what is judged."""
        self.overall, self.categories = Window(self._num_steps), {}
        self._last = (0, 0)

    def note_category(self, category: str) -> str:
        """The name under which a category is counted, from its first request on."""
        if category not in self._names and len(self._names) >= MAX_CATEGORIES:
            return OTHER
        self._names.add(category)
        return category

    def add_answer(self, category: str, speculation: Iterable[Mapping[str, Any]]) -> None:
        """One answer's own records (vLLM's metrics.speculative_decoding), of each server it had."""
        window = self.categories.setdefault(category, Window(self._num_steps))
        for record in speculation:
            window.add(record["num_spec_steps"], record["num_accepted_draft_tokens"])

    @property
    def is_weak(self) -> bool:
        return self._is_below(self.overall)

    def weak_categories(self) -> list[str]:
        return sorted(name for name, window in self.categories.items() if self._is_below(window))

    def _is_below(self, window: Window) -> bool:
        length = window.acceptance_length
        return window.is_full and length is not None and length < self.minimum


def read_counters(metrics: str) -> tuple[int, int] | None:
    """(drafting steps, accepted tokens) out of /metrics; None without speculation."""
    steps = read_sample(metrics, "vllm:spec_decode_num_drafts_total")
    accepted = read_sample(metrics, "vllm:spec_decode_num_accepted_tokens_total")
    return None if steps is None or accepted is None else (int(steps), int(accepted))
