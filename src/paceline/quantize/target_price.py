"""What quantising a target cost: how likely it finds its own former answers, and its time.

The original answers every prompt greedily; both then read these very answers. The cost is the rise
of perplexity: exp(mean nats a token lost) - 1. It sees what a benchmark of a hundred questions
cannot, and says nothing about skills that the answers do not need: `paceline quality` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scipy.stats import t as student_t

from paceline.errors import ResultError
from paceline.quantize.price import Price, judge_loss, price_row

__all__ = ["build_target_price", "student_interval"]

_CONFIDENCE = 0.95


def build_target_price(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    identical: int,
    tpot_ms: tuple[Sequence[float], Sequence[float]],
    files_bytes: tuple[int, int],
    kernels: Mapping[str, Mapping[str, int]],
    max_loss: float | None,
) -> Price:
    """before, after: each answer token's log-probability, text by text. identical: answers that the
    quantised target repeats to the end. tpot_ms: of the same prompts, before and after.

    Intervals are Student's over texts: of a ratio of sums for likelihood, of log ratios for time.
    Raises ResultError where the two did not read the same texts.
    """
    if [len(text) for text in before] != [len(text) for text in after] or not any(before):
        raise ResultError("before and after did not read the same texts")
    lengths = [len(text) for text in before]
    total = sum(lengths)
    losses = [sum(one) - sum(other) for one, other in zip(before, after, strict=True)]
    mean = sum(losses) / total
    rests = [loss - mean * length for loss, length in zip(losses, lengths, strict=True)]
    low, high = student_interval(mean, rests, total / len(lengths))
    logs = [math.log(b / a) for b, a in zip(*tpot_ms, strict=True)]
    speed = sum(logs) / len(logs) if logs else None
    speed_low, speed_high = (
        (None, None)
        if speed is None
        else student_interval(speed, [value - speed for value in logs], 1.0)
    )
    nll = [-sum(map(sum, texts)) / total for texts in (before, after)]
    rows = {
        "files_bytes": price_row(*files_bytes, files_bytes[0] / files_bytes[1]),
        "perplexity": price_row(
            math.exp(nll[0]), math.exp(nll[1]), math.exp(-mean), _exp(high, -1), _exp(low, -1)
        ),
        "identical": price_row(len(lengths), identical, identical / len(lengths)),
        "tpot_ms": price_row(
            _median(tpot_ms[0]),
            _median(tpot_ms[1]),
            _exp(speed),
            _exp(speed_low),
            _exp(speed_high),
        ),
    }
    loss_high = None if high is None else math.expm1(high)
    return Price(
        rows=rows,
        kernels=kernels,
        loss=math.expm1(mean),
        loss_low=None if low is None else math.expm1(low),
        loss_high=loss_high,
        max_loss=max_loss,
        verdict=judge_loss(math.expm1(mean), loss_high, max_loss),
    )


def student_interval(
    mean: float, rests: Sequence[float], per_text: float
) -> tuple[float | None, float | None]:
    """mean -+ t * standard error, from each text's rest; None below two texts."""
    count = len(rests)
    if count < 2:
        return None, None
    variance = sum(rest**2 for rest in rests) / (count - 1) / count
    half = float(student_t.ppf((1 + _CONFIDENCE) / 2, count - 1)) * math.sqrt(variance) / per_text
    return mean - half, mean + half


def _exp(value: float | None, sign: int = 1) -> float | None:
    return None if value is None else math.exp(sign * value)


def _median(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return None
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
