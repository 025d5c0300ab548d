"""Makes the bundled target `pocket` on one GPU: answers, tokens, training, export, served figures.

    python recipes/pocket/train_pocket.py --teacher FOLDER --out OUT --stage answer --minutes 5
    python recipes/pocket/train_pocket.py --teacher FOLDER --out OUT --stage tokens
    python recipes/pocket/train_pocket.py --teacher FOLDER --out OUT --stage train --minutes 8
    python recipes/pocket/train_pocket.py --teacher FOLDER --out OUT --stage export
    python recipes/pocket/train_pocket.py --teacher FOLDER --out OUT --stage plain
    python recipes/pocket/train_pocket.py --teacher FOLDER --out OUT --stage eval

`--stage train --resume` goes on from the last checkpoint; `--call-minutes M` stops a call after M
minutes with a checkpoint, so that the run fits into several calls. FOLDER is SmolLM2-135M-Instruct
(`paceline target show smollm2` says where its folder is). Without a GPU, in three minutes:

    python recipes/pocket/train_pocket.py --teacher FOLDER --out OUT --work WORK --tiny

Stages hand over in --work: `texts.jsonl`, `tokens/`, `tokenizer/`, `checkpoint/`, `plain.json`;
OUT gets `pocket/` and log.json. No network.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from corpus import Rows, build_tokenizer, read_corpus, write_tokens
from served import evaluate, plain

from paceline.data import contamination, open_tokenizer, read_prompts
from paceline.records import build_provenance, write_json
from paceline.target import read_target

HERE = Path(__file__).resolve().parent
# Of the MTP steps; the next token has 1. One step, teacher forced, hard labels, 0.3: how published
# MTP heads are trained (DeepSeek-V3), so acceptance falls with position as it does on them.
STEP_WEIGHTS = (0.3,)


def loops(text: str) -> bool:
    """Whether more than a quarter of its four-word sequences were there before."""
    words = text.split()
    fours = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(fours)) < 0.75 * len(fours)


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 1: SmolLM2's answers as text, wave by wave, cut off by the clock."""
    import torch
    from sample import answer_wave, load_teacher

    began = time.monotonic()
    facts = read_target(args.teacher)
    tokenizer = open_tokenizer(facts)
    teacher = load_teacher(
        str(facts.path),
        device=args.device,
        dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
    )
    prompts = read_prompts(f"train:{args.num_prompts}").prompts
    held_out = read_prompts("held-out").prompts
    leaked = {overlap.training_id for overlap in contamination(list(prompts), held_out)}
    print(f"{len(leaked)} prompts share eight words in a row with a held-out one: left out")
    draw = random.Random("answers")
    jobs = []
    for prompt in prompts:
        if prompt.prompt_id in leaked or len(prompt.messages) != 1:
            continue
        ids = tokenizer.encode_prompt(prompt.messages)
        if len(ids) > args.max_prompt:
            continue
        for number in range(args.answers_per_prompt):
            temperature = 0.0 if number == 0 else draw.choice((0.3, 0.5, 0.7))
            jobs.append((len(ids), draw.random(), prompt, ids, temperature, number))
    jobs.sort(key=lambda job: (job[0] // 16, job[1]))
    waves = [jobs[at : at + args.wave] for at in range(0, len(jobs), args.wave)]
    draw.shuffle(waves)
    path = args.work / "texts.jsonl"
    path.unlink(missing_ok=True)
    deadline = began + 60.0 * args.minutes
    num_rows = num_tokens = num_loops = 0
    for count, wave in enumerate(waves):
        if time.monotonic() > deadline:
            break
        answers = answer_wave(
            teacher,
            [job[3] for job in wave],
            [job[4] for job in wave],
            max_tokens=args.max_tokens,
            end_ids=facts.eos_token_ids,
            seed=count,
        )
        with path.open("a", encoding="utf-8") as out:
            for (_, _, prompt, _, temperature, number), ids in zip(wave, answers, strict=True):
                finished = bool(ids) and ids[-1] in facts.eos_token_ids
                text = tokenizer.decode(ids[:-1] if finished else ids)
                if len(text) < 4 or "\ufffd" in text:
                    continue
                if loops(text):  # a small model learns to loop from few examples
                    num_loops += 1
                    continue
                row = {
                    "id": f"{prompt.prompt_id}-{number}",
                    "category": prompt.category,
                    "prompt": prompt.messages[0]["content"],
                    "answer": text,
                    "finished": finished,
                    "temperature": temperature,
                }
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                num_rows, num_tokens = num_rows + 1, num_tokens + len(ids)
        speed = num_tokens / (time.monotonic() - began)
        print(f"wave {count + 1}/{len(waves)}: {num_tokens:,} tokens, {speed:,.0f}/s", flush=True)
    return {
        "rows": num_rows,
        "answer_tokens": num_tokens,
        "left_out_for_loops": num_loops,
        "distinct_prompts": len(prompts) - len(leaked),
        "seconds": round(time.monotonic() - began, 1),
    }


def tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 2: a tokenizer from the texts, and the texts in its tokens."""
    began = time.monotonic()
    tokenizer = build_tokenizer(
        args.work / "texts.jsonl",
        args.work / "tokenizer",
        vocab_size=args.vocab_size,
        max_bytes=args.tokenizer_bytes,
    )
    counts = write_tokens(
        args.work / "texts.jsonl", args.work / "tokens", tokenizer, think_share=args.think_share
    )
    return {
        **counts,
        "vocab_size": len(tokenizer),
        "seconds": round(time.monotonic() - began, 1),
    }


def shape_of_step(args: argparse.Namespace, step: int, num_steps: int) -> tuple[int, int]:
    """(rows, length): short rows first, in the last eighth every other step 4,096 or 16,384."""
    short = (512, 512, 1024)[step % 3]
    late = step > num_steps * (1.0 - args.long_share)
    length = (4096, 16384)[step // 2 % 2] if late and step % 2 else short
    length = min(length, args.max_row)
    return max(1, args.tokens_per_step // length), length


def measure_steps(args: argparse.Namespace, one: Any) -> int:
    """How many steps fit into the minutes: each shape a few times, the first time left out."""
    import torch

    took = {}
    for length in dict.fromkeys(min(n, args.max_row) for n in (512, 1024, 4096, 16384)):
        rows = max(1, args.tokens_per_step // length)
        for turn in range(4):
            if turn == 1:
                began = time.monotonic()
            one(rows, length)
            if args.device == "cuda":
                torch.cuda.synchronize()
        took[length] = (time.monotonic() - began) / 3
        print(f"rows of {length}: {took[length] * 1000:.0f} ms a step", flush=True)
    short = (2 * took[min(512, args.max_row)] + took[min(1024, args.max_row)]) / 3
    late = (took[min(4096, args.max_row)] + took[min(16384, args.max_row)]) / 2
    mean = short * (1 - args.long_share / 2) + late * args.long_share / 2
    return max(50, int(0.97 * 60.0 * args.minutes / mean))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 3: trunk and MTP head together."""
    import torch
    from pocket import Pocket, build_config, joint_loss, use_training_kernels

    from paceline.train import Optim, learning_rate
    from paceline.train.checkpoint import read_checkpoint, restore, write_checkpoint

    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    use_training_kernels()
    corpus = read_corpus(args.work / "tokens")
    vocab_size = json.loads((args.work / "tokenizer" / "tokenizer.json").read_text())
    vocab_size = len(vocab_size["model"]["vocab"]) + 2
    vocab_size = -(-vocab_size // 64) * 64
    config = build_config(vocab_size=vocab_size, tiny=args.tiny)
    pocket = Pocket(config, seed=args.seed).to(args.device)
    sizes = [sum(p.numel() for p in part.parameters()) for part in (pocket, pocket.mtp)]
    print(f"{sizes[0]:,} parameters, of them {sizes[1]:,} in the MTP head")
    matrices = [p for p in pocket.parameters() if p.ndim >= 2]
    others = [p for p in pocket.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=args.device == "cuda",
    )

    def one(rows: int, length: int, source: Rows | None = None) -> tuple[Any, Any]:
        """Forward and backward of one step; no source: a trial."""
        ids, learnt = (source or Rows(corpus, seed=99)).batch(rows, length)
        ids = torch.from_numpy(ids).to(args.device, non_blocking=True)
        learnt = torch.from_numpy(learnt).to(args.device, non_blocking=True)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss, losses, right = joint_loss(pocket, ids, learnt, step_weights=STEP_WEIGHTS)
        loss.backward()
        if source is None:
            optimizer.zero_grad(set_to_none=True)
        return losses, right

    path, steps_path = args.work / "checkpoint", args.work / "num_steps.json"
    run = {"seed": args.seed, "lr": args.lr, "tokens_per_step": args.tokens_per_step}
    first, place, history = 1, {"epoch": 0, "place": 0}, []
    if args.resume:
        checkpoint = read_checkpoint(path, run=run)
        restore(checkpoint, pocket, optimizer)
        first, place = checkpoint.step + 1, checkpoint.totals["place"]
        history = checkpoint.totals["history"]
    else:
        shutil.rmtree(path, ignore_errors=True)
        write_json(steps_path, {"num_steps": args.num_steps or measure_steps(args, one)})
    num_steps = json.loads(steps_path.read_text())["num_steps"]
    print(f"{num_steps} steps of {args.tokens_per_step:,} tokens", flush=True)
    optim = Optim(
        lr=args.lr,
        warmup_steps=max(1, min(100, num_steps // 10)),
        num_steps=num_steps,
        tokens_per_batch=args.tokens_per_step,
        max_length=args.max_row,
    )
    source = Rows(corpus, seed=args.seed, **place)
    seen, clock = 0, time.monotonic()
    stop_at = began + 60.0 * args.call_minutes
    step = first - 1
    for step in range(first, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, num_steps=num_steps)
        rows, length = shape_of_step(args, step, num_steps)
        losses, right = one(rows, length, source)
        torch.nn.utils.clip_grad_norm_(pocket.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += rows * length
        if step % max(1, num_steps // 80) == 0 or step == num_steps:
            history.append(
                {
                    "step": step,
                    "row": length,
                    "losses": [round(float(v), 4) for v in losses],
                    "accuracy": [round(float(v), 4) for v in right],
                    "tokens_per_s": round(seen / (time.monotonic() - clock)),
                    "epoch": source.epoch,
                }
            )
            print(json.dumps(history[-1]), flush=True)
            if not all(v == v for v in history[-1]["losses"]):
                raise SystemExit("the loss is not a number: lower --lr")
        late = time.monotonic() > stop_at
        if late or step == num_steps or step % args.checkpoint_steps == 0:
            write_checkpoint(
                path,
                step=step,
                run=run,
                totals={
                    "place": {"epoch": source.epoch, "place": source.place},
                    "history": history,
                },
                module=pocket,
                optimizer=optimizer,
            )
        if late:
            break
    return {
        "finished": step == num_steps,
        "step": step,
        "num_steps": num_steps,
        "num_parameters": sizes[0],
        "mtp_parameters": sizes[1],
        "seconds": round(time.monotonic() - began, 1),
        "history": history,
    }


def export(args: argparse.Namespace) -> dict[str, Any]:
    """Stage 4: the folder that transformers and vLLM load."""
    from pocket import Pocket, build_config, export_weights
    from safetensors.torch import load_file

    weights = load_file(str(args.work / "checkpoint" / "weights.safetensors"))
    config = build_config(vocab_size=len(weights["model.embed_tokens.weight"]), tiny=args.tiny)
    pocket = Pocket(config, seed=0)
    pocket.load_state_dict(weights)
    folder = args.out / "pocket"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(args.work / "tokenizer", folder)
    export_weights(pocket, folder)
    log = json.loads((args.work / "log.json").read_text())
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False},
    )
    card = (HERE / "MODEL_CARD.md").read_text(encoding="utf-8")
    for key, value in {
        "rows": log["answer"]["rows"],
        "tokens": log["tokens"]["tokens"],
        "steps": log["train"]["num_steps"],
        "parameters": log["train"]["num_parameters"],
    }.items():
        card = card.replace("{" + key + "}", f"{value:,}")
    (folder / "README.md").write_text(card, encoding="utf-8")
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    write_json(args.out / "provenance.json", build_provenance(seed=args.seed))
    return {"bytes": sizes, "total_bytes": sum(sizes.values())}


STAGES = {
    "answer": answer,
    "tokens": tokens,
    "train": train,
    "export": export,
    "plain": plain,
    "eval": evaluate,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--teacher", required=True, help="a folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/pocket"))
    parser.add_argument("--stage", choices=[*STAGES, "all"], default="all")
    parser.add_argument("--minutes", type=float, default=5.0, help="of answering, of training")
    parser.add_argument("--call-minutes", type=float, default=9.0, help="train: stop a call after")
    parser.add_argument("--resume", action="store_true", help="train: go on from the checkpoint")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--num-prompts", type=int, default=60_000)
    parser.add_argument("--answers-per-prompt", type=int, default=6)
    parser.add_argument("--max-prompt", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=320, help="of an answer")
    parser.add_argument("--wave", type=int, default=4096, help="answers sampled together")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--tokenizer-bytes", type=int, default=40_000_000)
    parser.add_argument("--think-share", type=float, default=0.25)
    parser.add_argument("--num-steps", type=int, help="in place of measuring and --minutes")
    parser.add_argument("--tokens-per-step", type=int, default=65_536)
    parser.add_argument("--max-row", type=int, default=16_384)
    parser.add_argument("--long-share", type=float, default=0.125)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint-steps", type=int, default=500)
    parser.add_argument("--num-eval", type=int, default=96)
    parser.add_argument("--eval-tokens", type=int, default=128)
    parser.add_argument("--k", type=int, default=3, help="drafted tokens a step")
    parser.add_argument("--thinking", choices=("on", "off"), default="off")
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few answers and steps on a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.device, args.eager, args.num_seqs = "cpu", True, 8
        args.num_prompts, args.answers_per_prompt, args.wave, args.max_tokens = 24, 1, 8, 48
        args.vocab_size, args.num_steps = 512, args.num_steps or 60
        args.tokens_per_step, args.max_row, args.num_eval, args.eval_tokens = 1024, 512, 8, 48
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "all":  # one process a stage: a closed engine does not give back all memory
        for stage in STAGES:
            subprocess.run([sys.executable, *sys.argv, "--stage", stage], check=True)
        return
    log_path = args.work / "log.json"
    log = json.loads(log_path.read_text()) if log_path.exists() else {}
    log[args.stage] = STAGES[args.stage](args)
    write_json(log_path, log)
    write_json(args.out / "log.json", log)
    summary = {key: value for key, value in log[args.stage].items() if key != "history"}
    print(f"{args.stage}: {json.dumps(summary)}")


if __name__ == "__main__":
    main()
