"""Which loss gives the longer acceptance: one recipe trained under each, judged on rows held out.

    python bench/compare_losses.py RECIPE --target TARGET --data DATA --out FILE [--steps 150]

DATA holds the target's own greedy answers. The last tenth of its rows is held out. All runs share
seed, rows, order and number of steps; they differ in [loss] alone. Two figures a run:

    greedy    accepted tokens a step + 1 along the held-out answers, by the trainer's own forward
              (the steps that a server takes: `paceline.train.replay`)
    sampled   1 + sum_j prod_{i<=j} (1 - TV) over the bases of the same answers: what a server that
              samples from the whole distribution accepts, given that text

Results are appended to FILE, so a bench can be made in parts; what is in it is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch

from paceline.data import read_rows
from paceline.draft import Draft
from paceline.records import write_json
from paceline.target import TargetFacts, read_target
from paceline.train import LossMix, Recipe, read_recipe, train_draft
from paceline.train.entry import simulate_draft
from paceline.train.features import load_frozen_target
from paceline.train.replay import load_draft_module

FLAT, FADING = (1.0,), (1.0, 0.8, 0.64, 0.512, 0.41, 0.328, 0.262)
NONE = {"soft": 0.0, "hard": 0.0}
LOSSES: dict[str, dict[str, float]] = {
    "kl + 0.2 ce": {"soft": 1.0, "hard": 0.2},
    "kl": {**NONE, "soft": 1.0},
    "ce": {**NONE, "hard": 1.0},
    "reverse kl": {**NONE, "reverse": 1.0},
    "tv + 0.1 ce": {**NONE, "variation": 0.9, "hard": 0.1},
    "lk-hybrid": {**NONE, "hybrid": 1.0},
    "overlap": {**NONE, "overlap": 1.0},
    "kl + 0.2 ce, flat": {"soft": 1.0, "hard": 0.2},
    "ce, d-pace 0.5": {**NONE, "hard": 1.0, "pace_alpha": 0.5},
    "kl + 0.2 ce, d-pace 0.5": {"soft": 1.0, "hard": 0.2, "pace_alpha": 0.5},
}


def with_loss(recipe: Recipe, name: str, num_steps: int) -> Recipe:
    """The recipe under another loss, for so many steps."""
    count = recipe.num_unrolled
    is_flat = name.endswith("flat") or "d-pace" in name
    weights = FLAT * count if is_flat else FADING[:count]
    mix = dataclasses.replace(LossMix(), **LOSSES[name], position_weights=weights)
    optim = dataclasses.replace(recipe.optim, num_steps=num_steps, num_epochs=None)
    return dataclasses.replace(recipe, loss=mix, optim=optim)


def split(data: Path, folder: Path) -> tuple[Path, list[tuple[list[int], list[int]]]]:
    """(data folder of the first rows, (prompt, answer) of the last tenth)."""
    lines = (data / "rows.jsonl").read_text().splitlines(keepends=True)
    first = len(lines) - len(lines) // 10
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(lines[:first]))
    shutil.copy(data / "data.json", folder / "data.json")
    texts = []
    for row in read_rows(data)[first:]:
        start, end = row.loss_spans[-1]
        texts.append((list(row.input_ids[:start]), list(row.input_ids[start:end])))
    return folder, texts


@torch.no_grad()
def expect_sampled(
    draft: Draft, target: TargetFacts, texts: list[tuple[list[int], list[int]]]
) -> float:
    """Mean over bases of 1 + sum_j prod_{i<=j} (1 - TV of step i), the text's tokens given."""
    module, k = load_draft_module(draft), draft.num_speculative_tokens
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    taps = tuple(draft.config.get("eagle_aux_hidden_state_layer_ids") or ())
    lengths = []
    for prompt, answer in texts:
        tokens = torch.tensor([[*prompt, *answer]])
        bases = torch.arange(len(prompt) - 1, tokens.shape[1] - 1 - k)[None]
        if bases.shape[1] < 1:
            continue
        features = frozen.features(tokens, taps)
        states, _ = module.unroll(
            tokens, features.taps_BTF, bases, frozen.embedding_VD, num_steps=k
        )
        heads = module.output_heads(frozen.head_VD)
        reached, length = torch.ones(bases.shape[1]), torch.ones(bases.shape[1])
        for step, state in enumerate(states):
            p = torch.softmax(state[0] @ heads[step if len(heads) > 1 else 0].float().T, -1)
            teacher = features.final_BTD[0, bases[0] + 1 + step]
            q = torch.softmax(teacher @ frozen.head_VD.T, -1)
            reached = reached * torch.minimum(p, q).sum(-1)
            length = length + reached
        lengths.append(length)
    return float(torch.cat(lengths).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--target", required=True, type=read_target)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="*", choices=list(LOSSES), default=list(LOSSES))
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    for name in args.only:
        if name in found["runs"]:
            continue
        recipe = with_loss(read_recipe(args.recipe), name, args.steps)
        if recipe.loss.pace_alpha is not None and recipe.num_unrolled == 1:
            continue
        with tempfile.TemporaryDirectory() as folder:
            data, texts = split(args.data, Path(folder) / "data")
            started = time.monotonic()
            draft = train_draft(
                recipe, target=args.target, data_dir=data, out_dir=Path(folder) / "draft"
            )
            seconds = time.monotonic() - started
            steps = [
                took
                for text in simulate_draft(draft, args.target, texts, dtype="float32")
                for took in text
            ]
            found["runs"][name] = {
                "greedy": 1.0 + sum(steps) / len(steps),
                "num_steps": len(steps),
                "sampled": expect_sampled(draft, args.target, texts),
                "training_s": round(seconds, 1),
            }
        found |= {"recipe": args.recipe.name, "steps": args.steps, "target": args.target.name}
        write_json(args.out, found)
        print(name, json.dumps(found["runs"][name]), flush=True)


if __name__ == "__main__":
    main()
