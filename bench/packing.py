"""What packing gives: padding, and tokens/s of the same rows packed and not, in pairs.

    python bench/packing.py --data DATA --recipe recipes/pocket/eagle3-slim.toml --target pocket \
        [--rows 400] [--pairs 6] [--out FILE]

The recipe's batches are cut to --tokens-per-batch; slots are --max-length wide. Both trainers hold
their features (an epoch of each runs first), then whole epochs run in turns, the order swapped from
pair to pair. A pair's ratio is packed over unpacked tokens/s, the interval Student's over pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student

from paceline.records import build_provenance, write_json
from paceline.target import read_target
from paceline.train import Recipe, read_recipe
from paceline.train.features import load_frozen_target
from paceline.train.packing import padding_share, plan_slots
from paceline.train.prepare import BatchSource
from paceline.train.ranks import Ranks
from paceline.train.setup import build_setup
from paceline.train.step import DraftStep, backward


def with_packing(recipe: Recipe, args: argparse.Namespace, packing: bool) -> Recipe:
    optim = dataclasses.replace(
        recipe.optim,
        tokens_per_batch=args.tokens_per_batch,
        tokens_per_part=None,
        max_length=args.max_length,
        feature_cache_bytes=2**40,
        packing=packing,
    )
    return dataclasses.replace(recipe, optim=optim)


def time_epoch(step: DraftStep, source: BatchSource, ranks: Ranks, epoch: int) -> float:
    """Real tokens a second, forward and gradients."""
    began, tokens = time.perf_counter(), 0
    for number in range(len(source)):
        backward(step, source.get(number, epoch=epoch), ranks)
        step.zero_grad(set_to_none=True)
        tokens += source.num_tokens(number)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, type=read_target)
    parser.add_argument("--recipe", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=400, help="of them, the first")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--max-length", type=int, default=1024)
    args = parser.parse_args()
    recipe, ranks = read_recipe(args.recipe), Ranks(device=torch.device(args.device))
    setup = build_setup(with_packing(recipe, args, False), target=args.target, data_dir=args.data)
    dtype = getattr(torch, recipe.dtype)
    frozen = load_frozen_target(args.target, device=args.device, dtype=dtype)
    module, _ = setup.build_module(frozen)
    module.to(args.device)
    trainers: dict[bool, tuple[DraftStep, BatchSource]] = {}
    padding: dict[str, float] = {}
    for packing in (False, True):
        one = with_packing(recipe, args, packing)
        source = BatchSource(
            setup.rows[: args.rows],
            frozen,
            one,
            aux_layer_ids=setup.aux_layer_ids,
            draft_tokens=setup.draft_tokens,
            greedy_rows=setup.greedy_rows,
            ranks=ranks,
        )
        trainers[packing] = DraftStep(module, frozen, source.teacher_head_VD, one), source
        lengths = [len(row.input_ids) for row in setup.rows]
        share = padding_share(lengths, plan_slots(lengths, one))
        padding["packed" if packing else "unpacked"] = round(share, 4)
        time_epoch(*trainers[packing], ranks, 0)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(1, args.pairs + 1):
        for packing in (False, True) if pair % 2 else (True, False):
            speeds[packing].append(time_epoch(*trainers[packing], ranks, pair))
    ratios = [b / a for a, b in zip(speeds[False], speeds[True], strict=True)]
    half = float(student.ppf(0.975, len(ratios) - 1)) * statistics.stdev(ratios)
    found: dict[str, Any] = {
        "target": args.target.name,
        "recipe": str(args.recipe),
        "device": args.device,
        "threads": torch.get_num_threads(),
        "tokens_per_batch": args.tokens_per_batch,
        "slot_tokens": args.max_length,
        "rows": {"padding": len(setup.rows), "timed": min(args.rows, len(setup.rows))},
        "padding": padding,
        "tokens_per_s": {
            "unpacked": [round(speed, 1) for speed in speeds[False]],
            "packed": [round(speed, 1) for speed in speeds[True]],
        },
        "ratio": {
            "mean": round(statistics.mean(ratios), 4),
            "half_interval": round(half / len(ratios) ** 0.5, 4),
        },
        "provenance": build_provenance(),
    }
    print(json.dumps({k: v for k, v in found.items() if k != "provenance"}, indent=2))
    if args.out is not None:
        runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
        write_json(args.out, {"runs": [*runs, found]})


if __name__ == "__main__":
    main()
