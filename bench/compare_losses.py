"""Which loss gives the longer acceptance: one recipe trained under each, judged on rows held out.

    python bench/compare_losses.py RECIPE --target TARGET --data DATA --work WORK --out FILE
    python bench/compare_losses.py --page docs/results/losses.md FILE …

DATA holds the target's own greedy answers. Its last rows are held out, the first --rows train;
the target's states over them are stored once in WORK, and every run reads them. Runs of one seed
share rows, order, first weights and number of steps: they differ in [loss] alone (one, named
"normed", in the draft's norms). Two figures a run, both on the held-out answers:

    greedy    accepted tokens a step + 1, by the trainer's own forward: the steps that a server
              takes (`paceline.train.replay`), without one
    sampled   1 + sum_j prod_{i<=j} (1 - TV) over the bases of the same answers: what a server that
              samples from the whole distribution accepts, given that text

The page compares each with the recipe's default by the ratio of the two lengths, text by text and
seed by seed; 95 % intervals over texts and seeds. Runs are appended to FILE as they end; at the end
of --minutes the bench stops and the same command goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data import read_rows
from paceline.draft import Draft
from paceline.eval.statistics import half_width, measure_spread
from paceline.records import build_provenance, read_json, sha256_file, write_json, write_text
from paceline.target import TargetFacts, read_target
from paceline.train import LossMix, Recipe, read_recipe, store_states, train_draft
from paceline.train.families.module import DraftModule
from paceline.train.features import FrozenTarget, TextFeatures, load_frozen_target
from paceline.train.replay import load_draft_module, walk_greedy

Text = tuple[list[int], list[int]]

FADING, FLAT = (1.0, 0.8, 0.64, 0.512, 0.41, 0.328, 0.262), (1.0,) * 7
NONE = {"soft": 0.0, "hard": 0.0}
DEFAULT = "kl + 0.1 ce"
LOSSES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "kl + 0.1 ce, flat": {},
    "kl + 0.1 ce, d-pace": {"pace_alpha": 0.5},
    "ce": {**NONE, "hard": 1.0},
    "ce, flat": {**NONE, "hard": 1.0},
    "ce, d-pace": {**NONE, "hard": 1.0, "pace_alpha": 0.5},
    "kl": {**NONE, "soft": 1.0},
    "reverse kl": {**NONE, "reverse": 1.0},
    "tv + 0.1 ce": {**NONE, "variation": 0.9, "hard": 0.1},
    "lk-hybrid": {**NONE, "hybrid": 1.0},
    "overlap": {**NONE, "overlap": 1.0},
    "kl + 0.1 ce, normed": {},
}


@dataclass(frozen=True, kw_only=True)
class KeptTarget(FrozenTarget):
    """A target that reads each text once."""

    kept: dict[bytes, TextFeatures]

    def features(self, tokens_BT: Tensor, aux_layer_ids: Sequence[int]) -> TextFeatures:
        key = tokens_BT.numpy().tobytes()
        if key not in self.kept:
            self.kept[key] = super().features(tokens_BT, aux_layer_ids)
        return self.kept[key]


def with_loss(
    recipe: Recipe, name: str, *, num_steps: int, seed: int, sizes: Mapping[str, Any]
) -> Recipe:
    """The recipe under another loss and seed, for so many steps of such sizes."""
    weights = FLAT if name.endswith(("flat", "d-pace")) else FADING
    optim = dataclasses.replace(recipe.optim, num_steps=num_steps, num_epochs=None)
    optim = dataclasses.replace(optim, warmup_steps=num_steps // 10, **sizes)
    draft = recipe.draft
    if "normed" in name:
        draft = dataclasses.replace(draft, norm_before_fc=True, norm_output=True)
    mix = LossMix(position_weights=weights[: recipe.num_unrolled], **LOSSES[name])
    return dataclasses.replace(recipe, loss=mix, optim=optim, draft=draft, seed=seed)


def split(args: argparse.Namespace) -> tuple[Path, list[Text]]:
    """(data folder of the first rows, (prompt, answer) of the last ones)."""
    folder = args.work / "data"
    if not folder.exists():
        folder.mkdir(parents=True)
        lines = (args.data / "rows.jsonl").read_text().splitlines(keepends=True)
        (folder / "rows.jsonl").write_text("".join(lines[: args.rows]))
        record = read_json(args.data / "data.json")
        record |= {"rows_sha256": sha256_file(folder / "rows.jsonl"), "counts": {"rows": args.rows}}
        write_json(folder / "data.json", record)
    texts = []
    for row in read_rows(args.data)[-args.held_out :]:
        start, end = row.loss_spans[-1]
        texts.append((list(row.input_ids[:start]), list(row.input_ids[start:end])))
    return folder, texts


@torch.no_grad()
def expect_sampled(
    module: DraftModule, frozen: FrozenTarget, draft: Draft, texts: Sequence[Text]
) -> list[tuple[float, int]]:
    """For each text: sum over bases of 1 + sum_j prod_{i<=j} (1 - TV of step i), and the bases."""
    k = draft.num_speculative_tokens
    taps = tuple(draft.config.get("eagle_aux_hidden_state_layer_ids") or ())
    found = []
    for prompt, answer in texts:
        tokens = torch.tensor([[*prompt, *answer]])
        bases = torch.arange(len(prompt) - 1, tokens.shape[1] - 1 - k)[None]
        if bases.shape[1] < 1:
            found.append((0.0, 0))
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
        found.append((round(float(length.sum()), 3), len(length)))
    return found


def run(
    name: str, seed: int, args: argparse.Namespace, data: Path, kept: KeptTarget, texts: list[Text]
) -> dict[str, Any]:
    sizes = {"tokens_per_batch": args.tokens_per_batch, "anchors_per_row": args.anchors}
    sizes |= {"max_length": args.max_length}
    recipe = read_recipe(args.recipe)
    recipe = with_loss(recipe, name, num_steps=args.steps, seed=seed, sizes=sizes)
    out = args.work / "draft"
    for left in (out, out.with_name("draft.checkpoint")):
        shutil.rmtree(left, ignore_errors=True)
    started = time.monotonic()
    draft = train_draft(
        recipe,
        target=args.target,
        data_dir=data,
        out_dir=out,
        device=args.device,
        states_dir=args.work / "states",
    )
    seconds = time.monotonic() - started
    module = load_draft_module(draft)
    steps = walk_greedy(module, kept, draft, texts)
    return {
        "training_s": round(seconds, 1),
        "tokens_seen": draft.metadata["trained"]["tokens_seen"],
        "greedy": [[sum(one) + len(one), len(one)] for one in steps],
        "sampled": expect_sampled(module, kept, draft, texts),
    }


# the page


def compare(
    runs: Mapping[str, Any], name: str, figure: str, seeds: Sequence[str]
) -> tuple[float, float | None, float]:
    """(ratio to the default's length, half of its interval, own length) over texts and seeds.

    Influence of text i and seed s on the logarithm of the ratio: (d - L n) / n's mean / L of the
    one, less that of the other; cells [texts, seeds].
    """
    influence, lengths = [], []
    for loss in (name, DEFAULT):
        pairs = np.array([runs[f"{loss}/{seed}"][figure] for seed in seeds], dtype=np.float64)
        delivered, steps = pairs[:, :, 0].T, pairs[:, :, 1].T
        length = delivered.sum() / steps.sum()
        lengths.append(length)
        influence.append((delivered - length * steps) / steps.mean() / length)
    spread = measure_spread([influence[0] - influence[1]])
    half = None if spread is None else half_width(spread, confidence=0.95)
    ratio = lengths[0] / lengths[1]
    return ratio, None if half is None else ratio * half, lengths[0]


def render(paths: Sequence[Path], page: Path) -> None:
    lines = [
        "# Which loss",
        "",
        "Written by `python bench/compare_losses.py --page`; do not edit. What the figures are "
        "stands at the head of that file. Length: bonus token included; × default: ratio of "
        "lengths to the default's, ± half of a 95 % interval over held-out answers and seeds.",
    ]
    for path in paths:
        found = read_json(path)
        runs, names = found["runs"], [n for n in LOSSES if f"{n}/0" in found["runs"]]
        some = runs[f"{names[0]}/0"]
        lines += [
            "",
            f"## {found['target']}, {found['recipe']}, {found['steps']} steps",
            "",
            f"{found['rows']:,} rows, {some['tokens_seen']:,} tokens seen in each run; "
            f"{len(some['greedy'])} answers held out. With one seed an interval is over answers "
            "alone.",
            "",
            "| loss | seeds | greedy | × default | sampled | × default |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        told: dict[str, list[str]] = {"longer": [], "shorter": []}
        for name in names:
            own_seeds = {key.split("/")[1] for key in runs if key.split("/")[0] == name}
            seeds = sorted(seed for seed in own_seeds if f"{DEFAULT}/{seed}" in runs)
            cells = [str(len(seeds))]
            for figure in ("greedy", "sampled"):
                ratio, half, length = compare(runs, name, figure, seeds)
                own = "1" if name == DEFAULT else f"{ratio:.3f} ± {half or float('nan'):.3f}"
                cells += [f"{length:.3f}", own]
                if half is not None and abs(ratio - 1.0) > half > 0.0:
                    told["longer" if ratio > 1.0 else "shorter"].append(f"{name} ({figure})")
            shown = f"{name} (the default)" if name == DEFAULT else name
            lines.append(f"| {shown} | {' | '.join(cells)} |")
        lines.append("")
        for word, which in told.items():
            lines.append(f"- {word} than the default by more than the interval: {_list(which)}.")
        lines += [f"- {note}" for note in found.get("notes", ())]  # a reader's, put in by hand
    write_text(page, "\n".join([*lines, ""]))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, nargs="+", help="with --page: records of runs")
    parser.add_argument("--target", type=read_target)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--anchors", type=int, default=32, help="bases of a row in a step")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--only", nargs="*", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page is not None:
        return render(args.recipe, args.page)
    if None in (args.target, args.data, args.work, args.out):
        parser.error("--target, --data, --work and --out are needed to run")
    end, (args.recipe,) = time.monotonic() + 60.0 * args.minutes, args.recipe
    measure(args, end)


def measure(args: argparse.Namespace, end: float) -> None:
    found = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    recipe: Recipe = read_recipe(args.recipe)
    data, texts = split(args)
    target: TargetFacts = args.target
    store_states(
        data,
        target=target,
        out_dir=args.work / "states",
        aux_layer_ids=recipe.draft.aux_layer_ids or (),
        max_length=args.max_length,
        device=args.device,
    )
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    whole = {f.name: getattr(frozen, f.name) for f in dataclasses.fields(frozen)}
    kept = KeptTarget(**whole, kept={})
    for seed in args.seeds:
        for name in args.only:
            key = f"{name}/{seed}"
            if key in found["runs"]:
                continue
            if time.monotonic() > end:
                print("stopped: the minutes are over; the same command goes on", flush=True)
                return
            found["runs"][key] = run(name, seed, args, data, kept, texts)
            found |= {"recipe": args.recipe.name, "steps": args.steps, "target": target.name}
            found |= {"rows": args.rows, "provenance": build_provenance()}
            write_json(args.out, found)
            lengths = {
                figure: sum(a for a, _ in found["runs"][key][figure])
                / sum(b for _, b in found["runs"][key][figure])
                for figure in ("greedy", "sampled")
            }
            print(key, lengths, found["runs"][key]["training_s"], flush=True)


if __name__ == "__main__":
    main()
