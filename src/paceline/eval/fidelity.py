"""Text with a draft against text without: identical, near tie, or a real fork.

bf16 engines are not bit-exact between one-token and many-token passes, so a token may flip where
the target itself hardly prefers one. Such near ties are counted apart from real forks; a corrupted
state shows as real forks or as loops, which drafts guess well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np

from paceline.endpoint import TokenChoice
from paceline.eval.statistics import MIN_DEGREES_OF_FREEDOM, half_width, measure_spread
from paceline.rules import Rules

__all__ = [
    "Key",
    "Text",
    "build_fidelity",
    "classify_fork",
    "distinct_2",
    "find_fork",
    "is_looping",
    "repeated_share",
]

Tokens = Sequence[int]
Key = tuple[str, int]  # request id, block


@dataclass(frozen=True, kw_only=True)
class Text:
    """One answer: its tokens and why it ended ("stop" | "length")."""

    output_ids: Tokens
    finish_reason: str


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
    plain: Mapping[Key, Text],
    arm: Mapping[Key, Text],
    choices: Mapping[Key, TokenChoice],
    likelihoods: Mapping[tuple[str, Key], float],
    rules: Rules,
    *,
    greedy: bool = True,
) -> dict[str, Any]:
    """One arm's entry in result.json: each of its texts against the plain one of the same prompt.

    plain: texts of block 0. choices: the plain target's candidates at a text's first difference.
    likelihoods: ("plain" or "arm", key) -> nats a token under the target alone, where a text was
    scored. Not greedy: two texts differ by chance, so differences are not classed; the rest holds.
    """
    shared = [key for key in arm if (key[0], 0) in plain]
    pairs = [(key, plain[key[0], 0], arm[key]) for key in shared]
    if greedy:
        forks = _class_forks(pairs, choices, rules)
    else:
        forks = dict.fromkeys(("identical", "near_tie", "real_fork", "num_shorter"))
        forks = {**forks, "max_near_tie_gap": None, "cases": []}
    return {
        "num_texts": len(shared),
        **forks,
        "tolerance": rules.fidelity.tolerance_nats,
        "loops": {
            "plain": _describe_texts([text for _, text, _ in pairs], rules),
            "arm": _describe_texts([text for _, _, text in pairs], rules),
        },
        "differences": _measure_differences(pairs, likelihoods, rules),
    }


def _class_forks(
    pairs: Sequence[tuple[Key, Text, Text]], choices: Mapping[Key, TokenChoice], rules: Rules
) -> dict[str, Any]:
    counts = {"identical": 0, "near_tie": 0, "real_fork": 0}
    cases: list[dict[str, Any]] = []
    for key, plain, text in pairs:
        position = find_fork(plain.output_ids, text.output_ids)
        if position is None:
            counts["identical"] += 1
            if len(plain.output_ids) != len(text.output_ids):
                shorter = min(len(plain.output_ids), len(text.output_ids))
                cases.append(_case(key, shorter, None, None, None, "shorter"))
            continue
        plain_token, token = plain.output_ids[position], text.output_ids[position]
        kind, gap = classify_fork(
            choices[key],
            plain_token=plain_token,
            token=token,
            tolerance=rules.fidelity.tolerance_nats,
        )
        counts[kind] += 1
        cases.append(_case(key, position, gap, plain_token, token, kind))
    near = [case["gap"] for case in cases if case["kind"] == "near_tie"]
    return {
        **counts,
        "num_shorter": sum(1 for case in cases if case["kind"] == "shorter"),
        "max_near_tie_gap": max(near) if near else None,
        "cases": cases,
    }


def _case(
    key: Key, position: int, gap: float | None, plain: int | None, token: int | None, kind: str
) -> dict[str, Any]:
    return {
        "id": key[0],
        "block": key[1],
        "position": position,
        "gap": gap,
        "plain_token": plain,
        "token": token,
        "kind": kind,
    }


def is_looping(tokens: Tokens, rules: Rules) -> bool:
    """Most of the text's n-grams repeat an earlier one. A text too short to tell does not loop."""
    share = repeated_share(tokens, n=rules.fidelity.loop_ngram)
    return share is not None and share > rules.fidelity.max_repeated_share


def _describe_texts(texts: Sequence[Text], rules: Rules) -> dict[str, Any]:
    shares = [repeated_share(text.output_ids, n=rules.fidelity.loop_ngram) for text in texts]
    pairs = [value for text in texts if (value := distinct_2(text.output_ids)) is not None]
    known = [share for share in shares if share is not None]
    return {
        "num_looping": sum(1 for text in texts if is_looping(text.output_ids, rules)),
        "max_repeated_share": max(known) if known else None,
        "mean_distinct_2": mean(pairs) if pairs else None,
        "mean_num_tokens": mean(len(t.output_ids) for t in texts) if texts else None,
        "eos_share": mean(float(t.finish_reason == "stop") for t in texts) if texts else None,
    }


def _measure_differences(
    pairs: Sequence[tuple[Key, Text, Text]],
    likelihoods: Mapping[tuple[str, Key], float],
    rules: Rules,
) -> dict[str, Any]:
    """Means over texts of the arm less plain, each with the half-width that chance explains."""
    nll: list[float] = []
    length: list[float] = []
    eos: list[float] = []
    variety: list[float] = []
    for key, plain, text in pairs:
        length.append(float(len(text.output_ids) - len(plain.output_ids)))
        eos.append(float(text.finish_reason == "stop") - float(plain.finish_reason == "stop"))
        before, after = distinct_2(plain.output_ids), distinct_2(text.output_ids)
        if before is not None and after is not None:
            variety.append(after - before)
        if tuple(text.output_ids) == tuple(plain.output_ids):
            nll.append(0.0)  # the same text is as likely
        elif ("arm", key) in likelihoods and ("plain", (key[0], 0)) in likelihoods:
            nll.append(likelihoods["arm", key] - likelihoods["plain", (key[0], 0)])
    confidence = rules.statistics.confidence
    return {
        "nll_nats": _measure_mean(nll, confidence),
        "num_tokens": _measure_mean(length, confidence),
        "eos_share": _measure_mean(eos, confidence),
        "distinct_2": _measure_mean(variety, confidence),
    }


def _measure_mean(values: Sequence[float], confidence: float) -> dict[str, Any]:
    """{"mean", "half_width", "num_texts"}; no half-width for too few texts."""
    if not values:
        return {"mean": None, "half_width": None, "num_texts": 0}
    average, half = mean(values), None
    if len(values) > MIN_DEGREES_OF_FREEDOM:  # also where two or three happen to be alike
        spread = measure_spread([np.array(values)[:, None] - average])
        half = None if spread is None else half_width(spread, confidence=confidence)
    return {
        "mean": average,
        "half_width": half,
        "num_texts": len(values),
    }
