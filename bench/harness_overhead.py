"""Time per token under this harness against vLLM's own offline engine, on the same prompts.

    python bench/harness_overhead.py [--target smollm2] [--draft none] [--num-prompts 12]

One engine; for each prompt A B B A: A is the loop that `paceline eval` times (serve/child.py: step,
note the chunk, beat), B is `vllm.LLM.generate` on the very same engine, timed by vLLM's own request
statistics. Prints one JSON object: the geometric mean over prompts of A / B, less 1, with its 95 %
half-width, and the share of A's time that was spent outside vLLM's step. That share bounds what the
loop can cost and does not move with other work on the machine: at most 0.01 is wanted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys

import numpy as np

from paceline.data import build_requests, read_prompts
from paceline.draft import read_draft, resolve_draft
from paceline.endpoint import Sampling
from paceline.eval.statistics import half_width, measure_spread
from paceline.serve import build_plan
from paceline.serve.endpoint import resolve_engine_args
from paceline.serve.process import build_child_env
from paceline.serve.staging import make_staging, remove_staging
from paceline.target import read_target

LIMIT = 0.01
WARM_UP = 2

BOTH = """
import json, os, sys, time
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from paceline.serve.child import _Channel, _Engine

given = json.loads(sys.stdin.readline())
llm = LLM(skip_tokenizer_init=True, **given["engine_args"])

class Listening(_Channel):
    def send(self, event, **fields):
        super().send(event, **fields)
        if event == "answer":
            self.answer = fields

channel = Listening(os.open(os.devnull, os.O_WRONLY))
engine = _Engine.__new__(_Engine)  # its loop around the engine that LLM started
engine._params, engine._delta = SamplingParams, RequestOutputKind.DELTA
engine._eos, engine._count = [], 0
engine.engine, engine.config = llm.llm_engine, llm.llm_engine.vllm_config

inside, step = [0.0], llm.llm_engine.step
def timed_step():
    began = time.monotonic()
    found = step()
    inside[0] += time.monotonic() - began
    return found

def ours(request):
    llm.llm_engine.step, inside[0] = timed_step, 0.0
    began = time.monotonic()
    engine.generate(channel, [request], 1)
    whole = time.monotonic() - began
    llm.llm_engine.step = step
    times, tokens = channel.answer["chunk_times_s"], channel.answer["chunk_tokens"]
    return (times[-1] - times[0]) / (sum(tokens) - tokens[0]), 1 - inside[0] / whole

def theirs(request):
    params = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
    )
    output, = llm.generate({"prompt_token_ids": request["prompt_ids"]}, params, use_tqdm=False)
    stats = output.metrics
    # the first step of an answer gives one token, whatever is drafted
    return (stats.last_token_ts - stats.first_token_ts) / (len(output.outputs[0].token_ids) - 1)

found = []
for request in given["requests"]:
    a, outside = ours(request)
    b, c = theirs(request), theirs(request)
    d, later = ours(request)
    found.append([a, b, c, d, (outside + later) / 2])
print("RESULT " + json.dumps(found), flush=True)
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--thinking", choices=("none", "on", "off"), default="none")
    args = parser.parse_args()
    target = read_target(args.target)
    draft = None if args.draft == "none" else read_draft(resolve_draft(args.draft))
    plan = build_plan(target, draft)
    prompts = read_prompts("held-out").prompts[: args.num_prompts + WARM_UP]
    sampling = Sampling(max_tokens=args.max_tokens, ignore_eos=True)
    staging = make_staging(plan)
    given = {
        "engine_args": resolve_engine_args(plan, staging),
        "requests": [
            {
                "prompt_ids": list(request.prompt_ids),
                "max_tokens": args.max_tokens,
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": 0,
                "seed": None,
                "ignore_eos": True,
            }
            for request in build_requests(prompts, target, sampling, thinking=args.thinking)
        ],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", BOTH],
            input=json.dumps(given) + "\n",
            capture_output=True,
            text=True,
            env={**os.environ, **build_child_env(plan.env, staging)},
            check=False,
        )
    finally:
        remove_staging(staging)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = np.array(json.loads(line.removeprefix("RESULT ")))[WARM_UP:]
    ours, theirs = np.log(found[:, [0, 3]]), np.log(found[:, [1, 2]])
    logs = (ours - theirs).mean(axis=1)
    spread = measure_spread([(logs - logs.mean())[:, None]])
    half = None if spread is None else half_width(spread, confidence=0.95)
    overhead = math.exp(float(logs.mean())) - 1
    figures = {
        "target": args.target,
        "draft": args.draft,
        "num_prompts": len(found),
        "ours_ms": round(1000 * float(np.exp(ours.mean())), 3),
        "theirs_ms": round(1000 * float(np.exp(theirs.mean())), 3),
        "overhead": round(overhead, 4),
        "half_width": None if half is None else round(half, 4),
        "share_outside_step": round(float(found[:, 4].mean()), 5),
        "within_limit": bool(found[:, 4].mean() <= LIMIT and overhead - (half or 0) <= LIMIT),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
