"""One system of the AdaptFM results as commands: quantise, train, bench, and its ladder.

    python recipes/adaptfm/run.py recipes/adaptfm/04-dflash12.toml --target pocket --work OUT
    python recipes/adaptfm/run.py recipes/adaptfm/*.toml --target smollm2 --work OUT --commands
    python recipes/adaptfm/run.py --render bench/results/adaptfm-cpu.json     the page's section

Every step is a `paceline` command; --commands prints them and runs nothing. A step whose result
lies in OUT is not run again, so the same line goes on where it was stopped. What a recipe asks and
this machine or target cannot do is printed as an open row and left out; a step that fails ends its
recipe with its reason, not the others. On a GPU take the challenge's regimes (leave --regime out);
on two cores --regime 64:32 --answers 64 --steps 20 --tokens-per-batch 2048. OUT/NAME/ladder.json
holds the speed-up of each rung over the target alone, eager; --keep FILE takes it over, for the
page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder_page import write_ours

from paceline.eval import compare_arms
from paceline.records import build_provenance, read_json, write_json, write_text
from paceline.serve import find_device, find_machine
from paceline.target import TargetFacts, read_target

HERE = Path(__file__).resolve().parent
FORMAT = "paceline-adaptfm/1"
PACELINE = (sys.executable, "-c", "from paceline.cli import main; main()")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """commands in order, and what the recipe asks beyond them. target, draft: what is served."""

    commands: list[list[str]]
    open_rows: list[str]
    target: str
    draft: str


def plan_steps(
    recipe: Mapping[str, Any],
    facts: TargetFacts,
    work: Path,
    *,
    device: str,
    regimes: list[str],
    num_steps: int,
    num_requests: int,
    num_answers: int = 2048,
    tokens_per_batch: int | None = None,
) -> Steps:
    """The commands of one recipe for one target; starts nothing."""
    name = facts.name
    open_rows = list(recipe.get("open", []))
    commands: list[list[str]] = []
    thinking = ["--thinking", "off"] if facts.is_hybrid else []
    wanted, draft = recipe.get("target"), recipe["draft"]
    has_weights = draft["family"] not in ("ngram", "suffix")
    answers = work.parent / "data"  # one for all recipes; a second run goes on where it is
    data = ["--data", str(answers)]
    if wanted or has_weights:
        limit = ["--prompts", f"train:{num_answers}", "--max-tokens", "128", "--concurrency", "8"]
        commands.append(
            ["data", "answer", "--target", name, "--out", str(answers), *limit, *thinking]
        )
    target = name
    if wanted:
        target = str(work / "target")
        words = ["quantize", name, "--out", target, *data, "--device", device]
        words += _scheme(wanted, facts, device, open_rows)
        if "distill" in wanted:
            words += ["--distill", str(min(wanted["distill"], num_steps))]
        commands.append(words)
    served, k = draft["family"], draft["k"]
    if has_weights:
        served = str(work / "draft")
        limit = ["--device", device]
        commands.append(
            ["train", str(work / "draft.toml"), "--target", name, *data, "--out", served, *limit]
        )
        _write_training(recipe, facts, work, num_steps, tokens_per_batch)
        made = [f"--{key}" for key in ("scheme", "window") if key in draft]
        if made:
            small = str(work / "draft-small")
            words = ["quantize", served, "--target", name, "--out", small]
            if "scheme" in draft:
                words += [*data, *_scheme(draft, facts, device, open_rows)]
            if "window" in draft:
                words += ["--window", str(min(draft["window"], facts.max_position_embeddings))]
            commands.append(words)
            served = small
    engine = recipe.get("engine", {})
    settings: list[str] = []
    if engine.get("prefix_caching"):
        if facts.is_hybrid:
            open_rows.append(
                "prefix caching on a hybrid target: with speculation vLLM 0.31.0 restores a stale"
                " state (vLLM #53912); the team patched it"
            )
        else:
            settings += ["--prefix-caching"]
    if "cudagraph_sizes" in engine and device == "cpu":
        open_rows.append("CUDA graphs for whole blocks of K + 1: a CPU has none")
    elif "cudagraph_sizes" in engine:
        write_text(
            work / "engine.toml",
            f"[engine]\ncompiled = true\ncudagraph_sizes = {engine['cudagraph_sizes']}\n",
        )
        settings += ["--config", str(work / "engine.toml")]
    common = ["--requests", str(num_requests), "--device", device, *thinking]
    common += [word for regime in regimes for word in ("--regime", regime)]
    plain = ["bench", name, "--draft", "none", "--out", str(work / "plain.json")]
    commands.append([*plain, *common])
    best = ["bench", target, "--no-baseline", "--draft", served, "--k", str(k), *settings]
    if wanted:
        best += ["--draft", "none"]
    commands.append([*best, "--out", str(work / "optimised.json"), *common])
    return Steps(commands=commands, open_rows=open_rows, target=target, draft=served)


def _scheme(
    wanted: Mapping[str, Any], facts: TargetFacts, device: str, open_rows: list[str]
) -> list[str]:
    """Options of `paceline quantize`, as far as the target's sizes and the device have a kernel."""
    words = ["--scheme", wanted["scheme"]]
    if "method" in wanted:
        words += ["--method", wanted["method"]]
    size = wanted.get("group_size")
    if size is not None:
        fits = next(s for s in (size, 64, 32) if not facts.hidden_size % s)
        if fits != size:
            open_rows.append(f"groups of {size} do not divide {facts.name}'s matrices: {fits}")
        words += ["--group-size", str(fits)]
    if "edges" in wanted:
        words += ["--edges", str(wanted["edges"])]
    if "head" in wanted:
        if device == "cpu" and wanted["head"] == "w8a16":
            open_rows.append("an output layer in w8a16: vLLM 0.31.0 has no kernel for it on a CPU")
        else:
            words += ["--head", wanted["head"]]
    return words


