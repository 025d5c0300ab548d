"""What the target alone says of texts that differ from its own: asked once the run is over.

The view of the token where two texts part tells a near tie from a real fork; the likelihood of both
whole texts tells whether what follows is still the target's language. Texts that are the same need
neither.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from paceline.endpoint import Endpoint, TokenChoice
from paceline.eval.fidelity import find_fork
from paceline.eval.transcript import (
    Transcript,
    append_fork,
    append_likelihood,
    read_transcript,
)

__all__ = ["ask_plain"]

Where = tuple[str, str, int]  # arm, request id, block
Row = dict[str, Any]
Pair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, answer

_CANDIDATES_AT_A_FORK = 5
_TOGETHER = 32
# the engine holds the logits of every position of a scored text: 4 GB at a vocabulary of 248,320
_MAX_SCORED_TOKENS = 4096


def ask_plain(path: Path, plain: Endpoint, *, greedy: bool = True) -> None:
    """Appends a fork row and likelihood rows for every text that is not plain's; asks only once.

    path: requests.jsonl. Not greedy: texts part by chance, so only likelihoods are asked for. Many
    are asked together: a prefill of several texts costs little more than one of the longest.
    """
    transcript = read_transcript(path.parent)
    found = _find_differing(transcript)
    if greedy:
        _ask_forks(path, plain, transcript, found)
    _ask_likelihoods(path, plain, transcript, found)


def _find_differing(transcript: Transcript) -> list[tuple[Where, Row, Row]]:
    """(where, plain's row, the arm's row) of every answer that is not plain's first."""
    known = transcript.find("plain")
    found = []
    for arm, blocks in transcript.blocks.items():
        for block, rows in blocks.items():
            for key, row in rows.items():
                first = known.get(key)
                if (arm, block) == ("plain", 0) or first is None:
                    continue
                if first["kind"] != "answer" or row["kind"] != "answer":
                    continue
                if first["output_ids"] != row["output_ids"]:
                    found.append(((arm, key, block), first, row))
    return found


def _ask_forks(
    path: Path, plain: Endpoint, transcript: Transcript, found: list[tuple[Where, Row, Row]]
) -> None:
    asked: dict[Where, tuple[int, ...]] = {}
    for where, first, row in found:
        position = find_fork(first["output_ids"], row["output_ids"])
        if position is not None and where not in transcript.forks:
            asked[where] = (*first["prompt_ids"], *first["output_ids"][:position])
    prefixes = list(dict.fromkeys(asked.values()))
    choices: dict[tuple[int, ...], TokenChoice] = {}
    for start in range(0, len(prefixes), _TOGETHER):
        some = prefixes[start : start + _TOGETHER]
        answers = plain.next_token(some, top=_CANDIDATES_AT_A_FORK)
        choices.update(zip(some, answers, strict=True))
    for (arm, key, block), prefix in asked.items():
        append_fork(path, arm=arm, request_id=key, choice=choices[prefix], block=block)


def _ask_likelihoods(
    path: Path, plain: Endpoint, transcript: Transcript, found: list[tuple[Where, Row, Row]]
) -> None:
    # the engine wants room for one more token behind the text
    longest = min(_MAX_SCORED_TOKENS, plain.facts.max_model_len - 1)
    asked: dict[Where, Pair] = {}
    for where, first, row in found:
        for place, text in ((("plain", where[1], 0), first), (where, row)):
            pair = (tuple(text["prompt_ids"]), tuple(text["output_ids"]))
            if place not in transcript.likelihoods and sum(map(len, pair)) <= longest:
                asked[place] = pair
    pairs = list(dict.fromkeys(asked.values()))
    means: dict[Pair, float] = {}
    for start in range(0, len(pairs), _TOGETHER):
        some = pairs[start : start + _TOGETHER]
        for pair, logprobs in zip(some, plain.text_logprobs(some), strict=True):
            means[pair] = -math.fsum(logprobs) / len(logprobs)
    for (arm, key, block), pair in asked.items():
        append_likelihood(path, arm=arm, request_id=key, nll_nats=means[pair], block=block)
