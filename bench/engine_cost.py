"""Start and speed of each arm on this machine: what every demo and test pays for.

    python bench/engine_cost.py [--device cpu]

One engine at a time, smollm2, the same eight prompts, greedy, 48 tokens each: seconds to ready,
tokens/s one by one and eight at once. Ratios within one run mean something, seconds across machines
do not. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from paceline.data import build_requests, read_prompts
from paceline.draft import read_draft, resolve_draft
from paceline.endpoint import Endpoint, Sampling
from paceline.serve import build_plan, start
from paceline.target import TargetFacts, read_target

ARMS = ("none", "ngram", "smollm2-eagle3")


def tokens_per_s(endpoint: Endpoint, target: TargetFacts, *, concurrency: int) -> float:
    prompts = read_prompts("demo-eval").prompts[::3]
    requests = build_requests(prompts, target, Sampling(max_tokens=48, ignore_eos=True))
    began = time.monotonic()
    answers = endpoint.generate(requests, concurrency=concurrency)
    return sum(len(a.output_ids) for a in answers) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    args = parser.parse_args()
    target = read_target("smollm2")
    figures = {}
    for arm in ARMS:
        draft = read_draft(resolve_draft(arm)) if arm not in ("none", "ngram") else None
        plan = build_plan(
            target,
            draft,
            method=None if draft else arm,
            num_speculative_tokens=None if arm == "none" else 3,
            device=args.device,
        )
        with (
            tempfile.TemporaryDirectory() as folder,
            start(plan, log_path=Path(folder) / "engine.log") as endpoint,
        ):
            tokens_per_s(endpoint, target, concurrency=8)  # warm-up
            figures[arm] = {
                "start_s": round(endpoint.facts.start_s, 1),
                "tokens_per_s_one_by_one": round(tokens_per_s(endpoint, target, concurrency=1), 1),
                "tokens_per_s_eight_at_once": round(
                    tokens_per_s(endpoint, target, concurrency=8), 1
                ),
            }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
