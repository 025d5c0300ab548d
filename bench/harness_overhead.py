"""Time per token under this harness against vLLM's own offline engine, on the same prompts.

    python bench/harness_overhead.py [--target smollm2] [--num-prompts 12] [--max-tokens 48]

Blocks A B B A, each a fresh process: A is `paceline`'s child engine, timed by its client; B is
`vllm.LLM` with the same engine arguments, one request at a time, timed by vLLM's own statistics
(first to last token of a request). Prints one JSON object: the geometric mean of the paired ratios
A / B over prompts, less 1, and its 95 % interval. At most 0.01 is wanted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import build_requests, read_prompts
from paceline.draft import read_draft, resolve_draft
from paceline.endpoint import Request, Sampling
from paceline.eval.statistics import half_width, measure_spread
from paceline.serve import build_plan, start
from paceline.serve.endpoint import resolve_engine_args
from paceline.serve.staging import make_staging, remove_staging
from paceline.target import read_target

LIMIT = 0.01
WARM_UP = 2

OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
given = json.load(sys.stdin)
llm = LLM(skip_tokenizer_init=True, **given["engine_args"])
found = []
for request in given["requests"]:
    params = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
    )
    output, = llm.generate({"prompt_token_ids": request["prompt_ids"]}, params, use_tqdm=False)
    stats = output.metrics
    seconds = stats.last_token_ts - stats.first_token_ts
    found.append(seconds * 1000 / (len(output.outputs[0].token_ids) - 1))
print("RESULT " + json.dumps(found))
"""


def time_paceline(plan: Any, requests: list[Request]) -> list[float]:
    with (
        tempfile.TemporaryDirectory() as folder,
        start(plan, log_path=Path(folder) / "engine.log") as endpoint,
    ):
        answers = [endpoint.generate([request])[0] for request in requests]
    return [answer.tpot_ms or math.nan for answer in answers][WARM_UP:]


def time_offline(plan: Any, requests: list[Request]) -> list[float]:
    staging = make_staging(plan)
    given = {
        "engine_args": resolve_engine_args(plan, staging),
        "requests": [
            {"prompt_ids": list(r.prompt_ids), "max_tokens": r.sampling.max_tokens}
            for r in requests
        ],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", OFFLINE],
            input=json.dumps(given),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            env={**os.environ, **plan.env},
        )
    finally:
        remove_staging(staging)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: list[float] = json.loads(line.removeprefix("RESULT "))
    return found[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    target = read_target(args.target)
    draft = None if args.draft == "none" else read_draft(resolve_draft(args.draft))
    plan = build_plan(target, draft)
    prompts = read_prompts("held-out").prompts[: args.num_prompts + WARM_UP]
    sampling = Sampling(max_tokens=args.max_tokens, ignore_eos=True)
    requests = build_requests(prompts, target, sampling)
    ours, theirs = [], []
    for name in ("ours", "theirs", "theirs", "ours"):
        if name == "ours":
            ours.append(time_paceline(plan, requests))
        else:
            theirs.append(time_offline(plan, requests))
    logs = np.log(np.array(ours)).T - np.log(np.array(theirs)).T  # [prompts, pairs]
    spread = measure_spread([logs - logs.mean()])
    half = None if spread is None else half_width(spread, confidence=0.95)
    overhead = math.exp(float(logs.mean())) - 1
    figures = {
        "target": args.target,
        "draft": args.draft,
        "ours_ms": round(float(np.exp(np.log(ours).mean())), 3),
        "theirs_ms": round(float(np.exp(np.log(theirs).mean())), 3),
        "by_block_ms": {
            "ours": [round(float(np.median(block)), 3) for block in ours],
            "theirs": [round(float(np.median(block)), 3) for block in theirs],
        },
        "overhead": round(overhead, 4),
        "half_width": None if half is None else round(half, 4),
        "within_limit": overhead <= LIMIT,
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
