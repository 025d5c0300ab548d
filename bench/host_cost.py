"""What our engine process adds to each step of vLLM, and what its settings change about it.

    python bench/host_cost.py [--draft none --draft native] [--prompts 8] [--keep]

Pocket on a CPU, one request alone. In one engine each prompt is answered under every way of WAYS,
forwards and then backwards (A B C C B A), so that a machine that gets slower meets all alike. Told:
the step, what vLLM does around its core in it (outputs and statistics), what serve/child.py does
around vLLM's step; medians over prompts, and each way less the first one with a paired interval. A
minute for each draft.
Figures go to bench/results/host-cost.json with --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paceline.cli.arms import build_arm_plan
from paceline.data import build_requests, read_prompts
from paceline.endpoint import Sampling
from paceline.eval.statistics import half_width, measure_spread
from paceline.records import build_provenance, read_json, write_json
from paceline.serve import find_machine
from paceline.serve.endpoint import resolve_engine_args
from paceline.serve.process import build_child_env
from paceline.serve.requests import show_request
from paceline.serve.staging import make_staging, remove_staging
from paceline.target import read_target

NUM_WARM_UP = 2
WAYS = ("vLLM's loggers", "counts", "counts, request statistics off")
PARTS = ("step_us", "around_core_us", "loop_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draft", action="append", help="none, native, a draft; both by default")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--keep", action="store_true", help="write bench/results/")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure_inside(json.loads(sys.stdin.readline()))
        return
    figures: dict[str, Any] = {}
    for draft in options.draft or ("none", "native"):
        figures[draft] = {
            "prompts": options.prompts,
            "max_tokens": options.max_tokens,
            "ways": describe(run(draft, options.prompts, options.max_tokens)),
        }
        print(draft, json.dumps(figures[draft], indent=2), flush=True)
    if options.keep:
        place = Path(__file__).parent / "results" / "host-cost.json"
        if place.exists():  # the other draft, from another call
            figures = {**read_json(place)["figures"], **figures}
        write_json(
            place,
            {
                "provenance": build_provenance(),
                "machine": find_machine("cpu"),
                "figures": figures,
            },
        )


def run(draft: str, num_prompts: int, max_tokens: int) -> list[dict[str, dict[str, float]]]:
    """One engine: for each prompt, way -> part -> microseconds a step."""
    target = read_target("pocket")
    plan = build_arm_plan(target, draft, device="cpu")
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    every = read_prompts("held-out").prompts
    count = num_prompts + NUM_WARM_UP
    asked = build_requests(every[:: len(every) // count][:count], target, sampling, thinking="off")
    staging = make_staging(plan)
    given = {
        "engine_args": resolve_engine_args(plan, staging),
        "requests": [show_request(request) for request in asked],
    }
    env = {**os.environ, **build_child_env(plan.env, staging), "VLLM_LOGGING_LEVEL": "INFO"}
    command = [sys.executable, __file__, "--inside"]
    try:
        done = subprocess.run(
            command, input=json.dumps(given) + "\n", stdout=subprocess.PIPE, text=True, env=env
        )
    finally:
        remove_staging(staging)
    if done.returncode:
        raise SystemExit("the engine failed; what it said stands above")
    found: list[dict[str, dict[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return found[NUM_WARM_UP:]


def measure_inside(given: dict[str, Any]) -> None:
    """In the engine's process, where vLLM and the loop of serve/child.py are."""
    from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger

    from paceline.serve.child import _Channel, _Engine

    engine = _Engine(given["engine_args"], [])
    vllm = engine.engine
    channel = _Channel(os.open(os.devnull, os.O_WRONLY))
    own = list(vllm.logger_manager.stat_loggers)
    full = [LoggingStatLogger(engine.config), PrometheusStatLogger(engine.config)]
    spent = {"step": 0.0, "core": 0.0, "count": 0.0}

    def timed(inner: Callable[[], Any], name: str) -> Callable[[], Any]:
        def call() -> Any:
            begun = time.perf_counter()
            result = inner()
            spent[name] += time.perf_counter() - begun
            spent["count"] += name == "step"
            return result

        return call

    vllm.engine_core.get_output = timed(vllm.engine_core.get_output, "core")
    vllm.step = timed(vllm.step, "step")
    rows = []
    for request in given["requests"]:
        sums = {way: dict.fromkeys(PARTS, 0.0) for way in WAYS}
        for way in (*WAYS, *reversed(WAYS)):
            vllm.logger_manager.stat_loggers = full if way == WAYS[0] else own
            vllm.log_stats = way != WAYS[2]
            spent.update(step=0.0, core=0.0, count=0.0)
            begun = time.perf_counter()
            engine.generate(channel, [request], 1)
            whole = time.perf_counter() - begun
            for part, seconds in zip(
                PARTS, (whole, spent["step"] - spent["core"], whole - spent["step"]), strict=True
            ):
                sums[way][part] += seconds / spent["count"] * 1e6 / 2
        rows.append(sums)
        print(f"prompt {len(rows)} of {len(given['requests'])}", file=sys.stderr, flush=True)
    print(json.dumps(rows), flush=True)
    os._exit(0)


def describe(rows: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of each way, and its mean difference from the first with a 95 % half-width."""
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        found[way] = {part: round(median(row[way][part] for row in rows), 1) for part in PARTS}
        if way == WAYS[0]:
            continue
        for part in ("step_us", "around_core_us"):
            gaps = np.array([row[way][part] - row[WAYS[0]][part] for row in rows])
            spread = measure_spread([gaps[:, None]])
            half = None if spread is None else half_width(spread, confidence=0.95)
            found[way][f"{part}_less"] = [
                round(float(gaps.mean()), 1),
                None if half is None else round(half, 1),
            ]
    return found


if __name__ == "__main__":
    main()
