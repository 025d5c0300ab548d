"""Times of one answer. Tokens are counted from ids; a chunk may hold several of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.endpoint import Answer

__all__ = ["Times", "read_times"]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds. tpot_ms, decode_ms and itl_ms are None for an answer of one chunk.

    decode_ms: first to last token; itl_ms: median gap between chunks (not between tokens).
    """

    ttft_ms: float
    tpot_ms: float | None
    decode_ms: float | None
    itl_ms: float | None


def read_times(answer: Answer) -> Times:
    """TTFT, TPOT, decode time and the gap per chunk of one answer."""
    times = np.asarray(answer.chunk_times_s, dtype=np.float64)
    several = answer.tpot_ms is not None
    return Times(
        ttft_ms=answer.ttft_ms,
        tpot_ms=answer.tpot_ms,
        decode_ms=float(times[-1] - times[0]) * 1000.0 if several else None,
        itl_ms=float(np.median(np.diff(times))) * 1000.0 if several else None,
    )
