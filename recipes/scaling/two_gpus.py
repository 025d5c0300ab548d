"""One GPU against two of one host: answers, training, resume both ways, acceptance. No network.

    python recipes/scaling/two_gpus.py --smollm2 smollm2 --pocket pocket --out OUT

Writes OUT/two_gpus.json after every stage and prints a table; about nine minutes in all. Stages
(`--stage answers`, `train`, `serve`; all three when left out) hand over in --work, so that a run
that was cut off goes on with the next one. `--data FOLDER` takes rows of smollm2's own answers in
place of the stage `answers`. Small enough to try on two CPU cores, with gloo in NCCL's place:

    python recipes/scaling/two_gpus.py --smollm2 smollm2 --pocket pocket --out OUT --tiny

Training: a step is one batch of twice the recipe's tokens, in parts of the recipe's; one GPU
computes two parts a step, two GPUs one each. So both have an equal batch a GPU, and the same steps.
Answers: one engine a GPU, every engine asked for its share of the same prompts, clocks started when
all are ready. NVLink multicast stays off: where GPUs are shared, it can take them from others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
os.environ.update(NO_MULTICAST)

from paceline.data import (  # noqa: E402
    PromptSet,
    answer_prompts,
    open_tokenizer,
    plain_thinking,
    read_prompts,
    read_rows,
    rows_from_conversations,
)
from paceline.endpoint import Sampling  # noqa: E402
from paceline.records import build_provenance, write_json  # noqa: E402
from paceline.target import read_target  # noqa: E402
from paceline.train import Recipe, read_recipe, train_draft  # noqa: E402

HERE = Path(__file__).resolve().parent
RECIPES = {
    "smollm2": HERE.parent / "smollm2-eagle3" / "recipe.toml",
    "pocket": HERE.parent / "pocket" / "mtp.toml",
}
RUNS = {  # name: (GPUs, the run whose checkpoint at half time it goes on from)
    "one": (1, None),
    "two": (2, None),
    "one-then-two": (2, "one"),
    "two-then-one": (1, "two"),
}


# answers: one engine a GPU


def answers(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for num in (1, 2):
        gate = args.work / f"answers-{num}"
        shutil.rmtree(gate, ignore_errors=True)
        gate.mkdir(parents=True)
        began = time.monotonic()
        workers = [
            start(args, ["--worker", "answers", "--of", num, "--index", i], gpu=i)
            for i in range(num)
        ]
        finish(workers)
        done = [json.loads((gate / f"done-{i}.json").read_text()) for i in range(num)]
        seconds = max(d["ended"] for d in done) - min(d["began"] for d in done)
        tokens = sum(d["tokens"] for d in done)
        found[str(num)] = {
            "answers": sum(d["answers"] for d in done),
            "tokens": tokens,
            "seconds": round(seconds, 2),
            "tokens_per_s": round(tokens / seconds, 1),
            "each_engine_tokens_per_s": [
                round(d["tokens"] / (d["ended"] - d["began"]), 1) for d in done
            ],
            "start_s": round(min(d["began"] for d in done) - began, 1),
        }
    return found


def answer_worker(args: argparse.Namespace) -> None:
    """One engine: every `of`-th prompt; waits at the gate until all engines are ready."""
    from paceline.serve import build_plan
    from paceline.serve import start as start_engine

    gate, target = args.work / f"answers-{args.of}", args.smollm2
    prompts = read_prompts(f"train:{args.num_prompts}")
    held_out = read_prompts("held-out")
    share = own_share(prompts, args.index, args.of)
    plan = build_plan(
        target, device=args.device, max_num_seqs=args.num_seqs, num_threads=args.threads
    )
    endpoint = start_engine(plan, log_path=gate / f"engine-{args.index}.log")
    try:
        warm = answer_prompts(
            own_share(held_out, args.index, args.of),
            endpoint,
            target,
            out_dir=gate / f"held-out-{args.index}",
            sampling=Sampling(max_tokens=args.max_tokens),
            concurrency=args.num_seqs,
        )
        print(f"engine {args.index} of {args.of}: ready, {warm['counts']['rows']} answers held out")
        (gate / f"ready-{args.index}").touch()
        while not all((gate / f"ready-{i}").exists() for i in range(args.of)):
            time.sleep(0.05)
        began = time.monotonic()
        record = answer_prompts(
            share,
            endpoint,
            target,
            out_dir=gate / f"data-{args.index}",
            sampling=Sampling(max_tokens=args.max_tokens),
            concurrency=args.num_seqs,
        )
        ended = time.monotonic()
    finally:
        endpoint.close()
    counts = record["counts"]
    write_json(
        gate / f"done-{args.index}.json",
        {
            "began": began,
            "ended": ended,
            "answers": counts["rows"],
            "tokens": counts["supervised_tokens"],
        },
    )


def own_share(prompts: PromptSet, index: int, of: int) -> PromptSet:
    return dataclasses.replace(prompts, prompts=prompts.prompts[index::of])


# training: one process, or torchrun with two


def train(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in args.only or RECIPES:
        prepare_rows(args, name)
        runs = {}
        for run, (num, source) in RUNS.items():
            out = args.work / "drafts" / f"{name}-{run}"
            for left in (out, beside(out, ".checkpoint")):
                shutil.rmtree(left, ignore_errors=True)
            if source is not None:
                kept = beside(args.work / "drafts" / f"{name}-{source}", ".half")
                shutil.copytree(kept, beside(out, ".checkpoint"))
            words = ["--worker", "train", "--family", name, "--leg", run]
            began = time.monotonic()
            finish([start(args, words, num=num)])
            runs[run] = {
                **json.loads(beside(out, ".steps.json").read_text()),
                "wall_s": round(time.monotonic() - began, 1),
                "gpu_bytes": [
                    json.loads(beside(out, f".rank{rank}.json").read_text())["bytes"]
                    for rank in range(num)
                ],
            }
            print(f"{name}: {run}: {runs[run]['wall_s']} s", flush=True)
        found[name] = {"runs": runs, **compare(runs)}
    return found


def prepare_rows(args: argparse.Namespace, name: str) -> None:
    """smollm2's answers as rows of smollm2; the same texts as rows of pocket."""
    folder = args.work / f"data-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    source = args.data or args.work / "answers-1" / "data-0"
    if name == "smollm2":
        shutil.copytree(source, folder)
        return
    tokenizer = open_tokenizer(args.smollm2)
    asked = {p.prompt_id: p for p in read_prompts(f"train:{max(16_000, args.num_prompts)}").prompts}
    texts = args.work / "conversations.jsonl"
    with open(texts, "w", encoding="utf-8") as file:
        for row in read_rows(source):
            start_at, end = row.loss_spans[-1]
            words = tokenizer.decode(row.input_ids[start_at : end - 1]).strip()
            if row.row_id in asked and words:
                said = [*asked[row.row_id].messages, {"role": "assistant", "content": words}]
                line = {"id": row.row_id, "category": row.category, "messages": said}
                file.write(json.dumps(line) + "\n")
    rows_from_conversations(
        read_prompts(str(texts)), args.pocket, folder, thinking=plain_thinking(args.pocket)
    )


