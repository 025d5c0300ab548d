"""A search as one JSON record and as lines for a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from paceline.forecast.search import Candidate, Search

__all__ = ["describe_candidate", "describe_search", "list_best", "search_to_json"]

_FORMAT = "paceline-search/1"
_KEPT = 200
_CLOUD = 1500
_NUM_BEST = 8
_SHORT = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_heads": "heads",
    "num_kv_heads": "kv heads",
    "num_taps": "taps",
    "draft_vocab_size": "vocab",
}
_QUIET = ("family", "num_speculative_tokens", "max_position_embeddings", "one_head", "own_head")


def search_to_json(search: Search) -> dict[str, Any]:
    """The record: counts, assumptions, the best 200, the frontier, and the cloud for a plot."""
    allowed = [one for one in search.candidates if one.allowed]
    every = max(1, -(-len(allowed) // _CLOUD))
    cloud = sorted(allowed, key=lambda one: (one.memory_bytes, one.tpot_ms))[::every]
    return {
        "format": _FORMAT,
        "target": search.target,
        "rules": search.rules,
        "space": search.space,
        "space_sha256": search.space_sha256,
        "num_designs": len(search.candidates) + sum(search.refused.values()),
        "num_possible": len(search.candidates),
        "num_allowed": len(allowed),
        "refused": search.refused,
        "context_tokens_of_step": search.length_tokens,
        "step_source": search.step_source,
        "entry_num_speculative_tokens": search.entry_num_speculative_tokens,
        "assumed": search.assumed,
        "baseline": dataclasses.asdict(search.baseline),
        "best": [dataclasses.asdict(one) for one in allowed[:_KEPT]],
        "best_by_family": {
            name: dataclasses.asdict(one) for name, one in _by_family(allowed).items()
        },
        "frontier": [dataclasses.asdict(one) for one in search.frontier],
        "cloud": [
            [one.settings["family"], one.memory_bytes, round(one.tpot_ms, 5)] for one in cloud
        ],
    }


def list_best(
    search: Search, *, at_k: int | None = None, count: int = _NUM_BEST
) -> list[Candidate]:
    """The best allowed designs, one a set of sizes (its best K), or all with one K."""
    found: list[Candidate] = []
    seen = set()
    for one in search.candidates:
        k = one.settings["num_speculative_tokens"]
        if not one.allowed or (at_k is not None and k != at_k):
            continue
        shape = tuple(v for key, v in one.settings.items() if key != "num_speculative_tokens")
        if shape not in seen:
            seen.add(shape)
            found.append(one)
        if len(found) == count:
            break
    return found


def _by_family(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    for one in candidates:
        found.setdefault(one.settings["family"], one)
    return found


def describe_candidate(settings: dict[str, Any]) -> str:
    """ "eagle3 K = 4, layers 1, ffn 8,704, vocab 32,768, fp8"."""
    parts = [f"{settings['family']} K = {settings['num_speculative_tokens']}"]
    for key, value in settings.items():
        if key in _QUIET:
            continue
        if key == "weights":
            parts.append(str(value))
        elif key == "kv_dtype":
            parts.append(f"{value} cache")
        else:
            shown = f"{value:,}" if type(value) is int else str(value).lower()
            parts.append(f"{_SHORT.get(key, key.replace('_', ' '))} {shown}")
    return ", ".join(parts)


def describe_search(search: Search) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(label, value)]) for the terminal."""
    allowed = sum(one.allowed for one in search.candidates)
    total = len(search.candidates) + sum(search.refused.values())
    k = search.entry_num_speculative_tokens
    about = [
        ("tried", f"{total:,} designs of space {search.space} for {search.target}"),
        ("keep the limits", f"{allowed:,} under {search.rules}, and pass its gate"),
        ("step time", f"{search.step_source}; {search.length_tokens:,} tokens of context"),
        ("acceptance", "assumed, from the space; nothing was trained or served"),
    ]
    about += [("cannot be", f"{n:,} x {why}") for why, n in sorted(search.refused.items())]
    return [
        ("Search", about),
        ("Baseline", [_line(search.baseline)]),
        (f"Best at K = {k}, as the rules serve entries", _lines(list_best(search, at_k=k))),
        ("Best at any K", _lines(list_best(search))),
        ("Best of each family", _lines(list(_by_family(_allowed(search)).values()))),
    ]


def _allowed(search: Search) -> list[Candidate]:
    return [one for one in search.candidates if one.allowed]


def _lines(candidates: Sequence[Candidate]) -> list[tuple[str, str]]:
    return [_line(one) for one in candidates] or [("-", "no design keeps the limits")]


def _line(one: Candidate) -> tuple[str, str]:
    return (
        f"{one.score:.1f}",
        f"{describe_candidate(one.settings)}: acceptance {one.acceptance_length:.2f} (assumed),"
        f" M {one.memory_bytes / 1e9:.3f} GB, {one.step_ms:.2f} ms a step,"
        f" {one.tpot_ms:.2f} ms a token",
    )
