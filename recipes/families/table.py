"""Every family on both targets, plain and quantised, from prompts to docs/results/families.md.

    python recipes/families/table.py --work WORK --minutes 9       on one H200, again and again
    python recipes/families/table.py --work WORK --device cpu      the same drafts on two cores
    python recipes/families/table.py --work WORK --tiny            on a laptop, no result
    python recipes/families/table.py --render                      the page from its records

Stages: answer the training prompts (once a target), train for --train-minutes, quantise, validate,
forecast M, measure. Each finished stage lies in WORK and is never done again, so the same command
goes on where it stopped; at the end of --minutes whatever runs is asked to stop and keeps its
checkpoint or the answers it has. `--draft pocket/medusa=PLACE` takes a draft that is there already
(a folder or a bundled name) in place of training one: its own record says how it was made. What a
device cannot serve becomes a row with vLLM's reason. The record goes to
docs/results/families/MACHINE.json, the page beside it. No network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from cells import FORMAT, foresee_bytes, length_by_category
from goals import FAMILIES, GOALS, NOT_QUANTISED, RECIPES
from page import render_table

from paceline.data import read_prompts
from paceline.draft import Draft, read_draft, resolve_draft
from paceline.errors import PacelineError, PlanError
from paceline.records import build_provenance, read_json, write_json
from paceline.rules import read_rules
from paceline.serve import build_plan, check_plan
from paceline.target import TargetFacts, read_target
from paceline.validate import validate_draft

HERE = Path(__file__).resolve().parent
RESULTS = RECIPES.parent / "docs" / "results"
SPEEDS = RECIPES.parent / "bench" / "results"
_KEPT = ("value", "low", "high", "terms")  # of a score


class TimeUpError(Exception):
    """The minutes of this run are over; what is done is kept."""


class Runner:
    """Runs stages as processes until the time is up. State: when that is."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60.0 * minutes

    def run(self, *words: object) -> tuple[int, str]:
        """(exit code, what it said); a process that the time cuts short ends as by Ctrl-C."""
        if self._end is not None and time.monotonic() >= self._end:
            raise TimeUpError
        print("$", " ".join(map(str, words[:9])), flush=True)
        process = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        left = None if self._end is None else max(1.0, self._end - time.monotonic())
        try:
            said, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            _stop(process)
            raise TimeUpError from None
        except KeyboardInterrupt:
            _stop(process)
            raise
        return process.returncode, said


