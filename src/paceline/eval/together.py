"""Latency by regime with several requests in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.endpoint import Endpoint, Request
from paceline.eval.bench import Regime, ask_endpoint, measure_arm, read_timing, summarise
from paceline.eval.load import watch_load

__all__ = ["measure_together"]


def measure_together(
    endpoint: Endpoint,
    requests: Mapping[Regime, tuple[Sequence[Request], Sequence[Request]]],
    *,
    concurrency: int,
    gpu: bool = False,
) -> list[dict[str, Any]]:
    """`measure_arm`'s records with `concurrency` requests in flight instead of one.

    A request's time begins when the engine takes it, so waiting for a place does not count.
    """
    if concurrency == 1:
        return measure_arm(ask_endpoint(endpoint), requests, gpu=gpu)
    records = []
    for regime, (warm_up, asked) in requests.items():
        endpoint.generate(warm_up, concurrency=concurrency)
        with watch_load(gpu=gpu) as watch:
            answers = endpoint.generate(asked, concurrency=concurrency)
        timings = [read_timing(answer) for answer in answers]
        records.append(summarise(regime, timings, watch.record))
    return records
