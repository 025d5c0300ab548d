"""One draft against itself on real servers: the noise floor, and what it lets be found.

    python bench/noise_floor.py --out FOLDER [--target smollm2] [--draft smollm2-eagle3] [--runs 20]

Two servers of one draft stand side by side; each of `runs` quick runs asks both every prompt. The
first run gives the floor; the others should lie within it. Then the second server is slowed down
for real: its process is stopped and continued by the kernel, for 5 % and for 1 % of the time. And
every recorded run is slowed down on paper, by stretching its chunk times. Prints one JSON object;
runs in FOLDER that are whole already are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.cli.arms import open_arms
from paceline.cli.measure import Questions, build_questions, measure_endpoints, plan_arms
from paceline.eval import measure_noise_floor
from paceline.eval.noise import is_tie
from paceline.eval.ratios import compute_ratios
from paceline.records import read_json
from paceline.rules import Rules, read_rules
from paceline.target import read_target

PERIOD_S = 0.04
SLOWDOWNS = (0.05, 0.01)


@contextlib.contextmanager
def slowed(pid: int, share: float) -> Iterator[None]:
    """Stops a session's processes for a share of the time, in short turns."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            os.killpg(pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * share)
            os.killpg(pid, signal.SIGCONT)
            time.sleep(PERIOD_S * (1 - share))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        os.killpg(pid, signal.SIGCONT)


def score_of(result: dict[str, Any], rules: Rules, *, slower: float = 0.0) -> dict[str, Any]:
    """Score of a run, its candidate's chunk times stretched by a share."""
    arms = {name: arm["requests"] for name, arm in result["arms"].items()}
    arms["candidate"] = [
        {**e, "tpot_ms": e["tpot_ms"] * (1 + slower)} if e["tpot_ms"] is not None else e
        for e in arms["candidate"]
    ]
    _, score, _ = compute_ratios(arms, {"baseline": 1, "candidate": 1}, rules, seed=result["seed"])
    if score is None:
        raise SystemExit("a run has no score")
    return score


def verdict(score: dict[str, Any], floor: dict[str, Any], rules: Rules) -> str:
    """ "tie" within the floor; beyond it "found" when the interval leaves 100 out, else "noise"."""
    if is_tie(score["value"], floor, rules):
        return "tie"
    return "noise" if score["low"] <= rules.baseline_score <= score["high"] else "found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-eagle3")
    parser.add_argument("--rules", default="demo")
    parser.add_argument("--prompts", default="demo-eval")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--thinking", choices=("none", "on", "off"), default="none")
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    rules, target = read_rules(args.rules), read_target(args.target)
    questions = build_questions(
        args.prompts, target, rules, max_tokens=args.max_tokens, thinking=args.thinking
    )
    questions = dataclasses.replace(questions, prompts=questions.prompts[: args.num_prompts])
    names = [f"run-{number:02d}" for number in range(args.runs)]
    names += [f"slow-{share:g}" for share in SLOWDOWNS]
    todo = [name for name in names if not (args.out / name / "result.json").exists()]
    if todo:
        measure(args, rules, target, questions, todo)
    results = {name: read_json(args.out / name / "result.json") for name in names}
    floor = measure_noise_floor(results[names[0]], rules)
    plain = [results[name] for name in names[: args.runs]]
    scores = [score_of(result, rules)["value"] for result in plain]
    figures = {
        "target": args.target,
        "num_prompts": len(questions.prompts),
        "floor_score": round(floor["score"], 3),
        "floor_tpot": round(floor["tpot"], 4),
        "runs": args.runs,
        "runs_within_floor": sum(abs(value - 100) <= floor["score"] for value in scores),
        "widest_from_100": round(max(abs(value - 100) for value in scores), 3),
        "other_cpu_share": [
            round(load["other_share"] or 0, 3)
            for result in plain
            for load in result["protocol"]["loads"]
        ],
    }
    for share in SLOWDOWNS:
        real = score_of(results[f"slow-{share:g}"], rules)
        paper = [verdict(score_of(r, rules, slower=share), floor, rules) for r in plain]
        figures[f"slower by {share:.0%}"] = {
            "real": verdict(real, floor, rules),
            "real_score": round(real["value"], 3),
            "real_time_ratio": round(real["terms"]["tpot"]["ratio"], 4),
            "on_paper": {kind: paper.count(kind) for kind in sorted(set(paper))},
        }
    print(json.dumps(figures, indent=2))


def measure(
    args: argparse.Namespace, rules: Rules, target: Any, questions: Questions, names: list[str]
) -> None:
    """Starts both servers once and measures the runs that are missing."""
    arms = plan_arms(
        target,
        {"baseline": args.draft, "candidate": args.draft},
        rules,
        num_tokens=questions.longest,
        twice=True,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    with open_arms(arms, args.out) as endpoints:
        for name in names:
            share = float(name.removeprefix("slow-")) if name.startswith("slow-") else 0.0
            pid = endpoints["candidate"].pid  # type: ignore[attr-defined]
            with slowed(pid, share) if share else contextlib.nullcontext():
                measure_endpoints(endpoints, arms, target, rules, questions, out=args.out / name)


if __name__ == "__main__":
    main()
