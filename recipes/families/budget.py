"""Trains one draft by its recipe for a number of minutes, in a process of its own.

    python recipes/families/budget.py pocket mtp --data DATA --out DRAFT --minutes 4 [--tiny]

How many steps that is, is measured once by a trial and kept in DRAFT.steps.json, so that a run that
was stopped goes on to the same end. On a CPU the recipe's batches are cut to CPU_SIZES; --tiny cuts
them further, to see that it runs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from goals import GOALS, RECIPES

from paceline.records import read_json, write_json
from paceline.target import TargetFacts, read_target
from paceline.train import Recipe, build_recipe, read_recipe, train_draft
from paceline.train.setup import with_num_steps

__all__ = ["CPU_SIZES", "TINY_SIZES", "shorten"]


CPU_SIZES = {
    "tokens_per_batch": 4096,
    "max_length": 256,
    "warmup_steps": 20,
    "anchors_per_row": 32,
    "feature_cache_bytes": 4 * 2**30,
    "checkpoint_steps": 100,
}
TINY_SIZES = {
    "tokens_per_batch": 1024,
    "max_length": 128,
    "warmup_steps": 4,
    "anchors_per_row": 16,
    "feature_cache_bytes": 2**30,
}


def show(progress: Any) -> None:
    if progress.step % max(1, progress.num_steps // 20) == 0:
        print(f"{progress.step}/{progress.num_steps} loss {progress.loss:.3f}", flush=True)


def try_out(recipe: Recipe, target: TargetFacts, args: argparse.Namespace) -> float:
    """Seconds a step, features kept: of the second half of a few steps on few rows."""
    clock: list[float] = []
    num_steps = 60 if args.device == "cuda" else 8
    out = args.out.with_name(f"{args.out.name}.trial")
    for left in (out, out.with_name(out.name + ".checkpoint")):
        shutil.rmtree(left, ignore_errors=True)
    train_draft(
        with_num_steps(recipe, num_steps),
        target=target,
        data_dir=args.data,
        out_dir=out,
        device=args.device,
        on_progress=lambda _: clock.append(time.monotonic()),
    )
    shutil.rmtree(out)
    half = num_steps // 2
    return (clock[-1] - clock[half - 1]) / (num_steps - half)


def shorten(recipe: Recipe, sizes: dict[str, int] | None) -> Recipe:
    """The recipe as it is, or with batches of these sizes."""
    if sizes is None:
        return recipe
    value = recipe.as_dict()
    optim = {k: v for k, v in value["optim"].items() if v is not None}
    has_anchors = "anchors_per_row" in optim
    optim |= {k: v for k, v in sizes.items() if k != "anchors_per_row" or has_anchors}
    draft = {k: v for k, v in value["draft"].items() if v is not None}
    init = {k: v for k, v in value["init"].items() if v is not None}
    return build_recipe({**value, "optim": optim, "draft": draft, "init": init}, where=recipe.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", choices=[*GOALS])
    parser.add_argument("family")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--minutes", required=True, type=float)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    sizes = None if args.device == "cuda" else CPU_SIZES
    recipe = read_recipe(RECIPES / GOALS[args.target].recipes[args.family])
    recipe = shorten(recipe, TINY_SIZES if args.tiny else sizes)
    facts = read_target(args.target)
    note = args.out.with_name(f"{args.out.name}.steps.json")
    if not note.exists():
        seconds = try_out(recipe, facts, args)
        num_steps = max(20, int(60.0 * args.minutes / seconds))
        write_json(note, {"num_steps": num_steps, "seconds_a_step": seconds})
    train_draft(
        with_num_steps(recipe, read_json(note)["num_steps"]),
        target=facts,
        data_dir=args.data,
        out_dir=args.out,
        device=args.device,
        resume=args.out.with_name(f"{args.out.name}.checkpoint").exists(),
        on_progress=show,
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the checkpoint is written
        sys.exit(130)