def _write_training(
    recipe: Mapping[str, Any],
    facts: TargetFacts,
    work: Path,
    num_steps: int,
    tokens_per_batch: int | None,
) -> None:
    """The target's own recipe for the family, with this system's K and these steps."""
    text = (HERE.parent / facts.name / f"{recipe['draft']['family']}.toml").read_text()
    k, made = recipe["draft"]["k"], []
    for line in text.splitlines():
        key = line.partition(" = ")[0]
        if key == "num_speculative_tokens":
            line = f"num_speculative_tokens = {k}"
        elif key == "num_steps":
            line = f"num_steps = {num_steps}"
        elif key == "tokens_per_batch" and tokens_per_batch is not None:
            line = f"tokens_per_batch = {tokens_per_batch}"
        elif key == "checkpoint_steps":
            line = f"checkpoint_steps = {num_steps}"
        elif key == "warmup_steps":
            line = f"warmup_steps = {min(50, num_steps // 4)}"
        elif key == "position_weights":
            line = f"position_weights = {[round(0.9**place, 3) for place in range(k)]}"
        made.append(line)
    write_text(work / "draft.toml", "\n".join(made) + "\n")


def build_ladder(work: Path) -> list[dict[str, Any]]:
    """Speed-up of each rung over the target alone, eager, on the same prompts."""
    plain = read_json(work / "plain.json")
    best = read_json(work / "optimised.json")
    assert plain["prompts_sha256"] == best["prompts_sha256"]
    baseline = plain["arms"]["baseline"]["regimes"]
    arms = {"target alone, as vLLM starts it": plain["arms"]["none"]}
    for name, arm in sorted(best["arms"].items(), key=lambda item: item[0] != "none"):
        arms["and quantised" if name == "none" else "and its draft"] = arm
    rungs = [{"rung": "target alone, eager", "mean": 1.0, "low": None, "high": None}]
    for rung, arm in arms.items():
        found = compare_arms(baseline, arm["regimes"])
        rungs.append({"rung": rung, **{key: found[key] for key in ("mean", "low", "high")}})
    return rungs


