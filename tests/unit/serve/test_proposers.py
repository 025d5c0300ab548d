"""Drafts of a constant length: against plain searches, and with rows that move as vLLM's do."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serve.proposers.classes import NgramProposer, SuffixProposer, round_up_capacity
from paceline.serve.proposers.index import BREAK, BYTES_PER_TOKEN, MAX_DEPTH, TokenIndex
from paceline.serve.proposers.ngram import propose_ngram
from paceline.serve.proposers.suffix import AnswerCache, propose_suffix

Tokens = npt.NDArray[np.int32]
words = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def vllm_config(k: int = 3, *, longest: int = 256, num_seqs: int = 4, **given: Any) -> Any:
    """The four things that a proposer reads from vLLM's configuration."""
    return SimpleNamespace(
        additional_config={"paceline": given},
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=longest),
        scheduler_config=SimpleNamespace(max_num_seqs=num_seqs),
    )


class Batch:
    """vLLM's table of token ids: requests come, grow, move and go."""

    def __init__(self, longest: int = 256) -> None:
        self.table = np.zeros((8, longest), dtype=np.int32)
        self.texts: list[list[int]] = []

    def propose(self, proposer: Any, *sampled: list[int]) -> list[list[int]]:
        counts = np.zeros(8, dtype=np.int32)
        for row, new in enumerate(sampled):
            self.texts[row].extend(new)
            counts[row] = len(self.texts[row])
            self.table[row, : counts[row]] = self.texts[row]
        drafts: list[list[int]] = proposer.propose(list(sampled), counts, self.table)
        return drafts


# --- the index ---


def plain_matches(text: list[int], context: list[int]) -> dict[int, int]:
    """place -> length of the match before it, by looking everywhere."""
    found = {}
    for place in range(1, len(text)):
        length = 0
        while (
            length < min(MAX_DEPTH, place, len(context))
            and text[place - 1 - length] == context[-1 - length]
            and context[-1 - length] != BREAK
        ):
            length += 1
        if length:
            found[place] = length
    return found


@given(words, st.lists(st.integers(1, 20), max_size=4))
@settings(max_examples=200, deadline=None)
def test_index_finds_what_a_search_finds(text: list[int], cuts: list[int]) -> None:
    index = TokenIndex(64)
    rest = ids(*text)
    for cut in cuts:  # however the text is cut, by few or by many
        index.append(rest[:cut])
        rest = rest[cut:]
    index.append(rest)
    wanted = plain_matches(text, text)
    found = {place: length for length, place in index.find(text, 64)}
    assert found.items() <= wanted.items()
    assert max(found.values(), default=0) == max(wanted.values(), default=0)
    for order in (1, 2, 4, 8):  # with room for all of them, none is left out
        longest = {place for place, length in wanted.items() if length >= order}
        assert len(longest & set(found)) >= min(len(longest), 8)


@given(st.lists(st.integers(0, 2), min_size=65, max_size=300), st.integers(1, 90))
@settings(max_examples=200)
def test_a_wrapped_ring_never_sees_more_than_it_holds(text: list[int], cut: int) -> None:
    index = TokenIndex(64)
    for begin in range(0, len(text), cut):
        index.append(ids(*text[begin : begin + cut]))
    held = [BREAK] * (index.end - 64) + text[-64:] if cut < 64 else None
    for length, place in index.find(text, 16):
        assert index.end - 64 < place < index.end
        if held is not None:
            assert length <= plain_matches(held, text)[place]


def test_a_match_across_the_seam_of_the_ring_counts_as_shorter() -> None:
    index = TokenIndex(64)
    index.append(np.arange(100, 162, dtype=np.int32))
    index.append(ids(7, 8, 9, 5))  # 9 lies in the first slot
    assert index.find([7, 8, 9], 4) == [(1, 65)]


def test_the_longest_context_is_asked_first() -> None:
    text = [1, 2, 3, 4, 9, 4, 9, 4, 9, 4, 7, 1, 2, 3, 4]
    index = TokenIndex(64)
    index.append(ids(*text))
    assert index.find(text, 1) == [(4, 4)]


def test_few_and_many_at_a_time_make_the_same_index() -> None:
    text = np.random.default_rng(1).integers(0, 5, 5000).astype(np.int32)
    at_once, one_by_one = TokenIndex(1024), TokenIndex(1024)
    for begin in range(0, 5000, 500):
        at_once.append(text[begin : begin + 500])
    for token in text:
        one_by_one.append(ids(int(token)))
    for begin in range(0, 4900, 37):
        context = text[begin : begin + 40].tolist()
        assert at_once.find(context, 16) == one_by_one.find(context, 16)


