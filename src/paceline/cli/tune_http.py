"""One trial of `paceline tune` through vLLM's own HTTP server: its answers and their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.endpoint import Request
from paceline.eval import Regime, ask_server, complete_ids, measure_arm
from paceline.serve import Plan, check_plan, open_server

__all__ = ["measure_through_http"]


def measure_through_http(
    plan: Plan,
    requests: Mapping[Regime, tuple[Sequence[Request], Sequence[Request]]],
    texts: Sequence[Request],
    *,
    log_path: Path,
) -> dict[str, Any]:
    """What a trial holds, times as a client sees them: streamed text, one request at a time."""
    check_plan(plan)
    with open_server(plan, log_path=log_path) as url:
        model = plan.target.name
        answers = [complete_ids(url, model, request) for request in texts]
        regimes = measure_arm(ask_server(url, model), requests, gpu=plan.device == "cuda")
    return {
        "k": plan.num_speculative_tokens or None,
        "method": plan.method,
        "regimes": regimes,
        "texts": [{"output_ids": ids, "finish_reason": reason} for ids, reason in answers],
        "host": None,
    }