def scaled(args: argparse.Namespace, name: str) -> Recipe:
    """The recipe with twice its tokens a step, computed in parts of its own size."""
    recipe = read_recipe(RECIPES[name])
    part = 512 if args.tiny else recipe.optim.tokens_per_batch
    optim = dataclasses.replace(
        recipe.optim,
        tokens_per_batch=2 * part,
        tokens_per_part=part,
        max_length=min(recipe.optim.max_length, part),
        num_steps=args.num_steps,
        num_epochs=None,
        warmup_steps=args.num_steps // 5,
        checkpoint_steps=args.num_steps // 2,
    )
    return dataclasses.replace(recipe, optim=optim)


def train_worker(args: argparse.Namespace) -> None:
    """One process of a run; the first one writes losses and times, each one its memory."""
    import torch

    name, target = args.family, getattr(args, args.family)
    recipe, out = scaled(args, name), args.work / "drafts" / f"{name}-{args.leg}"
    lengths = {row.row_id: len(row.input_ids) for row in read_rows(args.work / f"data-{name}")}
    steps: list[dict[str, Any]] = []

    def note(progress: Any) -> None:
        length = recipe.optim.max_length
        steps.append(
            {
                "step": progress.step,
                "epoch": progress.epoch,
                "loss": progress.loss,
                "tokens": sum(min(lengths[i], length) for i in progress.row_ids),
                "ended": time.monotonic(),
            }
        )
        half = beside(out, ".half")
        if progress.step == args.num_steps // 2 and not half.exists():
            shutil.copytree(beside(out, ".checkpoint"), half)

    if args.leg in ("one", "two"):
        shutil.rmtree(beside(out, ".half"), ignore_errors=True)
    draft = train_draft(
        recipe,
        target=target,
        data_dir=args.work / f"data-{name}",
        out_dir=out,
        device=args.device,
        resume=args.leg not in ("one", "two"),
        on_progress=note,
    )
    cuda = args.device == "cuda"
    used = torch.cuda.max_memory_allocated() if cuda else peak_bytes()
    rank = int(os.environ.get("RANK", "0"))
    write_json(beside(out, f".rank{rank}.json"), {"bytes": used})
    if rank == 0:
        summary = {"parameters": draft.num_parameters, "steps": steps, **speeds(steps)}
        write_json(beside(out, ".steps.json"), summary)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def speeds(steps: list[dict[str, Any]]) -> dict[str, float | None]:
    """Real tokens a second, by the steps' own ends: in the first epoch the target reads every row;
    later ones train on what is kept of that."""

    def rate(some: list[dict[str, Any]]) -> float | None:
        if len(some) < 2:
            return None
        seconds = some[-1]["ended"] - some[0]["ended"]
        return round(sum(s["tokens"] for s in some[1:]) / seconds, 1)

    first = steps[0]["epoch"]
    return {
        "first_epoch_tokens_per_s": rate([s for s in steps if s["epoch"] == first]),
        "later_tokens_per_s": rate([s for s in steps if s["epoch"] > first]),
    }