def read_taus(work: Path) -> list[float]:
    """Tokens a step with the draft, a number a regime."""
    arms = read_json(work / "optimised.json")["arms"]
    (arm,) = [arm for name, arm in arms.items() if name != "none"]
    return [record["tau"] for record in arm["regimes"]]


def run_steps(steps: Steps, work: Path) -> str | None:
    """Runs what has no result yet, each with a log; the reason of the first that fails, or None."""
    for number, command in enumerate(steps.commands):
        print("paceline " + " ".join(command), flush=True)
        if command[0] != "data" and Path(command[command.index("--out") + 1]).exists():
            continue  # `data answer` goes on by itself
        log = work / f"step-{number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            done = subprocess.run([*PACELINE, *command], stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            return f"paceline {command[0]}: {find_reason(log.read_text())}"
    return None


def find_reason(log: str) -> str:
    """The message that a command ended with, on one line."""
    message = log[log.rfind("error:") :] if "error:" in log else log[-300:]
    return " ".join(message.removeprefix("error:").split())[:400]


def keep(path: Path, row: Mapping[str, Any]) -> None:
    """Puts a recipe's row in place of its last one for the same target, machine and sizes."""
    rows = read_json(path)["rows"] if path.exists() else []
    same = ("recipe", "target", "machine")
    rows = [one for one in rows if any(one[key] != row[key] for key in same)]
    rows = sorted([*rows, row], key=lambda one: (one["target"], one["recipe"]))
    write_json(path, {"format": FORMAT, "provenance": build_provenance(), "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--regime", action="append", default=[])
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tokens-per-batch", type=int, help="For the few steps of a trial.")
    parser.add_argument("--answers", type=int, default=2048)
    parser.add_argument("--device")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--keep", type=Path, help="Takes each recipe's outcome over.")
    parser.add_argument("--render", type=Path, help="Writes kept rows into docs/results.")
    options = parser.parse_args()
    if options.render is not None:
        write_ours(options.render, HERE.parents[1] / "docs" / "results" / "adaptfm.md")
        return
    if not options.recipes or options.target is None or options.work is None:
        parser.error("recipes, --target and --work are needed")
    device = options.device or find_device()
    facts = read_target(options.target)
    for path in options.recipes:
        recipe = tomllib.loads(path.read_text())
        work = options.work / path.stem
        steps = plan_steps(
            recipe,
            facts,
            work,
            device=device,
            regimes=options.regime,
            num_steps=options.steps,
            num_requests=options.requests,
            num_answers=options.answers,
            tokens_per_batch=options.tokens_per_batch,
        )
        print(f"== {path.stem}: reported {recipe['reported']['mean']} times", flush=True)
        for row in steps.open_rows:
            print(f"open: {row}")
        if options.commands:
            for command in steps.commands:
                print("paceline " + " ".join(command))
            continue
        reason = run_steps(steps, work)
        ladder: dict[str, Any] = {"recipe": path.stem, "open": steps.open_rows, "reason": reason}
        if reason is None:
            ladder |= {"rungs": build_ladder(work), "tau": read_taus(work)}
            write_json(work / "ladder.json", ladder)
        print(json.dumps(ladder, indent=2), flush=True)
        if options.keep is not None:
            sizes = {
                "regimes": options.regime,
                "requests": options.requests,
                "answers": options.answers,
                "steps": options.steps if recipe["draft"]["family"] == "dflash" else None,
                "tokens_per_batch": options.tokens_per_batch,
            }
            row = {**ladder, **sizes, "place": recipe["place"]}
            keep(options.keep, {**row, "target": facts.name, "machine": find_machine(device)})


if __name__ == "__main__":
    main()
