"""The reduced draft vocabulary: which target tokens a small head can say.

Chosen by frequency among the supervised tokens of the training rows; special and end tokens always
stay, and the lowest ids fill up what is left. Draft id i means target id i + d2t[i], ascending.

A supervised token outside it can never be proposed, so no draft of this vocabulary is accepted
there: such positions carry no loss, and neither do later steps of a base that would have to pass
through one, since serving never reaches them. The share inside is recorded as `coverage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from paceline.data import Row
from paceline.errors import RecipeError

__all__ = ["choose_draft_tokens", "count_supervised", "offsets"]


def count_supervised(rows: Iterable[Row]) -> Counter[int]:
    """How often each target id stands inside a loss span."""
    counts: Counter[int] = Counter()
    for row in rows:
        for start, end in row.loss_spans:
            counts.update(row.input_ids[start:end])
    return counts


def choose_draft_tokens(
    rows: Iterable[Row], *, draft_vocab_size: int, vocab_size: int, always: Sequence[int]
) -> list[int]:
    """Ascending target ids of the draft vocabulary. Raises RecipeError if it is too small."""
    if not 1 <= draft_vocab_size < vocab_size:
        raise RecipeError(
            f"key 'draft.draft_vocab_size' is {draft_vocab_size}",
            expected=f"1 to {vocab_size - 1}; leave it out for the target's whole vocabulary",
        )
    chosen = {token for token in always if 0 <= token < vocab_size}
    if len(chosen) > draft_vocab_size:
        raise RecipeError(
            f"key 'draft.draft_vocab_size' is {draft_vocab_size}",
            expected=f"at least {len(chosen)}, the special and end tokens",
        )
    counts = count_supervised(rows)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    for token in [*ranked, *range(vocab_size)]:
        if len(chosen) == draft_vocab_size:
            break
        chosen.add(token)
    return sorted(chosen)


def offsets(draft_tokens: Sequence[int]) -> list[int]:
    """d2t: target id minus draft id."""
    return [token - number for number, token in enumerate(draft_tokens)]