def compare(runs: dict[str, Any]) -> dict[str, Any]:
    """Losses of each run against one GPU's, step by step, and what speeds and traffic come to."""
    losses = {run: {s["step"]: s["loss"] for s in r["steps"]} for run, r in runs.items()}
    worst = {
        run: max(abs(loss / losses["one"][step] - 1.0) for step, loss in own.items())
        for run, own in losses.items()
        if run != "one"
    }
    kinds = ("first_epoch_tokens_per_s", "later_tokens_per_s")
    rates = [(runs["two"][kind], runs["one"][kind]) for kind in kinds]
    size = 4 * runs["one"]["parameters"]
    return {
        "largest_relative_difference_of_loss": worst,
        "speed_up": {
            kind: round(two / one, 3) if two and one else None
            for kind, (two, one) in zip(kinds, rates, strict=True)
        },
        # a GPU sends half of all weights once and half of all gradients once, in float32
        "bytes_sent_a_step_by_each_gpu": size,
    }


# acceptance: what was trained, served on the same prompts


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """What one GPU and two trained, each served by vLLM on the same prompts; a target a GPU."""
    workers = [
        start(args, ["--worker", "serve", "--family", name], gpu=number)
        for number, name in enumerate(args.only or RECIPES)
    ]
    finish(workers)
    return {
        name: json.loads((args.work / f"serve-{name}.json").read_text())
        for name in args.only or RECIPES
    }


def serve_worker(args: argparse.Namespace) -> None:
    from served_acceptance import compare_lengths, measure_lengths

    name, target = args.family, getattr(args, args.family)
    one, two = (
        measure_lengths(
            target,
            args.work / "drafts" / f"{name}-{run}",
            device=args.device,
            threads=args.threads,
            num_prompts=args.num_served,
            max_tokens=args.max_tokens // 4,
        )
        for run in ("one", "two")
    )
    write_json(args.work / f"serve-{name}.json", compare_lengths(one, two))


# processes


def start(
    args: argparse.Namespace, words: list[Any], *, gpu: int | None = None, num: int = 1
) -> subprocess.Popen[bytes]:
    """This script again as a worker, on one GPU of its own or in `num` processes."""
    env = {**os.environ, **NO_MULTICAST}
    if gpu is not None and args.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if num == 1 and gpu is None and args.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = "0"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    through = [*torchrun, "--nproc-per-node", num] if num > 1 else []
    command = [sys.executable, *through, __file__, *sys.argv[1:], *words]
    return subprocess.Popen([str(word) for word in command], env=env)


