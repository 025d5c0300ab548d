"""Training speed and memory of every family, beside the roofline of the machine that ran it.

    python bench/train_families.py --target smollm2 --out FILE [--device cuda] [--only eagle3]

Each family trains by its recipe (recipes/families/goals.py names them) on random words of a chat's
shape, whose speed is that of any words. Operations are counted, not estimated: every matrix product
of a run of one epoch and of one of two, by torch's own counter; their difference is an epoch from
kept features, the rest of the first is the target's forward. Bytes, at the least that the
arithmetic asks for, in the precision it is held in (loop.py):

    parameters   read as weights, forward and back, cast once each (2 * 6 B), gradient written and
                 read (8 B), weight and two moments read and written (24 B): 44 B each a step
    logits       of every prediction over the draft's vocabulary, in the recipe's 16 bit: written,
                 turned into their gradient (read, written), read by two products: 10 B each

The machine's peaks are measured first: a bf16 product of 4096 x 4096 (CPU: 2048) and a copy of
1 GiB (CPU: 256 MiB). The roofline is the larger of operations / peak and bytes / bandwidth; share
is roofline time over the time it took. What is in FILE already is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from train_throughput import write_rows

from paceline.draft import Draft
from paceline.records import build_provenance, write_json
from paceline.target import TargetFacts, read_target
from paceline.train import Recipe, read_recipe, train_draft

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
sys.path.insert(0, str(RECIPES / "families"))

from goals import GOALS  # noqa: E402

PARAMETER_BYTES, LOGIT_BYTES = 44, 10


def measure_peaks(device: torch.device) -> dict[str, float]:
    """Operations a second of a bf16 product, bytes a second of a copy; best of five."""
    cuda = device.type == "cuda"
    size, num_bytes = (4096, 2**30) if cuda else (2048, 2**28)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = min(_seconds(lambda: a @ a, cuda) for _ in range(5))
    copy = min(_seconds(lambda: target.copy_(source), cuda) for _ in range(5))
    return {"operations_per_s": 2.0 * size**3 / product, "bytes_per_s": 2.0 * num_bytes / copy}


def _seconds(run: Callable[[], object], cuda: bool) -> float:
    run()
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def fit(recipe: Recipe, args: argparse.Namespace, num_epochs: int) -> Recipe:
    """The recipe for so many epochs, all features kept."""
    optim = dataclasses.replace(
        recipe.optim,
        num_epochs=num_epochs,
        num_steps=None,
        warmup_steps=0,
        max_length=min(recipe.optim.max_length, args.tokens_per_batch),
        tokens_per_batch=args.tokens_per_batch,
        tokens_per_part=None,
        checkpoint_steps=10**6,
    )
    return dataclasses.replace(recipe, optim=optim)


def train(
    recipe: Recipe, args: argparse.Namespace, data: Path, folder: Path
) -> tuple[Draft, list[tuple[int, float]]]:
    """The draft, and (epoch, end) of each step."""
    ends: list[tuple[int, float]] = []
    draft = train_draft(
        recipe,
        target=args.target,
        data_dir=data,
        out_dir=folder,
        device=args.device,
        on_progress=lambda p: ends.append((p.epoch, time.monotonic())),
    )
    return draft, ends


def count_operations(recipe: Recipe, args: argparse.Namespace, data: Path, folder: Path) -> int:
    with FlopCounterMode(display=False) as counter:
        train(recipe, args, data, folder)
    return int(counter.get_total_flops())


def measure(name: str, args: argparse.Namespace, data: Path, peaks: dict[str, float]) -> Any:
    recipe = read_recipe(RECIPES / GOALS[args.target.name].recipes[name])
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        draft, ends = train(fit(recipe, args, args.epochs), args, data, place / "timed")
        memory = torch.cuda.max_memory_allocated() if cuda else peak_resident()
        one = count_operations(fit(recipe, args, 1), args, data, place / "one")
        two = count_operations(fit(recipe, args, 2), args, data, place / "two")
    later = [end for epoch, end in ends if epoch > 0]
    num_steps = sum(epoch == 0 for epoch, _ in ends)
    seconds = (later[-1] - later[0]) / (len(later) - 1) * num_steps
    tokens = draft.metadata["trained"]["tokens_seen"] / args.epochs
    moved = num_steps * draft.num_parameters * PARAMETER_BYTES
    moved += LOGIT_BYTES * count_logits(draft, recipe, data, args.target)
    times = {
        "operations_s": (two - one) / peaks["operations_per_s"],
        "bytes_s": moved / peaks["bytes_per_s"],
    }
    return {
        "parameters": draft.num_parameters,
        "tokens_per_s": round(tokens / seconds, 1),
        "memory_bytes": memory,
        "an_epoch": {
            "steps": num_steps,
            "tokens": tokens,
            "seconds": round(seconds, 4),
            "operations": two - one,
            "operations_of_the_target": one - (two - one),
            "bytes": moved,
        },
        "operations_per_token": round((two - one) / tokens),
        "roofline": {**times, "share": round(max(times.values()) / seconds, 4)},
    }


def count_logits(draft: Draft, recipe: Recipe, data: Path, target: TargetFacts) -> int:
    """Predictions of an epoch times the draft's vocabulary; anchors leave their share of bases."""
    vocab = int(draft.config.get("draft_vocab_size") or target.vocab_size)
    few, total = recipe.optim.anchors_per_row, 0
    for line in (data / "rows.jsonl").read_text().splitlines():
        start, end = json.loads(line)["loss_spans"][0]
        bases = end - start - 1
        total += recipe.num_unrolled * (bases if few is None else min(few, bases))
    return total * vocab


def peak_resident() -> int:
    """Bytes of this process, at its most: run one family at a time for its own figure."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2", type=read_target)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--only", action="append")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens-per-batch", type=int, default=16_384)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"families": {}}
    peaks = found.get("peaks") or measure_peaks(torch.device(args.device))
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        write_rows(data, args.target, num_rows=args.rows, length=args.length)
        for name in args.only or GOALS[args.target.name].recipes:
            if name in found["families"]:
                continue
            found["families"][name] = measure(name, args, data, peaks)
            found |= {"target": args.target.name, "device": args.device, "peaks": peaks}
            found["provenance"] = build_provenance()
            write_json(args.out, found)
            row = found["families"][name]
            print(
                f"{name}: {row['tokens_per_s']:,.0f} tokens/s, "
                f"{row['memory_bytes'] / 2**30:.2f} GiB, "
                f"{row['operations_per_token'] / 1e6:,.0f} M operations a token, "
                f"{100 * row['roofline']['share']:.0f} % of the roofline",
                flush=True,
            )


if __name__ == "__main__":
    main()
