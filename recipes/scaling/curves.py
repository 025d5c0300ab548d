"""Acceptance against tokens, layers or parameters: trained, served, fitted, drawn. No network.

    python recipes/scaling/curves.py --target pocket --axis tokens --work WORK
    python recipes/scaling/curves.py --target pocket --axis layers --work WORK
    python recipes/scaling/curves.py --target pocket --axis tokens --work WORK --budget full

One family along one axis, everything else equal. tokens: one training at a constant rate, whose
checkpoints are served; no row is seen twice. layers and parameters: one training each, on the same
rows in the same order. Every draft is served by vLLM on the same held-out prompts, greedily; the
intervals draw prompts again. The target's own answers are made once in WORK for all axes.

WORK/results/ gets TARGET-FAMILY-AXIS.toml (for `paceline forecast --acceptance`), .json and .svg.
What is finished is kept: the same command goes on after a kill. --minutes stops between two points.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from curve_plan import BUDGETS, Budget, Training, list_trainings, require_fresh_rows
from curve_serve import resample_lengths, serve_draft
from curve_train import train_marks

from paceline.data import (
    answer_prompts,
    contamination,
    plain_thinking,
    read_prompts,
    read_rows,
)
from paceline.draft import read_draft
from paceline.endpoint import Sampling
from paceline.errors import DataError, PacelineError, PlanError
from paceline.forecast import fit_scaling, read_scaling_points, scaling_to_json
from paceline.records import build_provenance, read_json, write_json, write_text
from paceline.report import draw_scaling
from paceline.serve import build_plan, find_device, start
from paceline.target import TargetFacts, read_target

_BEYOND = (2.0, 4.0, 10.0, 100.0)  # times the largest x


class TimeUpError(Exception):
    """The minutes are over; what is done is kept."""


def claim_work(work: Path, target: TargetFacts, budget: Budget) -> None:
    """WORK belongs to one target and one budget: drafts of two would make one curve. Raises
    PlanError."""
    mine = {
        "target": target.name,
        "weights_fingerprint": target.weights_fingerprint,
        "budget": {**dataclasses.asdict(budget), "marks": list(budget.marks)},
    }
    for folder in (work, work / "served", work / "drafts"):
        folder.mkdir(parents=True, exist_ok=True)
    path = work / "work.json"
    if not path.exists():
        write_json(path, mine)
    elif read_json(path) != mine:
        raise PlanError(
            "this folder was begun for another target or budget",
            where=str(path),
            expected=f"{target.name} with this budget",
            fix="Give another --work.",
        )


def answer(args: argparse.Namespace, target: TargetFacts, budget: Budget) -> Path:
    """The data folder. Raises DataError where a training prompt shares words with one held out."""
    out: Path = args.work / "data"
    prompts = read_prompts(f"train:{budget.num_prompts}")
    leaks = contamination(prompts.prompts, read_prompts("held-out").prompts)
    if leaks:
        raise DataError(
            f"training prompt '{leaks[0].training_id}' shares words with a held-out one",
            expected="none of them",
        )
    if (out / "data.json").exists() and read_json(out / "data.json").get("complete"):
        return out
    plan = build_plan(
        target, device=args.device, enforce_eager=True, max_num_seqs=budget.answer_concurrency
    )
    with start(plan, log_path=args.work / "answers.engine.log") as endpoint:
        answer_prompts(
            prompts,
            endpoint,
            target,
            out_dir=out,
            sampling=Sampling(max_tokens=budget.answer_tokens, seed=0),
            concurrency=budget.answer_concurrency,
            thinking=plain_thinking(target),
        )
    return out


def serve_marks(
    args: argparse.Namespace, training: Training, drafts: dict[int, Path], budget: Budget
) -> list[dict[str, Any]]:
    """One record a mark; each is served once and then read."""
    found = []
    for mark, folder in drafts.items():
        path = args.work / "served" / f"{folder.name}.json"
        draft = read_draft(folder)
        if not path.exists() or read_json(path)["draft_sha256"] != draft.sha256:
            if args.end is not None and time.monotonic() > args.end:
                raise TimeUpError
            began = time.monotonic()
            rows = serve_draft(args.target, folder, budget, device=args.device)
            write_json(
                path,
                {
                    "draft": folder.name,
                    "draft_sha256": draft.sha256,
                    "step": mark,
                    "size": training.size,
                    "tokens": draft.metadata["trained"]["tokens_seen"],
                    "parameters": draft.num_parameters,
                    "train_minutes": draft.metadata["trained"]["minutes"],
                    "serve_s": round(time.monotonic() - began, 1),
                    "prompts": rows,
                },
            )
        found.append(read_json(path))
    return found


def write_curve(
    args: argparse.Namespace, family: str, k: int, points: list[dict[str, Any]]
) -> None:
    """POINTS.toml, the record with the fit, and the figure."""
    key = {"tokens": "tokens", "layers": "size", "parameters": "parameters"}[args.axis]
    points = sorted(points, key=lambda point: float(point[key]))
    lengths, draws = resample_lengths([point["prompts"] for point in points])
    xs = [float(point[key]) for point in points]
    name = f"{args.target.name}-{family}-{args.axis}"
    folder = args.work / "results"
    folder.mkdir(parents=True, exist_ok=True)
    beyond = ", ".join(f"{times * xs[-1]:.10g}" for times in _BEYOND)
    text = [
        f"# {len(points)} drafts on {len(points[0]['prompts'])} held-out prompts, greedy, served"
        " by vLLM; recipes/scaling/curves.py",
        f'axis = "{args.axis}"\ntarget = "{args.target.name}"\nfamily = "{family}"',
        f"num_speculative_tokens = {k}\npredict = [{beyond}]",
    ]
    for number, x in enumerate(xs):
        own = draws[:, number]
        low, high = (float(v) for v in np.quantile(own, [0.025, 0.975]))
        text.append(
            f"\n[[points]]\nx = {x:.10g}\nacceptance_length = {lengths[number]:.4f}\n"
            f"low = {min(low, lengths[number]):.4f}\nhigh = {max(high, lengths[number]):.4f}\n"
            f"draws = [{', '.join(f'{v:.4f}' for v in own)}]"
        )
    write_text(folder / f"{name}.toml", "\n".join(text) + "\n")
    fit = scaling_to_json(fit_scaling(read_scaling_points(folder / f"{name}.toml")))
    fit["points_file"] = f"{name}.toml"
    record = {
        **fit,
        "budget": args.budget,
        "device": args.device,
        "runs": points,
        "provenance": build_provenance(seed=0),
    }
    write_json(folder / f"{name}.json", record)
    write_text(folder / f"{name}.svg", str(draw_scaling(fit)))
    for point, length in zip(points, lengths, strict=True):
        print(f"{args.axis} {point[key]:>12,}: {length:.3f}")
    print(f"see `paceline forecast --acceptance {folder / name}.toml --target {args.target.name}`")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="a folder or a bundled name")
    parser.add_argument("--axis", required=True, choices=("tokens", "layers", "parameters"))
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--family", choices=("eagle3", "medusa", "dflash"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--budget", choices=list(BUDGETS), default="small")
    parser.add_argument("--minutes", type=float, help="start no point after that")
    args = parser.parse_args()
    args.end = None if args.minutes is None else time.monotonic() + 60.0 * args.minutes
    args.device = args.device or find_device()
    budget = BUDGETS[args.budget]
    try:
        args.target = read_target(args.target)
        trainings = list_trainings(args.target.name, args.axis, budget, family=args.family)
        claim_work(args.work, args.target, budget)
        data = answer(args, args.target, budget)
        rows = read_rows(data)
        points = []
        for training in trainings:
            require_fresh_rows(training, rows)
            drafts = train_marks(
                training, args.target, data, args.work / "drafts", device=args.device
            )
            points += serve_marks(args, training, drafts, budget)
        first = trainings[0].recipe
        write_curve(args, first.family, first.draft.num_speculative_tokens, points)
    except TimeUpError:
        print("the minutes are over; the same command goes on")
    except PacelineError as problem:
        sys.exit(str(problem))
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")


if __name__ == "__main__":
    main()