def finish(workers: list[subprocess.Popen[bytes]]) -> None:
    """Waits for all; the first that fails ends the others and this script."""
    try:
        while any(worker.poll() is None for worker in workers):
            if any(worker.poll() for worker in workers):
                break
            time.sleep(0.1)
        codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
                worker.wait()
    if any(codes):
        sys.exit(f"a worker ended with {next(code for code in codes if code)}")


def beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def print_table(log: dict[str, Any]) -> None:
    rows: list[tuple[str, str, str, str]] = []
    if "answers" in log:
        one, two = (log["answers"][n]["tokens_per_s"] for n in ("1", "2"))
        rows.append(("answers, tokens/s", f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"))
    for name, part in log.get("train", {}).items():
        runs = part["runs"]
        for label, kind in (
            ("target and draft", "first_epoch_tokens_per_s"),
            ("kept features", "later_tokens_per_s"),
        ):
            one, two = runs["one"][kind], runs["two"][kind]
            if one and two:
                numbers = (f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}")
                rows.append((f"{name}, {label}, tokens/s", *numbers))
        memory = [max(runs[run]["gpu_bytes"]) / 2**30 for run in ("one", "two")]
        rows.append((f"{name}, memory a GPU, GiB", f"{memory[0]:.2f}", f"{memory[1]:.2f}", ""))
        for run, worst in part["largest_relative_difference_of_loss"].items():
            rows.append((f"{name}, {run}: loss off by at most", "", f"{worst:.1e}", ""))
    for name, part in log.get("serve", {}).items():
        one, two = (f"{length:.3f}" for length in part["acceptance_length"])
        verdict = {True: "tie", False: "differs", None: "too few"}[part["within_noise"]]
        rows.append((f"{name}, served length", one, two, verdict))
    print(f"{'':44}{'1 GPU':>10}{'2 GPUs':>12}{'times':>8}")
    for label, one, two, times in rows:
        print(f"{label:44}{one:>10}{two:>12}{times:>8}")


def read_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smollm2", required=True, type=read_target, help="folder or name")
    parser.add_argument("--pocket", required=True, type=read_target, help="folder or name")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/two-gpus"))
    parser.add_argument("--data", type=Path, help="rows of smollm2, in place of stage answers")
    parser.add_argument("--stage", choices=[*STAGES], action="append", help="one or more; all")
    parser.add_argument("--only", choices=[*RECIPES], action="append", help="one target; both")
    parser.add_argument("--num-prompts", type=int, default=4000)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--num-seqs", type=int, default=512, help="in flight in one engine")
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--num-served", type=int, default=96)
    parser.add_argument("--tiny", action="store_true", help="a few prompts and steps on a CPU")
    parser.add_argument("--worker", choices=[*WORKERS], help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--family", choices=[*RECIPES], help=argparse.SUPPRESS)
    parser.add_argument("--leg", choices=[*RUNS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device, args.threads = ("cpu", 1) if args.tiny else ("cuda", None)
    if args.tiny:
        args.num_prompts, args.max_tokens, args.num_seqs = 24, 24, 8
        args.num_steps, args.num_served = 12, 4
    return args


STAGES = {"answers": answers, "train": train, "serve": serve}
WORKERS = {
    "answers": answer_worker,
    "train": train_worker,
    "serve": serve_worker,
}


def main() -> None:
    args = read_args()
    if args.worker:
        WORKERS[args.worker](args)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    path = args.work / "two_gpus.json"
    log = json.loads(path.read_text()) if path.exists() else {}
    for stage in args.stage or STAGES:
        if stage == "answers" and args.data:
            continue
        began = time.monotonic()
        log[stage] = STAGES[stage](args)
        log.setdefault("seconds", {})[stage] = round(time.monotonic() - began, 1)
        log["provenance"] = build_provenance()
        for folder in (args.work, args.out):
            write_json(folder / "two_gpus.json", log)
        print(f"{stage}: {log['seconds'][stage]} s", flush=True)
    print_table(log)


if __name__ == "__main__":
    main()