def _stop(process: subprocess.Popen[str]) -> None:
    """Ctrl-C for the process alone, which ends those that it started."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def paceline(*words: object) -> tuple[object, ...]:
    return (sys.executable, "-c", "from paceline.cli import main; main()", *words)


# stages; each leaves a folder, and does nothing where that folder is there


def answer(args: argparse.Namespace, runner: Runner, target: str) -> Path:
    out: Path = args.work / target / "data"
    record = out / "data.json"
    if record.exists() and read_json(record).get("complete"):
        return out
    words = paceline(
        *("data", "answer", "--prompts", f"train:{args.num_prompts}", "--target", target),
        *("--out", out, "--max-tokens", args.answer_tokens, "--concurrency", args.concurrency),
        *("--thinking", GOALS[target].thinking, "--device", args.device),
    )
    _require(*runner.run(*words))
    return out


def train(args: argparse.Namespace, runner: Runner, target: str, family: str) -> Path:
    given = args.draft.get(f"{target}/{family}")
    if given is not None:
        return resolve_draft(given)
    out: Path = args.work / target / family / "bf16"
    if not out.exists():
        data = answer(args, runner, target)
        words = [sys.executable, HERE / "budget.py", target, family, "--data", data, "--out", out]
        words += ["--device", args.device, "--minutes", args.train_minutes]
        words += ["--tiny"] if args.tiny else []
        _require(*runner.run(*words))
    return out


def quantise(args: argparse.Namespace, runner: Runner, target: str, family: str, kind: str) -> Path:
    out: Path = args.work / target / family / kind
    if not out.exists():
        data = answer(args, runner, target)
        words = paceline(
            *("quantize", train(args, runner, target, family), "--target", target),
            *("--scheme", kind, "--data", data, "--out", out, "--device", args.device),
            *("--rows", args.num_rows, "--max-length", args.row_length),
        )
        _require(*runner.run(*words))
    return out


def measure(
    args: argparse.Namespace, runner: Runner, target: str, family: str, kind: str, draft: Path
) -> dict[str, Any]:
    """Served beside the target alone and the baseline; the run folder says the rest."""
    goal = GOALS[target]
    out = args.work / target / family / f"run-{kind}-{args.machine}"
    result = out / "result.json"
    if not result.exists() or read_json(result).get("samples") is None:
        words = paceline(
            *("eval", draft, "--target", target, "--rules", goal.rules, "--out", out),
            *("--prompts", args.prompts, "--max-tokens", args.max_tokens),
            *("--thinking", goal.thinking, "--device", args.device),
            *(("--baseline", goal.baseline) if goal.baseline else ()),
            *(("--no-plain",) if args.no_plain else ()),
        )
        _require(*runner.run(*words))
    found = read_json(result)
    arm = found["aliases"].get("candidate", "candidate")  # it may be the baseline itself
    own = found["arms"]["candidate"]
    score = found["score"]
    memory = own["memory"]
    return {
        "length": length_by_category(own["requests"]),
        "tau": own["tau"]["value"],
        "memory_bytes": None if memory is None else memory["total_bytes"],
        "tpot_ms": own["tpot_ms"]["median"],
        "score": None if score is None else {key: score[key] for key in _KEPT},
        "baseline_tau": found["arms"]["baseline"]["tau"]["value"],
        "withheld": found["withheld"],
        "replay": (found.get("replay") or {}).get(arm),
        "prompts": {key: found["prompts"].get(key) for key in ("sha256", "num_prompts")},
        "max_tokens": args.max_tokens,
    }


def _require(code: int, said: str) -> None:
    if code:
        sys.stdout.write(said[-4000:])
        raise PlanError(f"a stage ended with {code}; its words are above")


# cells


def list_cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """(target, family, kind), all plain ones of a target first."""
    for target in args.target or GOALS:
        families = [f for f in GOALS[target].recipes if not args.only or f in args.only]
        for kind in ("bf16", *args.scheme):
            for family in families:
                yield target, family, kind


def fill(
    args: argparse.Namespace, runner: Runner, target: str, family: str, kind: str
) -> dict[str, Any]:
    """One cell, finished."""
    if kind != "bf16" and family in NOT_QUANTISED:
        return {"reason": NOT_QUANTISED[family]}
    facts = read_target(target)
    path = train(args, runner, target, family)
    if kind != "bf16":
        path = quantise(args, runner, target, family, kind)
    draft = read_draft(path)
    report = validate_draft(path, target=facts, rules=read_rules(GOALS[target].rules), deep=True)
    cell: dict[str, Any] = {
        "draft": describe(draft),
        "validated": {
            "verdict": report.verdict,
            "rules": sorted({f.rule for f in report.findings if f.severity != "note"}),
        },
        "foreseen_bytes": foresee_bytes(draft, facts.path, args.device),
    }
    reason = why_not_served(draft, facts, args.device)
    if reason is not None:
        return {**cell, "reason": reason}
    return {**cell, "measured": measure(args, runner, target, family, kind, path)}


def describe(draft: Draft) -> dict[str, Any]:
    trained = draft.metadata.get("trained", {})
    return {
        "sha256": draft.sha256,
        "num_parameters": draft.num_parameters,
        "files_bytes": draft.files_bytes,
        "name": draft.metadata.get("name"),
        "num_steps": trained.get("num_steps"),
        "tokens_seen": trained.get("tokens_seen"),
        "minutes": trained.get("minutes"),
        "num_rows": trained.get("data", {}).get("num_rows"),
        "trained_on": trained.get("provenance", {}).get("machine"),
    }


def why_not_served(draft: Draft, target: TargetFacts, device: str) -> str | None:
    """What the plan says of a draft that this device cannot serve, before anything starts."""
    try:
        check_plan(build_plan(target, draft, device=device))
    except PlanError as problem:
        return ". ".join(part.rstrip(".") for part in (problem.what, problem.fix) if part)
    return None


def write_few_prompts(work: Path, num_per_category: int) -> Path:
    """The first held-out prompts of each category."""
    path = work / f"held-out-{num_per_category}.jsonl"
    left: dict[str, int] = {}
    lines = []
    for prompt in read_prompts("held-out").prompts:
        left[prompt.category] = left.get(prompt.category, num_per_category) - 1
        if left[prompt.category] >= 0:
            line = {"id": prompt.prompt_id, "category": prompt.category}
            lines.append(json.dumps({**line, "messages": list(prompt.messages)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("runs/families"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--machine", help="name of the record; else by the device")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--target", choices=[*GOALS], action="append", help="one; both")
    parser.add_argument("--only", choices=FAMILIES, action="append", help="a family; all")
    parser.add_argument("--scheme", action="append", help="of paceline quantize; w4a16 and w8a8")
    parser.add_argument("--minutes", type=float, help="stop cleanly after that")
    parser.add_argument("--train-minutes", type=float, default=4.0, help="for each draft")
    parser.add_argument("--num-prompts", type=int, default=16_000)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--num-rows", type=int, default=64, help="to calibrate on")
    parser.add_argument("--row-length", type=int, default=512)
    parser.add_argument("--draft", action="append", default=[], help="TARGET/FAMILY=PLACE")
    parser.add_argument("--note", action="append", default=[], help="stands under the tables")
    parser.add_argument("--prompts", default="held-out")
    parser.add_argument("--per-category", type=int, help="so many held-out prompts; all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--no-plain", action="store_true", help="faster; texts not compared")
    parser.add_argument("--tiny", action="store_true", help="a trial on a CPU: no result")
    parser.add_argument("--render", action="store_true", help="only write the page")
    args = parser.parse_args()
    if args.tiny:
        args.device, args.results = "cpu", args.work
        args.num_prompts, args.answer_tokens, args.concurrency = 48, 64, 8
        args.train_minutes, args.num_rows, args.row_length = 0.25, 8, 128
        args.max_tokens, args.no_plain, args.per_category = 24, True, args.per_category or 2
    if args.device is None and not args.render:
        from paceline.serve.install import find_device

        args.device = find_device()
    args.draft = dict(one.split("=", 1) for one in args.draft)
    for key in args.draft:
        if key not in {f"{t}/{f}" for t, goal in GOALS.items() for f in goal.recipes}:
            parser.error(f"--draft {key}: not TARGET/FAMILY of this table")
    args.scheme = args.scheme or ["w4a16", "w8a8"]
    if args.machine is None:
        args.machine = f"{os.cpu_count()}-cores" if args.device == "cpu" else "one-h200"
    return args


def stop(why: str, code: int) -> NoReturn:
    print(f"stopped: {why}; the same command goes on", flush=True)
    sys.exit(code)


def main() -> None:
    args = read_args()
    folder, page = args.results / "families", args.results / "families.md"
    if args.render:
        return render_table(folder, page, SPEEDS)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.per_category:
        args.prompts = str(write_few_prompts(args.work, args.per_category))
    record = folder / f"{args.machine}.json"
    found: dict[str, Any] = read_json(record) if record.exists() else {"cells": {}}
    runner, failed = Runner(args.minutes), 0
    for cell in list_cells(args):
        key = "/".join(cell)
        if "measured" in found["cells"].get(key, {}) or "reason" in found["cells"].get(key, {}):
            continue
        began = time.monotonic()
        try:
            done = fill(args, runner, *cell)
        except TimeUpError:
            stop(f"the minutes are over at {key}", 0)
        except KeyboardInterrupt:
            stop(f"by hand at {key}", 130)
        except PacelineError as problem:
            print(f"{key}: {problem}", flush=True)
            failed += 1
            continue
        found["cells"][key] = done
        folder.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {
            "format": FORMAT,
            "machine": args.machine,
            "provenance": build_provenance(),
        }
        facts |= {"notes": args.note or found.get("notes", [])}
        write_json(record, {**found, **facts})
        render_table(folder, page, SPEEDS)
        print(f"{key}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"table: {page}")
    if failed:
        sys.exit(f"{failed} cells failed; the same command tries them again")


if __name__ == "__main__":
    main()
