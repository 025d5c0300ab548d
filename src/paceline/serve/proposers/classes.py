"""The two classes that vLLM 0.31.0 makes by name, and how they read their settings.

vLLM hands a proposer the batch as a table of token ids, without request names; rows move when
requests end. `ngram` looks at each row anew. `suffix` keeps an index a request and finds its row
again by the text itself, so a row is never drafted for from another request's index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.serve.proposers.index import MAX_DEPTH
from paceline.serve.proposers.ngram import propose_ngram
from paceline.serve.proposers.suffix import AnswerCache, RequestText, propose_suffix

Tokens = npt.NDArray[np.int32]

__all__ = ["MAX_REQUEST_TOKENS", "NgramProposer", "SuffixProposer", "round_up_capacity"]

MAX_REQUEST_TOKENS = 32768  # newest tokens of a request that are searched
_DRAIN_TOKENS = 64  # answer tokens indexed into the cache a step


def round_up_capacity(num_tokens: int) -> int:
    """The power of two, at least 64, that holds num_tokens."""
    return max(64, 1 << (num_tokens - 1).bit_length())


def _read_settings(vllm_config: Any) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = (vllm_config.additional_config or {})["paceline"]
    return settings


class NgramProposer:
    """Prompt lookup, K tokens for every request. Settings: prompt_lookup_min, prompt_lookup_max."""

    family = "ngram"

    def __init__(self, vllm_config: Any) -> None:
        settings = _read_settings(vllm_config)
        self._k = int(vllm_config.speculative_config.num_speculative_tokens)
        self._low = int(settings["prompt_lookup_min"])
        self._high = int(settings["prompt_lookup_max"])

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load; vLLM's CPU runner calls it all the same."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """K tokens for each row that got a token, none for a row still in its prompt."""
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            text = token_ids_cpu[row, : num_tokens_no_spec[row]]
            drafts.append(propose_ngram(text, self._k, self._low, self._high) if sampled else [])
        return drafts


class SuffixProposer:
    """Suffix index of each request and, where asked for, of finished answers; K tokens always.

    Settings: cache_tokens, 0 for no state across requests.
    """

    family = "suffix"

    def __init__(self, vllm_config: Any) -> None:
        settings = _read_settings(vllm_config)
        self._k = int(vllm_config.speculative_config.num_speculative_tokens)
        self._longest = int(vllm_config.model_config.max_model_len) + self._k + 1
        self._capacity = round_up_capacity(min(self._longest, MAX_REQUEST_TOKENS))
        cache_tokens = int(settings["cache_tokens"])
        self.cache = AnswerCache(round_up_capacity(cache_tokens)) if cache_tokens else None
        self._max_texts = int(vllm_config.scheduler_config.max_num_seqs)
        self._rows: list[RequestText | None] = []  # by row of the last step
        self._spare: list[RequestText] = []  # without a row: ended, or set aside by the scheduler

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load; vLLM's CPU runner calls it all the same."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """K tokens for each row that got a token, none for a row still in its prompt."""
        rows = [
            token_ids_cpu[row, : num_tokens_no_spec[row]] if sampled else None
            for row, sampled in enumerate(sampled_token_ids)
        ]
        self._assign(rows, [len(sampled) for sampled in sampled_token_ids])
        drafts: list[list[int]] = []
        for row, text in zip(rows, self._rows, strict=True):
            if row is None or text is None:
                drafts.append([])
                continue
            indexes = [text.index] if self.cache is None else [text.index, self.cache.index]
            drafts.append(propose_suffix(row[-MAX_DEPTH:].tolist(), self._k, indexes))
        if self.cache is not None:
            self.cache.drain(_DRAIN_TOKENS)
        return drafts

    def _assign(self, rows: Sequence[Tokens | None], num_sampled: Sequence[int]) -> None:
        """Gives each row the text that it continues, or a new one, and indexes what is new."""
        before = self._rows
        now: list[RequestText | None] = [None] * len(rows)
        left = list(self._spare)
        for number, text in enumerate(before):
            row = rows[number] if number < len(rows) else None
            if text is not None and row is not None and text.fits(row):
                now[number] = text
            elif text is not None:
                left.append(text)
        for number, row in enumerate(rows):
            if row is not None and now[number] is None:
                now[number] = next((text for text in left if text.fits(row)), None)
                left = [text for text in left if text is not now[number]]
        if self.cache is not None:
            for text in left:
                self.cache.add(text.take_new_answer())
        for number, row in enumerate(rows):
            if row is None:
                continue
            known = now[number]
            if known is not None:
                known.extend(row)
                continue
            full = len(left) + sum(text is not None for text in now) >= self._max_texts
            fresh = left.pop(0) if full else RequestText(self._capacity, self._longest)
            fresh.begin(row, len(row) - num_sampled[number])
            now[number] = fresh
        self._rows, self._spare = now, left
