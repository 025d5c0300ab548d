"""Training speed of the EAGLE-3 trainer on SmolLM2, and how far from the machine's limit it is.

    python bench/train_throughput.py [--draft-vocab 8192] [--epochs 3] [--device cpu]

Operations a supervised token (a multiply-add is two), SmolLM2-135M, K = 3, draft vocabulary N:

    target forward, once a run   2 * 106.2 M (layers)                                   = 212 M
    fc and step-0 keys           6 * (1.00 M + 0.44 M)                                  =   9 M
    layer, K times               6 * 3.64 M * K                                         =  66 M
    keys of steps 1..K-1         6 * 0.44 M * (K-1)                                     =   5 M
    draft head, K times          6 * 576 N * K, N = 8,192; own, trained                 =  85 M
    teacher head over N          2 * 576 N                                              =   9 M
    instead, whole vocabulary    4 * 28.3 M * K (frozen) and 2 * 28.3 M                 = 397 M

With N = 8,192 and cached target features: 174 M a token, so one core pair that sustains 380 G bf16
operations a second (AVX512-BF16, measured with 2048 x 576 x 1536 products) can do 2,200 tokens/s;
in the first epoch, target included, 980. Over E epochs: 380e9 / (174e6 + 212e6 / E). Softmax over N
comes on top: 4 N exponentials a token at 0.65 G/s are 0.05 ms. Rows not sampled greedily also need
the target's own likeliest token, over 49,152: 57 M once.
The field's figure for this model, vocabulary and K on two cores is 700 tokens/s.

Prints one JSON object: tokens/s (real tokens, prompts included) of the first epoch, of the later
ones, and overall.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from paceline.records import sha256_file
from paceline.target import TargetFacts, read_target
from paceline.train import build_recipe, train_draft
from paceline.train.loop import Progress


def write_rows(folder: Path, target: TargetFacts, *, num_rows: int, length: int) -> None:
    """Random text of a chat's shape: a fifth is prompt. Speed does not depend on the words."""
    draw = random.Random(0)
    frequent = draw.sample(range(target.vocab_size), 4000)
    with open(folder / "rows.jsonl", "w") as file:
        for number in range(num_rows):
            size = length * draw.randint(7, 13) // 10
            ids = [draw.choice(frequent) for _ in range(size)]
            row = {"id": str(number), "category": "chat", "input_ids": ids}
            row |= {"loss_spans": [[size // 5, size]], "finish_reason": "length"}
            file.write(json.dumps(row) + "\n")
    facts = ("tokenizer_sha256", "chat_template_sha256", "weights_fingerprint")
    record = {
        "format": "paceline-data/1",
        "complete": True,
        "target": {name: getattr(target, name) for name in facts},
        "sampling": {"temperature": 0.0},
        "thinking": "none",
        "prompts": {"name": "random words", "sha256": "", "num_prompts": num_rows},
        "counts": {"rows": num_rows},
        "rejected": [],
        "rows_sha256": sha256_file(folder / "rows.jsonl"),
    }
    (folder / "data.json").write_text(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2", type=read_target)
    parser.add_argument("--draft-vocab", type=int, default=8192, help="0: the target's")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    draft = {"num_speculative_tokens": 3}
    if args.draft_vocab:
        draft["draft_vocab_size"] = args.draft_vocab
    recipe = build_recipe(
        {
            "family": "eagle3",
            "draft": draft,
            "optim": {
                "lr": 1e-3,
                "num_epochs": args.epochs,
                "tokens_per_batch": args.tokens_per_batch,
                "max_length": 512,
            },
        }
    )
    epochs: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, args.target, num_rows=args.rows, length=args.length)

        def show(progress: Progress) -> None:
            epochs.setdefault(progress.epoch, []).append(time.monotonic())

        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        num_tokens = sum(len(row["input_ids"]) for row in rows)
        draft_folder = train_draft(
            recipe,
            target=args.target,
            data_dir=folder,
            out_dir=folder / "draft",
            device=args.device,
            on_progress=show,
        )
    ends = [times[-1] for times in epochs.values()]
    minutes = draft_folder.metadata["trained"]["minutes"]
    later = [num_tokens / (b - a) for a, b in pairwise(ends)]
    total_s = 60.0 * minutes
    first_s = total_s - (ends[-1] - ends[0])
    figures = {
        "tokens_an_epoch": num_tokens,
        "threads": torch.get_num_threads(),
        "first_epoch_tokens_per_s": round(num_tokens / first_s),  # target's forward included
        "later_epochs_tokens_per_s": [round(speed) for speed in later],
        "overall_tokens_per_s": round(args.epochs * num_tokens / total_s),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
