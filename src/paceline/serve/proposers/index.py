"""Where did these last tokens stand before? A bounded index of token contexts.

A ring of tokens; for each of four context lengths a hash of the tokens that end there leads to the
newest place with that hash, and from each place to the one before it. All of it lies in three
arrays whose sizes never change, so memory is known before the first token. A few tokens are added
and looked up with plain integers, thousands at once with numpy: the same sums, modulo 2^64.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["BREAK", "BYTES_PER_TOKEN", "MAX_DEPTH", "ORDERS", "TokenIndex"]

Tokens = npt.NDArray[np.int32]

ORDERS = (1, 2, 4, 8)  # context lengths with a hash of their own
MAX_DEPTH = 32  # a longer match counts as this long
BREAK = -1  # stands between texts; no token, so no match crosses it
BYTES_PER_TOKEN = 4 * (1 + 2 * len(ORDERS))  # of capacity: the token, its chains, their heads

_LONGEST = ORDERS[-1]
_NUM_ORDERS = len(ORDERS)
_FEW = 16  # from here on numpy is faster
_MAX_ENTRIES = 2**31 - 2**28  # entry numbers are int32
_MASK64 = 2**64 - 1
# random odd numbers: one for each token back from the newest, one for each order
_FACTORS: list[int] = (
    np.random.default_rng(0).integers(1, 2**63, _LONGEST + _NUM_ORDERS, dtype=np.uint64) * 2 + 1
).tolist()
_TOKEN_FACTORS, _ORDER_FACTORS = _FACTORS[:_LONGEST], _FACTORS[_LONGEST:]


class TokenIndex:
    """The last `capacity` tokens that were appended, found again by what stood before them.

    A place is the number of tokens appended before it, ever; `end` is the next one. capacity: a
    power of two, at least 64. Memory: `nbytes` = capacity x BYTES_PER_TOKEN.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 64 or capacity & (capacity - 1):
            raise ValueError(f"capacity {capacity} is not a power of two of at least 64")
        self.capacity = capacity
        self._mask = capacity - 1
        self._shift = 64 - (capacity * _NUM_ORDERS - 1).bit_length()
        self._tokens = np.full(capacity, BREAK, dtype=np.int32)
        self._older = np.full(capacity * _NUM_ORDERS, -1, dtype=np.int32)
        self._newest = np.full(capacity * _NUM_ORDERS, -1, dtype=np.int32)
        # plain integers out of the same memory: a third of numpy's time for one element
        self._ring: memoryview[int] = memoryview(self._tokens)  # type: ignore[arg-type]
        self._chain: memoryview[int] = memoryview(self._older)  # type: ignore[arg-type]
        self._heads: memoryview[int] = memoryview(self._newest)  # type: ignore[arg-type]
        self._bytes = self._ring.cast("B")
        self._last: list[int] = []  # the newest _LONGEST - 1 tokens
        self.end = 0

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._older.nbytes + self._newest.nbytes

    def clear(self) -> None:
        """Forgets everything; the arrays stay."""
        self.end = 0
        self._last = []
        self._newest.fill(-1)

    def token(self, place: int) -> int:
        """The token at a place that is still held."""
        return self._ring[place & self._mask]

    def append(self, tokens: Tokens) -> None:
        """Adds tokens in order; only the last `capacity` of them when there are more."""
        tokens = tokens[-self.capacity :]
        if (self.end + len(tokens)) * _NUM_ORDERS >= _MAX_ENTRIES:
            self.clear()
        if len(tokens) < _FEW:
            self._append_few(tokens.tolist())
        else:
            self._append_many(tokens)

    def _append_few(self, tokens: list[int]) -> None:
        chain, heads, ring = self._chain, self._heads, len(self._chain) - 1
        for token in tokens:
            recent = [*self._last, token]
            self._ring[self.end & self._mask] = token
            entry = self.end * _NUM_ORDERS
            for order, bucket in enumerate(self._buckets(recent)):
                chain[(entry + order) & ring] = heads[bucket]
                heads[bucket] = entry + order
            self.end += 1
            self._last = recent[-_LONGEST + 1 :]

    def _buckets(self, recent: Sequence[int]) -> list[int]:
        """The hash of the last 1, 2, 4, 8 tokens; fewer hashes where there are fewer tokens."""
        found: list[int] = []
        total, shift = 0, self._shift
        for back, token in enumerate(reversed(recent[-_LONGEST:])):
            total += _TOKEN_FACTORS[back] * token
            if back + 1 in ORDERS:
                mixed = (total * _ORDER_FACTORS[len(found)]) & _MASK64
                found.append(mixed >> shift)
        return found

    def _append_many(self, tokens: Tokens) -> None:
        count, begin = len(tokens), self.end
        known = len(self._last)
        recent = np.concatenate((np.array(self._last, dtype=np.int32), tokens)).astype(np.uint64)
        places = np.arange(begin, begin + count)
        self._tokens[places & self._mask] = tokens
        total = np.zeros(count, dtype=np.uint64)
        buckets, entries = [], []
        for back in range(_LONGEST):
            first = max(0, back - known)  # tokens before it have a shorter history
            total[first:] += recent[known + first - back : known + count - back] * np.uint64(
                _TOKEN_FACTORS[back]
            )
            if back + 1 in ORDERS:
                order = ORDERS.index(back + 1)
                mixed = total[first:] * np.uint64(_ORDER_FACTORS[order])
                buckets.append((mixed >> np.uint64(self._shift)).astype(np.int64))
                entries.append(places[first:] * _NUM_ORDERS + order)
        self._link(np.concatenate(buckets), np.concatenate(entries))
        self.end = begin + count
        self._last = tokens[-_LONGEST + 1 :].tolist()

    def _link(self, buckets: npt.NDArray[np.int64], entries: npt.NDArray[np.int64]) -> None:
        """Puts entries at the heads of their buckets' chains, the newest first."""
        both = np.sort(buckets << 32 | entries)
        buckets, newer = both >> 32, both.astype(np.int32)
        older = self._newest[buckets]
        same = buckets[1:] == buckets[:-1]
        older[1:][same] = newer[:-1][same]
        self._older[newer & (len(self._older) - 1)] = older
        last = np.append(~same, True)
        self._newest[buckets[last]] = newer[last]

    def find(self, context: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """(length, place) of earlier occurrences of the context's end: what followed is at place.

        context: the newest token last; MAX_DEPTH of them count. length >= 1 tokens match before
        place, which lies below `end`. Longer contexts are asked first, and newer places first,
        until `limit` are found.
        """
        oldest = max(0, self.end - self.capacity)
        first, ring = oldest * _NUM_ORDERS, len(self._chain) - 1
        chain, heads = self._chain, self._heads
        last = self.end - 1  # nothing follows it yet
        depth = min(MAX_DEPTH, len(context))
        wanted = _as_number(context[len(context) - depth :])
        found: dict[int, int] = {}
        buckets = self._buckets(context)
        for order in range(len(buckets) - 1, -1, -1):
            entry, budget = heads[buckets[order]], 2 * limit
            while entry >= first and budget:
                place = entry // _NUM_ORDERS
                if place not in found and place != last and entry % _NUM_ORDERS == order:
                    length = self._measure(place, wanted, min(depth, place - oldest + 1), depth)
                    if length >= ORDERS[order]:
                        found[place] = length
                        if len(found) == limit:
                            break
                entry = chain[entry & ring]
                budget -= 1
            if len(found) == limit:
                break
        return [(length, place + 1) for place, length in found.items()]

    def _measure(self, place: int, wanted: int, held: int, depth: int) -> int:
        """How many tokens up to `place` equal the end of the context: the highest differing bit."""
        stop = (place & self._mask) + 1
        held = min(held, stop)  # a match across the seam of the ring counts as shorter
        here = int.from_bytes(self._bytes[4 * (stop - held) : 4 * stop], "little")
        differs = here ^ (wanted >> (32 * (depth - held)))
        return held - (differs.bit_length() + 31) // 32


def _as_number(tokens: Sequence[int]) -> int:
    """The newest token in the highest 32 bits."""
    return int.from_bytes(array("i", tokens).tobytes(), "little")
