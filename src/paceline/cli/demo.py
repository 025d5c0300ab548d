"""paceline demo: the whole loop on one small target, in minutes and on two cores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import console, progress, say

__all__ = ["demo"]

_RECIPE = Path(__file__).parent / "recipes" / "demo.toml"
_TARGET = "smollm2"
_BASELINE = "smollm2-eagle3"
_MAX_TOKENS = 128
_OWN = ("data", "draft", "draft.checkpoint", "run")
_CONCURRENCY = 32


def demo(
    out: Annotated[Path, typer.Option("--out", help="Where everything goes.")] = Path("runs/demo"),
) -> None:
    """Run the whole loop on SmolLM2: train, check, serve, score.

    About five minutes on two cores. An earlier demo at --out is replaced.
    """
    from paceline.cli.arms import open_arms
    from paceline.cli.measure import build_questions, finish_run, measure_endpoints, plan_arms
    from paceline.cli.train import run_training
    from paceline.cli.validate import print_findings
    from paceline.data import answer_prompts, read_prompts
    from paceline.endpoint import Sampling
    from paceline.records import clear_folder, storage_errors
    from paceline.report import print_report, write_report
    from paceline.rules import read_rules
    from paceline.target import read_target
    from paceline.train import read_recipe
    from paceline.validate import validate_draft

    begun = time.monotonic()

    def part(title: str) -> None:
        say(f"\n[{time.monotonic() - begun:4.0f} s] {title}")

    _require_own(out)
    clear_folder(out)
    rules = read_rules("demo")
    part(f"1 of 5: the target, {_TARGET} (unpacked on first use)")
    target = read_target(_TARGET)
    data_dir, draft_dir, run_dir = out / "data", out / "draft", out / "run"
    with storage_errors(run_dir):
        run_dir.mkdir(parents=True)
    plain = plan_arms(target, {"plain": "none"}, rules, max_num_seqs=_CONCURRENCY)
    with open_arms(plain, run_dir) as served:
        part("2 of 5: the target answers training prompts")
        prompt_set = read_prompts("demo-train")
        with progress("answering") as show:
            answer_prompts(
                prompt_set,
                served["plain"],
                target,
                out_dir=data_dir,
                sampling=Sampling(max_tokens=_MAX_TOKENS),
                concurrency=_CONCURRENCY,
                on_progress=show,
            )
        part("3 of 5: training a draft on those answers")
        run_training(read_recipe(_RECIPE), target, data_dir, draft_dir, None, False)
        part("4 of 5: validating its files")
        print_findings(validate_draft(draft_dir, target=target, limits=rules.limits, deep=True))
        part(f"5 of 5: measuring it against {_BASELINE}")
        arms = plan_arms(
            target,
            {"baseline": _BASELINE, "candidate": str(draft_dir)},
            rules,
            max_num_seqs=_CONCURRENCY,
        )
        with open_arms(arms, run_dir) as drafts:
            measure_endpoints(
                {**served, **drafts},
                [*plain, *arms],
                target,
                rules,
                build_questions(rules.prompts.name, target, rules),
                out=run_dir,
            )
    result = finish_run(run_dir, arms, target, rules, with_replay=True)
    say("")
    print_report(result, console)
    say(f"report: {write_report(run_dir)}")
    say(f"done in {time.monotonic() - begun:.0f} s")


def _require_own(out: Path) -> None:
    """Raises StorageError for a folder that holds more than an earlier demo: it is not replaced."""
    from paceline.errors import StorageError

    if not out.exists():
        return
    if not out.is_dir():
        raise StorageError("is not a folder", where=str(out), fix="Choose another --out.")
    strange = sorted(entry.name for entry in out.iterdir() if entry.name not in _OWN)
    if strange:
        raise StorageError(
            f"holds '{strange[0]}', which no demo made, so the folder is not replaced",
            where=str(out),
            fix="Choose another --out.",
        )
