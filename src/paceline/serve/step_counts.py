"""What Paceline reads of vLLM's statistics, added up step by step, and nothing else.

vLLM's own loggers keep some forty metrics a step for Prometheus, and a line of log; of them six
counters are read here. StepCounts stands in their place and takes the same records.
"""

from __future__ import annotations

from typing import Any

__all__ = ["StepCounts"]


class StepCounts:
    """A stat logger as vLLM 0.31.0 calls it. Counts since the start, never reset.

    k: drafted tokens a step, 0 without a draft.
    """

    def __init__(self, k: int) -> None:
        self._queries = self._hits = 0
        self._drafts = self._drafted = self._accepted = 0
        self._by_position = [0] * k

    def record(self, scheduler_stats: Any, iteration_stats: Any = None, **_: Any) -> None:
        """One step: its SchedulerStats, or None."""
        if scheduler_stats is None:
            return
        cache, speculation = (
            scheduler_stats.prefix_cache_stats,
            scheduler_stats.spec_decoding_stats,
        )
        if cache is not None:
            self._queries += cache.queries
            self._hits += cache.hits
        if speculation is None:
            return
        self._drafts += speculation.num_drafts
        self._drafted += speculation.num_draft_tokens
        self._accepted += speculation.num_accepted_tokens
        for place, count in enumerate(speculation.num_accepted_tokens_per_pos):
            self._by_position[place] += count

    def log(self) -> None:
        """No line every ten seconds."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Paceline's engines never sleep."""

    def read(self) -> dict[str, Any]:
        """The counters under vLLM's names, without their prefix."""
        return {
            "prefix_cache_queries": self._queries,
            "prefix_cache_hits": self._hits,
            "spec_decode_num_drafts": self._drafts,
            "spec_decode_num_draft_tokens": self._drafted,
            "spec_decode_num_accepted_tokens": self._accepted,
            "spec_decode_num_accepted_tokens_per_pos": list(self._by_position),
        }
