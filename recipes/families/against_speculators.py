"""EAGLE-3 for smollm2 by Paceline and by speculators 0.9.0: same rows, states, sizes, minutes.

    python recipes/families/against_speculators.py --work WORK --site FOLDER --minutes 9.5
    python recipes/families/against_speculators.py --work WORK --site FOLDER --tiny    a CPU, 2 min

FOLDER holds speculators==0.9.0, hs-connectors and datasets (`pip install --no-deps --target`), for
the path of this interpreter; or --speculators names the interpreter of an environment of its own.
Stages, each kept in WORK: answer prompts; store the target's states once, and give both trainers
the same numbers; train each for --train-minutes from those files (number of steps by a trial; its
own default learning rate each, or --lr); serve both, theirs as the baseline, prompt by prompt in
turn, which gives the ratio of acceptance lengths with its interval. At the end of --minutes the
same command goes on with the stage that is missing. Writes WORK/against_speculators.json.

Both drafts: one layer of the target's sizes, taps 2, 15, 27, a vocabulary of their own of --vocab
tokens with its output matrix trained, K = 3 steps unrolled: the same trained matrices. Theirs norms
its taps and hands its normed output on (its own defaults), so it has 1,728 numbers more.

Seen with --tiny on two cores, 2026-12-01: every stage ends; 812 tokens/s there against 4,047 here
(27 and 6 steps of 512 tokens: no result). Their draft is served, and the trainer's own forward
takes 359 of its 359 served steps. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from speculators_data import num_validated, store_for_both

from paceline.data import read_rows
from paceline.draft import read_draft
from paceline.records import build_provenance, read_json, read_jsonl, write_json
from paceline.target import read_target
from paceline.train import build_recipe, train_draft

HERE = Path(__file__).resolve().parent
LAYERS, K = (2, 15, 27), 3
TARGET = "smollm2"


def paceline(*words: object) -> None:
    _run(sys.executable, "-c", "from paceline.cli import main; main()", *words)


def _run(*words: object, env: dict[str, str] | None = None) -> None:
    """Stopped itself, it stops the program by Ctrl-C, which ends the engines of its own."""
    print("$", " ".join(map(str, words[:12])), flush=True)
    process = subprocess.Popen([str(word) for word in words], env=env)
    try:
        code = process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if code:
        sys.exit(f"it ended with {code}; its words are above")


# stages


def answer(args: argparse.Namespace) -> dict[str, Any]:
    paceline(
        *("data", "answer", "--prompts", f"train:{args.num_prompts}", "--target", TARGET),
        *("--out", args.work / "data", "--max-tokens", args.answer_tokens),
        *("--concurrency", args.concurrency, "--device", args.device),
    )
    return dict(read_json(args.work / "data" / "data.json")["counts"])


def states(args: argparse.Namespace) -> dict[str, Any]:
    return store_for_both(
        args.work,
        read_target(TARGET),
        layers=LAYERS,
        vocab=args.vocab,
        max_length=args.max_length,
        device=args.device,
    )


# training: steps by a trial, then the minutes


def fill_minutes(
    args: argparse.Namespace, run: Callable[[int, Path], list[dict[str, Any]]], at: Path
) -> int:
    """Steps that fill --train-minutes, by the later half of a trial."""
    trial = at.with_name(at.name + "-trial")
    shutil.rmtree(trial, ignore_errors=True)
    steps = run(args.trial_steps, trial)
    half = len(steps) // 2
    seconds: float = (steps[-1]["ended"] - steps[half]["ended"]) / (len(steps) - 1 - half)
    shutil.rmtree(trial, ignore_errors=True)
    minutes: float = args.train_minutes
    return max(len(steps), int(60.0 * minutes / seconds))


def speed(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Real tokens a second, the first tenth of the steps (warm-up, compilation) left out."""
    kept = steps[len(steps) // 10 :]
    seconds = kept[-1]["ended"] - kept[0]["ended"]
    return {
        "num_steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps),
        "wall_s": steps[-1]["ended"] - steps[0]["ended"],
        "tokens_per_s": sum(step["tokens"] for step in kept[1:]) / seconds,
    }


def ours(args: argparse.Namespace) -> dict[str, Any]:
    target = read_target(TARGET)
    lengths = {row.row_id: len(row.input_ids) for row in read_rows(args.work / "data")}

    def run(num_steps: int, out: Path) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []
        optim: dict[str, Any] = {
            "lr": args.lr or 1e-3,
            "num_steps": num_steps,
            "warmup_steps": num_steps // 25,
            "tokens_per_batch": args.tokens_per_batch,
            "max_length": args.max_length,
            "grad_clip": 0.5,
            "checkpoint_steps": 500,
            "feature_cache_bytes": args.cache_bytes,
        }
        shape = {"num_speculative_tokens": K, "aux_layer_ids": list(LAYERS)}
        shape["draft_vocab_size"] = args.vocab
        recipe = build_recipe(
            {
                "family": "eagle3",
                "seed": 0,
                "draft": shape,
                "optim": optim,
                "loss": {"soft": 1.0, "hard": 0.2, "position_weights": [1.0, 0.8, 0.64]},
            }
        )
        for left in (out, out.with_name(out.name + ".checkpoint")):
            shutil.rmtree(left, ignore_errors=True)
        train_draft(
            recipe,
            target=target,
            data_dir=args.work / "data",
            out_dir=out,
            device=args.device,
            states_dir=args.work / "states",
            on_progress=lambda p: steps.append(
                {
                    "step": p.step,
                    "loss": p.loss,
                    "tokens": sum(min(lengths[i], args.max_length) for i in p.row_ids),
                    "ended": time.monotonic(),
                }
            ),
        )
        return steps

    out = args.work / "ours"
    return speed(run(fill_minutes(args, run, out), out))


def theirs(args: argparse.Namespace) -> dict[str, Any]:
    target, num_rows = read_target(TARGET), len(read_rows(args.work / "data"))
    share = (num_rows + 0.5) / (num_rows + num_validated(num_rows))
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if args.site:
        paths = [str(args.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(paths)

    def run(num_steps: int, out: Path) -> list[dict[str, Any]]:
        shutil.rmtree(out, ignore_errors=True)
        notes = out.with_name(out.name + ".jsonl")
        notes.unlink(missing_ok=True)
        on_cpu = args.device == "cpu"
        words: list[object] = [args.speculators, HERE / "speculators_run.py", notes]
        words += ["--on-cpu"] if on_cpu else []
        words += ["--speculator-type", "eagle3", "--verifier-name-or-path", target.path]
        words += ["--data-path", args.work / "speculators", "--on-missing", "raise"]
        words += ["--save-path", out, "--log-dir", out.with_name(out.name + ".logs")]
        words += ["--draft-vocab-size", args.vocab, "--target-layer-ids", *LAYERS]
        words += ["--total-seq-len", args.tokens_per_batch, "--ttt-steps", K]
        words += [
            "--train-data-ratio",
            share,
            "--full-attention-indices",
            0,
            "--max-steps",
            num_steps,
            "--epochs",
            "1000",
        ]
        words += ["--scheduler-type", "cosine", "--scheduler-warmup-steps", num_steps // 25]
        words += ["--num-workers", 0 if on_cpu else args.num_workers, "--seed", "0"]
        words += ["--checkpoint-freq", "1000", "--no-resume-from-checkpoint"]
        words += ["--draft-attn-impl", "eager"] if on_cpu else []
        words += ["--loss-implementation", "eager"] if on_cpu else []
        words += ["--lr", args.lr] if args.lr else []
        _run(*words, env=env)
        return list(read_jsonl(notes))

    out = args.work / "theirs"
    return speed(run(fill_minutes(args, run, out), out))


# served


def find_theirs(folder: Path) -> Path:
    """The last checkpoint that speculators wrote."""
    found = sorted(folder.rglob("config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        sys.exit(f"{folder}: speculators wrote no draft")
    return found[-1].parent


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Theirs is the baseline: the ratio of acceptance lengths is ours to theirs, paired."""
    theirs_dir, out = find_theirs(args.work / "theirs"), args.work / "run"
    paceline(
        *("eval", args.work / "ours", "--baseline", theirs_dir, "--target", TARGET),
        *("--rules", "demo", "--prompts", args.prompts, "--max-tokens", args.max_tokens),
        *("--out", out, "--device", args.device, "--k", K, "--no-plain"),
    )
    result = read_json(out / "result.json")
    arms, drafts = result["arms"], {}
    for name, path in (("ours", args.work / "ours"), ("theirs", theirs_dir)):
        draft = read_draft(path)
        shared = [t.num_elements for n, t in draft.tensors.items() if n == "embed_tokens.weight"]
        drafts[name] = {
            "trained_parameters": draft.num_parameters - sum(shared),
            "parameters": draft.num_parameters,
            "bytes": draft.files_bytes,
            "memory_bytes": result["arms"][_ARMS[name]]["memory"]["total_bytes"],
        }
    return {
        "tau": {
            "ours": arms["candidate"]["tau"]["value"],
            "theirs": arms["baseline"]["tau"]["value"],
        },
        "ratio": result["ratios"]["tau"],
        "tensors": drafts,
        "dtypes": {name: count_dtypes(args, name, theirs_dir) for name in drafts},
        "replay": result.get("replay"),
    }


def count_dtypes(args: argparse.Namespace, name: str, theirs_dir: Path) -> dict[str, int]:
    from paceline.safetensors_header import read_header

    folder = args.work / "ours" if name == "ours" else theirs_dir
    found: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        for info in read_header(path).tensors.values():
            found[info.dtype] += 1
    return dict(found)


_ARMS = {"ours": "candidate", "theirs": "baseline"}
STAGES = {"answer": answer, "states": states, "ours": ours, "theirs": theirs, "serve": serve}


def foresee_seconds(args: argparse.Namespace) -> dict[str, float]:
    """What each stage takes on one H200; only to begin none that the minutes cannot hold."""
    if args.tiny:
        return dict.fromkeys(STAGES, 60.0)
    tokens, minutes = args.num_prompts * args.answer_tokens, args.train_minutes
    return {
        "answer": 60.0 + tokens / 15_000,
        "states": 20.0 + 2.0 * tokens / 60_000,
        "ours": 30.0 + 60.0 * minutes,
        "theirs": 90.0 + 60.0 * minutes,
        "serve": 180.0,
    }


class TimeUpError(Exception):
    """The minutes of this run are over; finished stages are kept."""


@contextlib.contextmanager
def minutes_left(minutes: float | None) -> Iterator[Callable[[], float]]:
    """Seconds that are left; at their end what runs inside is stopped by a TimeUpError."""
    if minutes is None:
        yield lambda: float("inf")
        return

    def stop(*_: object) -> None:
        raise TimeUpError

    end = time.monotonic() + 60.0 * minutes
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60.0 * minutes)
    try:
        yield lambda: end - time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def read_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("runs/against-speculators"))
    parser.add_argument("--speculators", default=sys.executable, help="its python")
    parser.add_argument("--site", type=Path, help="a folder that holds it, for this python")
    parser.add_argument("--stage", choices=[*STAGES], action="append", help="again; one or more")
    parser.add_argument("--minutes", type=float, help="stop cleanly after that")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--train-minutes", type=float, default=1.7)
    parser.add_argument("--trial-steps", type=int, default=60)
    parser.add_argument("--lr", type=float, help="for both; else each has its own default")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--num-prompts", type=int, default=9_000)
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--tokens-per-batch", type=int, default=16_384)
    parser.add_argument("--num-workers", type=int, default=12)
    parser.add_argument("--cache-bytes", type=int, default=40 * 2**30)
    parser.add_argument("--prompts", default="held-out")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to try it: no result")
    args = parser.parse_args()
    if args.tiny:
        args.device, args.train_minutes, args.vocab = "cpu", 0.05, 1024
        args.num_prompts, args.answer_tokens, args.concurrency = 24, 24, 8
        args.max_length, args.tokens_per_batch, args.max_tokens = 96, 512, 16
        args.prompts, args.cache_bytes, args.trial_steps = "demo-eval", 2**30, 6
    return args


def run_stages(args: argparse.Namespace, log: dict[str, Any], path: Path) -> str | None:
    """Runs what is not in the log yet; why it stopped before the end, or None."""
    foreseen = foresee_seconds(args)
    with minutes_left(args.minutes) as left:
        for stage in args.stage or STAGES:
            if stage in log and not args.stage:
                continue
            if left() < foreseen[stage]:
                return f"{stage} takes about {foreseen[stage]:.0f} s, {left():.0f} are left"
            began = time.monotonic()
            try:
                found = STAGES[stage](args)
            except TimeUpError:
                return f"the minutes ended in stage {stage}"
            log[stage] = {**found, "stage_s": round(time.monotonic() - began, 1)}
            log["provenance"] = build_provenance(seed=0)
            write_json(path, log)
            print(f"{stage}: {json.dumps(log[stage])[:400]}", flush=True)
    return None


def main() -> None:
    args = read_args()
    args.work.mkdir(parents=True, exist_ok=True)
    path = args.work / "against_speculators.json"
    log: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    stopped = run_stages(args, log, path)
    if {"ours", "theirs", "serve"} <= set(log):
        speeds = [log[name]["tokens_per_s"] for name in ("ours", "theirs")]
        times = speeds[0] / speeds[1]
        print(f"training: {speeds[0]:,.0f} against {speeds[1]:,.0f} tokens/s: {times:.2f}")
        ratio = log["serve"]["ratio"]
        print(f"acceptance length: {ratio['value']:.3f} ({ratio['low']} to {ratio['high']})")
    if stopped:
        print(f"stopped: {stopped}; the same command goes on", flush=True)


if __name__ == "__main__":
    main()