def test_a_full_ring_forgets_the_oldest_and_stays_as_large() -> None:
    index = TokenIndex(64)
    size = index.nbytes
    assert size == 64 * BYTES_PER_TOKEN
    index.append(ids(7, 8, 9))
    assert index.find([7, 8], 4) == [(2, 2)]
    for start in range(100, 1000, 30):
        index.append(np.arange(start, start + 30, dtype=np.int32))
    assert index.find([7, 8], 4) == []
    assert index.find([998, 999], 4) == []  # the very last place has nothing behind it
    assert [length for length, _ in index.find([996, 997, 998], 4)] == [3]
    assert index.nbytes == size


def test_no_match_crosses_a_break() -> None:
    index = TokenIndex(64)
    index.append(ids(1, 2, BREAK, 3, 4, BREAK))
    assert index.find([2, 3], 4) == [(1, 4)]
    assert index.find([9, 4], 4) == [(1, 5)]


# --- ngram ---


def stock_ngram(text: list[int], k: int, low: int, high: int) -> list[int]:
    """What vLLM 0.31.0's `ngram` drafts: longest n-gram, earliest place, what followed, cut."""
    for length in range(min(high, len(text) - 1), low - 1, -1):
        tail = text[-length:]
        for begin in range(len(text) - length):
            if text[begin : begin + length] == tail:
                return text[begin + length : begin + length + k]
    return []


@given(words, st.integers(1, 7), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=400, deadline=None)
def test_ngram_is_vllms_draft_filled_up_to_k(text: list[int], k: int, low: int, more: int) -> None:
    draft = propose_ngram(ids(*text), k, low, low + more)
    stock = stock_ngram(text, k, low, low + more)
    assert len(draft) == k
    assert draft[: len(stock)] == stock
    if not stock:
        assert draft == [text[-1]] * k


def test_a_loop_goes_on_through_the_end_of_the_text() -> None:
    assert propose_ngram(ids(1, 2, 3, 1, 2, 3), 7, 1, 5) == [1, 2, 3, 1, 2, 3, 1]
    index = TokenIndex(64)
    index.append(ids(1, 2, 3, 1, 2, 3))
    assert propose_suffix([1, 2, 3, 1, 2, 3], 7, [index]) == [1, 2, 3, 1, 2, 3, 1]


# --- suffix ---


def test_frequency_decides_among_equal_matches() -> None:
    text = [0, 5, 1, 9, 0, 5, 1, 9, 0, 5, 1, 8, 0, 5, 1]  # 8 is newer, 9 was there twice
    index = TokenIndex(64)
    index.append(ids(*text))
    assert propose_suffix(text, 1, [index]) == [9]


def test_a_longer_match_beats_a_frequent_one() -> None:
    text = [2, 3, 5, 1, 8, 0, 5, 1, 9, 5, 1, 9, 0, 2, 3, 5, 1]
    index = TokenIndex(64)
    index.append(ids(*text))
    assert propose_suffix(text, 2, [index]) == [8, 0]


def test_the_cache_is_asked_where_the_request_knows_nothing() -> None:
    own, cache = TokenIndex(64), AnswerCache(64)
    own.append(ids(1, 2, 3))
    cache.add(ids(2, 3, 4, 5, 6))
    assert propose_suffix([1, 2, 3], 3, [own, cache.index]) == [3, 3, 3]
    cache.drain(4)
    assert propose_suffix([1, 2, 3], 3, [own, cache.index]) == [4, 5, 5]
    cache.drain(64)
    assert propose_suffix([1, 2, 3], 4, [own, cache.index]) == [4, 5, 6, 6]


def test_a_flood_of_answers_waits_in_bounded_memory() -> None:
    cache = AnswerCache(64)
    for start in range(100):
        cache.add(np.arange(start, start + 20, dtype=np.int32))
    assert sum(map(len, cache._queue)) <= 64


