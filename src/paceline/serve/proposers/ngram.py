"""Prompt lookup with a constant number of drafted tokens.

The draft begins with what vLLM 0.31.0's own `ngram` would draft: the longest n-gram between minimum
and maximum that ends the text and stood in it before, at its earliest place, and what followed. The
rest is filled, so that a draft always has K tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["propose_ngram"]

Tokens = npt.NDArray[np.int32]


def propose_ngram(text: Tokens, k: int, low: int, high: int) -> list[int]:
    """K tokens after `text` (1-D, at least one token).

    low, high: the shortest and the longest n-gram that is looked up. What followed the match is
    copied; where it runs into the end of the text the copy goes on with the draft itself. Without a
    match the last token is repeated.
    """
    start = _find(text, low, high)
    if start is None:
        return [int(text[-1])] * k
    draft: list[int] = text[start : start + k].tolist()
    while len(draft) < k:
        draft.append(draft[len(draft) - (len(text) - start)])
    return draft


def _find(text: Tokens, low: int, high: int) -> int | None:
    """Where the copy starts: after the earliest occurrence of the longest n-gram, or None."""
    last = len(text) - 1
    ends = np.flatnonzero(text[:last] == text[last])
    if not len(ends):
        return None
    length = 1
    while length < min(high, last):
        ends_before = ends[ends >= length]
        longer = ends_before[text[ends_before - length] == text[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[0]) + 1 if length >= low else None
