"""Text with a draft against text without: identical, near tie, or a real fork.

bf16 engines are not bit-exact between one-token and many-token passes, so a token may flip where
the target itself hardly prefers one. Such near ties are counted apart from real forks; a corrupted
state shows as real forks or as loops, which drafts guess well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.endpoint import TokenChoice
from paceline.rules import Rules

__all__ = ["build_fidelity", "classify_fork", "distinct_2", "find_fork", "repeated_share"]

Tokens = Sequence[int]


def find_fork(plain: Tokens, other: Tokens) -> int | None:
    """First position at which two texts differ, over the shorter; None when there is none."""
    for position, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return position
    return None


def classify_fork(
    choice: TokenChoice, *, plain_token: int, token: int, tolerance: float
) -> tuple[str, float | None]:
    """("near_tie" | "real_fork", gap in nats) from the target's own view of the fork.

    The gap is how far the worse of the two tokens lies below the target's best one; None (and a
    real fork) when one of them is not among the candidates that were asked for.
    """
    logprob = dict(zip(choice.token_ids, choice.logprobs, strict=True))
    if plain_token not in logprob or token not in logprob:
        return "real_fork", None
    gap = max(choice.logprobs) - min(logprob[plain_token], logprob[token])
    return ("near_tie" if gap <= tolerance else "real_fork"), gap


def repeated_share(tokens: Tokens, *, n: int) -> float | None:
    """Share of n-grams that occurred before in the same text; None for fewer than n + 1 tokens."""
    total = len(tokens) - n + 1
    if total < 2:
        return None
    return 1 - len({tuple(tokens[i : i + n]) for i in range(total)}) / total


def distinct_2(tokens: Tokens) -> float | None:
    """Distinct pairs over pairs; None for fewer than two tokens."""
    total = len(tokens) - 1
    return len(set(pairwise(tokens))) / total if total > 0 else None


def build_fidelity(
    plain: Mapping[str, Tokens],
    arm: Mapping[str, Tokens],
    choices: Mapping[str, TokenChoice],
    rules: Rules,
) -> dict[str, Any]:
    """One arm's entry in result.json, over the prompts that both answered.

    choices: request id -> the plain target's candidates at that text's first difference.
    """
    tolerance = rules.fidelity.tolerance_nats
    counts = {"identical": 0, "near_tie": 0, "real_fork": 0}
    cases: list[dict[str, Any]] = []
    shared = [name for name in plain if name in arm]
    for name in shared:
        position = find_fork(plain[name], arm[name])
        if position is None:
            counts["identical"] += 1
            if len(plain[name]) != len(arm[name]):
                shorter = min(len(plain[name]), len(arm[name]))
                cases.append(_case(name, shorter, None, None, None, "shorter"))
            continue
        plain_token, token = plain[name][position], arm[name][position]
        kind, gap = classify_fork(
            choices[name], plain_token=plain_token, token=token, tolerance=tolerance
        )
        counts[kind] += 1
        cases.append(_case(name, position, gap, plain_token, token, kind))
    near = [case["gap"] for case in cases if case["kind"] == "near_tie"]
    return {
        "num_texts": len(shared),
        **counts,
        "num_shorter": sum(1 for case in cases if case["kind"] == "shorter"),
        "max_near_tie_gap": max(near) if near else None,
        "tolerance": tolerance,
        "cases": cases,
        "loops": {
            "plain": _loops([plain[name] for name in shared], rules),
            "arm": _loops([arm[name] for name in shared], rules),
        },
    }


def _case(
    name: str, position: int, gap: float | None, plain: int | None, token: int | None, kind: str
) -> dict[str, Any]:
    return {
        "id": name,
        "position": position,
        "gap": gap,
        "plain_token": plain,
        "token": token,
        "kind": kind,
    }


def _loops(texts: Sequence[Tokens], rules: Rules) -> dict[str, Any]:
    shares = [repeated_share(text, n=rules.fidelity.loop_ngram) for text in texts]
    pairs = [value for value in map(distinct_2, texts) if value is not None]
    known = [share for share in shares if share is not None]
    return {
        "num_looping": sum(1 for share in known if share > rules.fidelity.max_repeated_share),
        "max_repeated_share": max(known) if known else None,
        "mean_distinct_2": sum(pairs) / len(pairs) if pairs else None,
    }