@given(words, st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_every_draft_has_k_tokens_of_the_text(text: list[int], k: int) -> None:
    index = TokenIndex(64)
    index.append(ids(*text))
    draft = propose_suffix(text, k, [index])
    assert len(draft) == k
    assert set(draft) <= set(text)


# --- the classes that vLLM loads ---

SETTINGS: list[tuple[Any, dict[str, int]]] = [
    (NgramProposer, {"prompt_lookup_min": 1, "prompt_lookup_max": 4}),
    (SuffixProposer, {"cache_tokens": 0}),
    (SuffixProposer, {"cache_tokens": 128}),
]


@pytest.mark.parametrize(("kind", "given_settings"), SETTINGS)
def test_a_row_in_its_prompt_gets_none_and_every_other_row_k(
    kind: Any, given_settings: dict[str, int]
) -> None:
    proposer = kind(vllm_config(5, **given_settings))
    proposer.load_model("anything", extra=1)
    batch = Batch()
    batch.texts = [[1, 2, 3], [4, 5], [6]]
    drafts = batch.propose(proposer, [9], [], [7, 8])
    assert [len(draft) for draft in drafts] == [5, 0, 5]
    drafts = batch.propose(proposer, [9], [6], [7])
    assert [len(draft) for draft in drafts] == [5, 5, 5]


def play(proposer: Any, seed: int, *, num_steps: int = 120) -> list[tuple[list[int], list[int]]]:
    """(text, draft) of every step of a batch in which requests come, go and change rows."""
    rng = np.random.default_rng(seed)
    batch, seen = Batch(), []
    for _ in range(num_steps):
        while len(batch.texts) < 4 and rng.random() < 0.5:
            batch.texts.append(rng.integers(0, 4, int(rng.integers(1, 30))).tolist())
        if not batch.texts:
            continue
        sampled = [rng.integers(0, 4, int(rng.integers(1, 5))).tolist() for _ in batch.texts]
        drafts = batch.propose(proposer, *sampled)
        seen += [(list(text), draft) for text, draft in zip(batch.texts, drafts, strict=True)]
        batch.texts = [text for text in batch.texts if len(text) < 150 and rng.random() > 0.05]
        if rng.random() < 0.2:
            rng.shuffle(batch.texts)
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_drafts_depend_on_the_text_alone(seed: int) -> None:
    """No state across requests: rows move and end, each draft is what its own text gives."""
    seen = play(SuffixProposer(vllm_config(4, cache_tokens=0)), seed)
    assert len(seen) > 100
    for text, draft in seen:
        index = TokenIndex(round_up_capacity(256))
        index.append(ids(*text))
        assert draft == propose_suffix(text, 4, [index])


def test_memory_is_bounded_by_the_number_of_sequences() -> None:
    proposer = SuffixProposer(vllm_config(4, num_seqs=4, cache_tokens=100))
    for seed in range(10):
        play(proposer, seed, num_steps=50)
    texts = [text for text in proposer._rows if text is not None] + proposer._spare
    assert len(texts) <= 4
    assert proposer.cache is not None
    assert proposer.cache.index.capacity == 128


def test_finished_answers_reach_the_cache_and_prompts_do_not() -> None:
    proposer = SuffixProposer(vllm_config(3, cache_tokens=128))
    batch = Batch()
    batch.texts = [[11, 12, 13]]
    for token in (21, 22, 23, 24):
        batch.propose(proposer, [token])
    batch.texts = [[31, 32]]
    batch.propose(proposer, [21])  # the first request has gone: its answer is queued, then indexed
    assert batch.propose(proposer, [22]) == [[23, 24, 24]]
    batch.texts = [[51]]
    assert batch.propose(proposer, [21]) == [[22, 23, 24]]  # from the answer's first token on
    batch.texts = [[41]]
    batch.propose(proposer, [11])
    assert batch.propose(proposer, [12]) == [[12, 12, 12]]


def test_a_request_set_aside_for_a_step_keeps_its_index() -> None:
    proposer = SuffixProposer(vllm_config(3, cache_tokens=0))
    batch = Batch()
    batch.texts = [[1, 2, 3, 4], [5, 6, 7]]
    batch.propose(proposer, [1], [5])
    aside = proposer._rows[0]
    kept, batch.texts = batch.texts[0], batch.texts[1:]
    batch.propose(proposer, [6])
    batch.texts.append(kept)
    assert batch.propose(proposer, [7], [2]) == [[5, 6, 7], [3, 4, 1]]
    assert proposer._rows[1] is aside


def test_the_module_needs_numpy_and_the_standard_library_only() -> None:
    script = (
        "import sys; import paceline.serve.proposers.classes;"
        "print([n for n in ('torch', 'vllm', 'transformers', 'scipy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_step_at_a_long_context_costs_microseconds() -> None:
    """bench/proposer_cost.py has the figures (71 at 16,384 tokens); this holds their order."""
    rng = np.random.default_rng(0)
    text = rng.zipf(1.3, 17000).clip(max=30000).astype(np.int32)
    proposer = SuffixProposer(vllm_config(5, longest=17000, cache_tokens=2**17))
    assert proposer.cache is not None
    proposer.cache.index.append(text[:16000])
    spent = []
    for count in range(16384, 16500, 2):
        began = time.thread_time()
        proposer.propose([[0, 0]], np.array([count]), text[None, :])
        spent.append(time.thread_time() - began)
    assert sorted(spent)[len(spent) // 2] < 500e-6
