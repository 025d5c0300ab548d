"""Are prompts that a draft is measured on among those that it was trained on?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.data.prompt import Prompt
from paceline.data.rows import Row
from paceline.data.tokens import open_decoder
from paceline.target import TargetFacts

__all__ = ["Overlap", "contamination"]

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A held-out prompt found in training. share: of its n-grams, how many one training item has;
    text: the first shared n-gram."""

    held_out_id: str
    training_id: str
    share: float
    text: str


def contamination(
    training: Sequence[Prompt] | Sequence[Row],
    held_out: Iterable[Prompt],
    *,
    target: TargetFacts | None = None,
    ngram: int = 8,
    min_share: float = 0.0,
) -> list[Overlap]:
    """Held-out prompts that share an n-gram of words with a training prompt, worst first.

    Case and punctuation do not count. A held-out prompt shorter than `ngram` words counts when the
    whole of it is found. min_share leaves out weaker overlaps (a common turn of phrase is no leak;
    0.5 is a copy). Rows need `target`, to read their prompt part; the answers are not compared.
    """
    held = {prompt.prompt_id: _held_out_grams(prompt, ngram) for prompt in held_out}
    lengths = {length for grams in held.values() for length in map(len, grams)}
    owners: dict[tuple[str, ...], list[str]] = {}
    for prompt_id, grams in held.items():
        for gram in grams:
            owners.setdefault(gram, []).append(prompt_id)
    worst: dict[str, Overlap] = {}
    for training_id, words in _training_words(training, target):
        shared: dict[str, list[tuple[str, ...]]] = {}
        for gram in {gram for length in lengths for gram in _grams(words, length)} & set(owners):
            for prompt_id in owners[gram]:
                shared.setdefault(prompt_id, []).append(gram)
        for prompt_id, grams_found in shared.items():
            share = len(grams_found) / len(held[prompt_id])
            if share >= min_share and (prompt_id not in worst or share > worst[prompt_id].share):
                worst[prompt_id] = Overlap(
                    held_out_id=prompt_id,
                    training_id=training_id,
                    share=share,
                    text=" ".join(min(grams_found)),
                )
    return sorted(worst.values(), key=lambda overlap: (-overlap.share, overlap.held_out_id))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def _held_out_grams(prompt: Prompt, ngram: int) -> set[tuple[str, ...]]:
    """n-grams of each of the user's turns; a short turn counts as one gram."""
    grams: set[tuple[str, ...]] = set()
    for message in prompt.messages:
        if message["role"] == "user":
            words = _words(message["content"])
            if words:
                grams |= _grams(words, min(ngram, len(words)))
    return grams


def _training_words(
    training: Sequence[Prompt] | Sequence[Row], target: TargetFacts | None
) -> Iterable[tuple[str, list[str]]]:
    decode = None
    for item in training:
        if isinstance(item, Prompt):
            texts = [m["content"] for m in item.messages if m["role"] == "user"]
            yield item.prompt_id, _words("\n".join(texts))
            continue
        if decode is None:
            if target is None:
                raise TypeError("contamination() needs `target` to read rows")
            decode = open_decoder(target)
        ids: list[int] = []
        end = 0
        for start, stop in item.loss_spans:
            ids += item.input_ids[end:start]
            end = stop
        yield item.row_id, _words(decode(ids))
