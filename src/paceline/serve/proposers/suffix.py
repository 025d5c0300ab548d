"""Drafts from what followed the same words before: in this request, and in finished answers.

Candidates are the places where the longest ends of the text so far stood before; they vote on each
next token with a weight that grows with the length of their match, so frequency decides among equal
matches. A draft always has K tokens: where nothing is known any more, the last token is repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.serve.proposers.index import BREAK, MAX_DEPTH, TokenIndex

__all__ = ["AnswerCache", "RequestText", "propose_suffix"]

Tokens = npt.NDArray[np.int32]

_NUM_CANDIDATES = 8  # places of each index that vote
_NUM_SEARCHES = 2  # one more when every candidate has ended before K tokens
_OWN_LEAD = 2  # a match in the request's own text counts as this many tokens longer
_WEIGHTS = tuple(3.0 ** min(length, 12) for length in range(MAX_DEPTH + 1))


class RequestText:
    """One request's text so far, indexed; knows by its content which row of the batch it is.

    capacity: tokens held, the newest ones; num_prompt_tokens: tokens that were there at first.
    """

    def __init__(self, capacity: int, longest: int) -> None:
        self.index = TokenIndex(capacity)
        self._text = np.zeros(longest, dtype=np.int32)
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached = 0  # tokens handed to the cache, prompt included

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self._text.nbytes

    def begin(self, row: Tokens, num_prompt_tokens: int) -> None:
        self.index.clear()
        self.num_tokens = 0
        self.num_prompt_tokens = self.num_cached = num_prompt_tokens
        self.extend(row)

    def extend(self, row: Tokens) -> None:
        """row: the whole text; what is new in it is indexed."""
        new = row[self.num_tokens :]
        self._text[self.num_tokens : len(row)] = new
        self.index.append(new)
        self.num_tokens = len(row)

    def fits(self, row: Tokens) -> bool:
        """Whether row goes on from this text, token for token."""
        count = self.num_tokens
        return (
            count <= len(row)
            and bool(row[count - 1] == self._text[count - 1])
            and bool((row[:count] == self._text[:count]).all())
        )

    def take_new_answer(self) -> Tokens:
        """Answer tokens that were not handed to the cache yet."""
        new = self._text[self.num_cached : self.num_tokens].copy()
        self.num_cached = self.num_tokens
        return new


class AnswerCache:
    """Answers of finished requests, in one bounded ring shared by all requests.

    add() only queues; drain() indexes a bounded number of tokens, so no step pays for a long text.
    """

    def __init__(self, capacity: int) -> None:
        self.index = TokenIndex(capacity)
        self._queue: deque[Tokens] = deque()
        self._queued = 0

    def add(self, answer: Tokens) -> None:
        if len(answer):
            self._queue.append(np.append(answer, np.int32(BREAK)))
            self._queued += len(answer) + 1
            while self._queued > self.index.capacity:
                self._queued -= len(self._queue.popleft())

    def drain(self, limit: int) -> None:
        if not self._queue:
            return
        part = self._queue.popleft()
        if len(part) > limit:
            self._queue.appendleft(part[limit:])
            part = part[:limit]
        self._queued -= len(part)
        self.index.append(part)


def propose_suffix(context: Sequence[int], k: int, indexes: Sequence[TokenIndex]) -> list[int]:
    """K drafted tokens after `context` (its last MAX_DEPTH tokens are enough; at least one).

    indexes: the request's own first, then the cache where there is one.
    """
    draft: list[int] = []
    for _ in range(_NUM_SEARCHES):
        before = len(draft)
        _vote([*context, *draft][-MAX_DEPTH:], k, indexes, draft)
        if len(draft) in (before, k):
            break
    last = draft[-1] if draft else context[-1]
    return draft + [last] * (k - len(draft))


def _vote(context: Sequence[int], k: int, indexes: Sequence[TokenIndex], draft: list[int]) -> None:
    """Extends draft, up to K tokens, while a candidate is left."""
    own, own_lead = indexes[0], _WEIGHTS[_OWN_LEAD]
    alive = [
        (_WEIGHTS[length] * (own_lead if index is own else 1.0), index, place)
        for index in indexes
        for length, place in index.find(context, _NUM_CANDIDATES)
    ]
    while alive and len(draft) < k:
        scores: dict[int, float] = {}
        following: dict[int, list[tuple[float, TokenIndex, int]]] = {}
        for weight, index, place in alive:
            beyond = place - index.end
            if beyond < 0:
                token = index.token(place)
            elif index is own and beyond < len(draft):  # a loop: it runs into the draft
                token = draft[beyond]
            else:
                token = BREAK
            if token != BREAK:
                scores[token] = scores.get(token, 0.0) + weight
                following.setdefault(token, []).append((weight, index, place + 1))
        if not scores:
            return
        best = max(scores, key=scores.__getitem__)
        draft.append(best)
        alive = following[best]
