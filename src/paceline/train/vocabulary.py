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
from dataclasses import dataclass

from paceline.data import Row
from paceline.errors import DataError, RecipeError
from paceline.records import read_json
from paceline.target import TargetFacts

__all__ = [
    "Coverage",
    "choose_draft_tokens",
    "count_supervised",
    "measure_coverage",
    "offsets",
    "special_tokens",
]

_ONE_IN = 5


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


def special_tokens(target: TargetFacts) -> list[int]:
    """Ids a draft vocabulary must keep: begin, end, padding, and the tokenizer's special tokens."""
    ids = {*target.eos_token_ids, target.bos_token_id, target.pad_token_id} - {None}
    path = target.path / "tokenizer.json"
    if path.is_file():
        added = read_json(path).get("added_tokens") or []
        ids |= {token["id"] for token in added if token.get("special")}
    return sorted(token for token in ids if token is not None and token < target.vocab_size)


def offsets(draft_tokens: Sequence[int]) -> list[int]:
    """d2t: target id minus draft id."""
    return [token - number for number, token in enumerate(draft_tokens)]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of text that it was not chosen by a vocabulary of `size` tokens can say.

    total, by_category: shares of supervised tokens; None where a category has no row held out.
    """

    size: int
    total: float
    by_category: dict[str, float | None]


def measure_coverage(
    rows: Sequence[Row], sizes: Sequence[int], *, vocab_size: int, always: Sequence[int]
) -> list[Coverage]:
    """Vocabularies chosen by four rows of five, measured on the fifth ones, size by size.

    Raises DataError for fewer than five rows.
    """
    if len(rows) < _ONE_IN:
        raise DataError(f"{len(rows)} rows are too few", expected=f"at least {_ONE_IN}")
    held_out = [row for number, row in enumerate(rows) if number % _ONE_IN == 0]
    chosen_by = [row for number, row in enumerate(rows) if number % _ONE_IN]
    counts = {
        name: count_supervised(row for row in held_out if row.category == name)
        for name in sorted({row.category for row in rows})
    }
    found = []
    for size in sizes:
        tokens = set(
            choose_draft_tokens(
                chosen_by, draft_vocab_size=size, vocab_size=vocab_size, always=always
            )
        )
        said = {
            name: sum(n for token, n in count.items() if token in tokens)
            for name, count in counts.items()
        }
        by_category = {
            name: said[name] / count.total() if count else None for name, count in counts.items()
        }
        total = sum(said.values()) / sum(count.total() for count in counts.values())
        found.append(Coverage(size=size, total=total, by_category=by_category))
    return found
