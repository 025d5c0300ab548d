"""What the target alone says of texts that differ from its own: asked once the run is over.

The view of the token where two texts part tells a near tie from a real fork; the likelihood of both
whole texts tells whether what follows is still the target's language. Texts that are the same need
neither.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from paceline.endpoint import Endpoint
from paceline.eval.fidelity import find_fork
from paceline.eval.transcript import (
    Transcript,
    append_fork,
    append_likelihood,
    read_transcript,
)

__all__ = ["ask_plain"]

_CANDIDATES_AT_A_FORK = 5
# the engine holds the logits of every position of a scored text: 4 GB at a vocabulary of 248,320
_MAX_SCORED_TOKENS = 4096


def ask_plain(path: Path, plain: Endpoint, *, greedy: bool = True) -> None:
    """Appends a fork row and likelihood rows for every text that is not plain's; asks only once.

    path: requests.jsonl. Not greedy: texts part by chance, so only likelihoods are asked for.
    """
    transcript = read_transcript(path.parent)
    known = transcript.find("plain")
    for arm, blocks in transcript.blocks.items():
        for block, rows in blocks.items():
            if (arm, block) == ("plain", 0):
                continue
            for key, row in rows.items():
                first = known.get(key)
                if first is None or first["kind"] != "answer" or row["kind"] != "answer":
                    continue
                if first["output_ids"] == row["output_ids"]:
                    continue
                if greedy and (arm, key, block) not in transcript.forks:
                    _ask_fork(path, plain, first, row, arm, block)
                _ask_likelihood(path, plain, transcript, first, "plain", 0)
                _ask_likelihood(path, plain, transcript, row, arm, block)


def _ask_fork(
    path: Path, plain: Endpoint, first: dict[str, Any], row: dict[str, Any], arm: str, block: int
) -> None:
    position = find_fork(first["output_ids"], row["output_ids"])
    if position is None:
        return
    prefix = [*first["prompt_ids"], *first["output_ids"][:position]]
    (choice,) = plain.next_token([prefix], top=_CANDIDATES_AT_A_FORK)
    append_fork(path, arm=arm, request_id=row["id"], choice=choice, block=block)


def _ask_likelihood(
    path: Path,
    plain: Endpoint,
    transcript: Transcript,
    row: dict[str, Any],
    arm: str,
    block: int,
) -> None:
    prompt_ids, output_ids = row["prompt_ids"], row["output_ids"]
    num_tokens = len(prompt_ids) + len(output_ids)
    # the engine wants room for one more token behind the text
    if num_tokens > min(_MAX_SCORED_TOKENS, plain.facts.max_model_len - 1):
        return
    if (arm, row["id"], block) in transcript.likelihoods:
        return
    (logprobs,) = plain.text_logprobs([(prompt_ids, output_ids)])
    nll = -math.fsum(logprobs) / len(logprobs)
    transcript.likelihoods[arm, row["id"], block] = nll
    append_likelihood(path, arm=arm, request_id=row["id"], nll_nats=nll, block=block)
