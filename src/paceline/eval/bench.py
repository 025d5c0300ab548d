"""Latency by regime: exact prompt and answer lengths, one request at a time, against a baseline.

A regime is a prompt length and an answer length in tokens. Speed-up of an arm in a regime is the
baseline's mean latency over its own; the figure of a bench is the mean over regimes, as in the
AdaptFM challenge. Prompts are all different unless the caller asks for one repeated prompt, which
measures caches, and is labelled so. Nothing here knows an engine: an `Ask` answers with times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from paceline.acceptance import count_decode_steps
from paceline.endpoint import Answer, Endpoint, Request, Sampling
from paceline.errors import PlanError, ResultError
from paceline.eval.load import watch_load
from paceline.eval.statistics import half_width, measure_spread

__all__ = [
    "REGIMES",
    "Ask",
    "Regime",
    "Timing",
    "ask_endpoint",
    "build_bench_requests",
    "compare_arms",
    "measure_arm",
    "median_interval",
]

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Tokens of each prompt, chat template included, and of each answer."""

    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens}:{self.new_tokens}"


# the challenge's: short, medium, long
REGIMES = tuple(
    Regime(prompt_tokens=prompt, new_tokens=new)
    for prompt, new in ((64, 128), (2048, 256), (8192, 256))
)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One request. latency_ms: until the last token; tpot_ms: after the first; None of one chunk.

    num_steps, num_drafted, num_accepted: None where the engine does not tell.
    """

    ttft_ms: float
    latency_ms: float
    tpot_ms: float | None
    num_tokens: int
    num_steps: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None


Ask = Callable[[Request], Timing]


def ask_endpoint(endpoint: Endpoint, *, on_answer: Callable[[Answer], None] | None = None) -> Ask:
    """One request at a time to a started engine; on_answer gets each answer, warm-up included."""
    return lambda request: read_timing(endpoint.generate([request], on_answer=on_answer)[0])


def read_timing(answer: Answer) -> Timing:
    accepted = answer.per_step_accepted
    return Timing(
        ttft_ms=answer.ttft_ms,
        latency_ms=(answer.chunk_times_s[-1] - answer.sent_at_s) * 1000.0,
        tpot_ms=answer.tpot_ms,
        num_tokens=len(answer.output_ids),
        num_steps=count_decode_steps(
            num_output_tokens=len(answer.output_ids), accepted=accepted or ()
        ),
        num_drafted=None if answer.per_step_drafted is None else sum(answer.per_step_drafted),
        num_accepted=None if accepted is None else sum(accepted),
    )


def build_bench_requests(
    text_ids: Sequence[int],
    template_ids: tuple[Sequence[int], Sequence[int]],
    regimes: Sequence[Regime],
    *,
    num_requests: int,
    num_warm_up: int,
    repeated: bool,
) -> dict[Regime, tuple[list[Request], list[Request]]]:
    """Regime -> (warm-up, measured) requests, each prompt of exactly the regime's length.

    text_ids: a long text, of which each prompt takes its own piece; template_ids: what the chat
    template puts before and after it. repeated: every request of a regime, warm-up included, has
    one and the same prompt. Raises PlanError where the text or a regime is too short.
    """
    before, after = template_ids
    found: dict[Regime, tuple[list[Request], list[Request]]] = {}
    begin = 0
    for regime in regimes:
        room = regime.prompt_tokens - len(before) - len(after)
        if room < 1:
            raise PlanError(
                f"a prompt of {regime.prompt_tokens} tokens leaves no room for text",
                where=f"regime {regime.name}",
                expected=f"more than {len(before) + len(after)}, the chat template's own tokens",
            )
        sampling = Sampling(max_tokens=regime.new_tokens, ignore_eos=True)
        requests = []
        for number in range(num_warm_up + num_requests):
            if begin + room > len(text_ids):
                raise PlanError(
                    f"{len(text_ids):,} tokens of text are too few for so many different prompts",
                    where=f"regime {regime.name}, request {number}",
                    fix="Ask for fewer requests or shorter prompts.",
                )
            ids = (*before, *text_ids[begin : begin + room], *after)
            name = f"{regime.name}-{number}"
            requests.append(Request(request_id=name, prompt_ids=ids, sampling=sampling))
            begin += 0 if repeated else room
        begin += room if repeated else 0
        found[regime] = requests[:num_warm_up], requests[num_warm_up:]
    return found


def measure_arm(
    ask: Ask,
    requests: Mapping[Regime, tuple[Sequence[Request], Sequence[Request]]],
    *,
    gpu: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """One record a regime: times of each request, their medians with intervals, energy.

    gpu: read the GPU's power while the requests run; energy is its mean times the time they took.
    Raises ResultError when an answer has not the length that was asked for.
    """
    total = sum(len(warm_up) + len(asked) for warm_up, asked in requests.values())
    records, done = [], 0
    for regime, (warm_up, asked) in requests.items():
        for request in warm_up:
            ask(request)
            done += 1
            on_progress(done, total)
        timings = []
        with watch_load(gpu=gpu) as watch:
            for request in asked:
                timing = ask(request)
                if timing.num_tokens != regime.new_tokens:
                    raise ResultError(
                        f"an answer has {timing.num_tokens} tokens",
                        where=f"regime {regime.name}",
                        expected=f"{regime.new_tokens}: the engine must not stop earlier",
                        fix="Use a server that knows ignore_eos.",
                    )
                timings.append(timing)
                done += 1
                on_progress(done, total)
        records.append(summarise(regime, timings, watch.record))
    return records


def summarise(regime: Regime, timings: Sequence[Timing], load: Mapping[str, Any]) -> dict[str, Any]:
    tokens = sum(timing.num_tokens for timing in timings)
    gpu = load.get("gpu")
    energy = gpu["mean_power_w"] * load["seconds"] if gpu else None
    steps = [timing.num_steps for timing in timings if timing.num_steps is not None]
    delivered, num_steps = tokens - len(timings), sum(steps)
    return {
        **asdict(regime),
        "num_requests": len(timings),
        "mean_latency_ms": mean(timing.latency_ms for timing in timings),
        "latency_ms": median_interval([timing.latency_ms for timing in timings]),
        "ttft_ms": median_interval([timing.ttft_ms for timing in timings]),
        "tpot_ms": median_interval([t.tpot_ms for t in timings if t.tpot_ms is not None]),
        "tau": delivered / num_steps if len(steps) == len(timings) and num_steps else None,
        "energy_j": energy,
        "energy_j_per_token": energy / tokens if energy is not None else None,
        "other_cpu_share": load.get("other_share"),
        "requests": [asdict(timing) for timing in timings],
    }


def median_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Median, and the order statistics that hold it with 95 % whatever the distribution.

    low and high are None below six values: no two of them hold it so surely.
    """
    ordered = sorted(values)
    count = len(ordered)
    found: dict[str, float | None] = {"median": median(ordered) if ordered else None}
    rank, tail = -1, 0.0
    while rank + 1 < count // 2:
        tail += math.comb(count, rank + 1) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank += 1
    return {
        **found,
        "low": ordered[rank] if rank >= 0 else None,
        "high": ordered[count - 1 - rank] if rank >= 0 else None,
    }


def compare_arms(
    baseline: Sequence[Mapping[str, Any]], arm: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Speed-up of an arm: one a regime, and their mean with an interval over paired prompts.

    baseline, arm: records of measure_arm for the same requests. low and high are None where there
    are too few prompts for an interval.
    """
    ratios, cells = [], []
    for one, other in zip(baseline, arm, strict=True):
        slow, fast = (
            np.array([row["latency_ms"] for row in record["requests"]]) for record in (one, other)
        )
        ratio = float(slow.mean() / fast.mean())
        ratios.append(ratio)
        pull = ratio * (slow / slow.mean() - fast / fast.mean())
        cells.append(pull[:, None] / len(baseline))
    value = mean(ratios)
    spread = measure_spread(cells)
    half = None if spread is None else half_width(spread, confidence=CONFIDENCE)
    return {
        "regimes": ratios,
        "mean": value,
        "low": None if half is None else value - half,
        "high": None if half is None else value + half,
    }
