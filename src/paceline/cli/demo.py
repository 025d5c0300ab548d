"""paceline demo: the competition in miniature, in minutes and on two cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import console, progress, say

if TYPE_CHECKING:
    from paceline.cli.arms import Arm
    from paceline.endpoint import Endpoint
    from paceline.rules import Rules
    from paceline.target import TargetFacts

__all__ = ["demo"]

_RECIPES = Path(__file__).parent / "recipes"
_RULES = "pocket"
_BASELINE = "native"
_FAMILIES = {"eagle3": "an EAGLE-3 draft", "mtp": "a tuned MTP head"}
_PROMPTS = "train:256"
_MAX_TOKENS = 128
_PARTS = ("{}", "{}.checkpoint", "run-{}")
_OWN = {"data", "engines", *(part.format(name) for name in _FAMILIES for part in _PARTS)}
_CONCURRENCY = 32


@dataclass(frozen=True, kw_only=True)
class _Field:
    """What every candidate is measured beside: the target alone and the baseline."""

    target: TargetFacts
    rules: Rules
    arms: tuple[Arm, ...]
    endpoints: Mapping[str, Endpoint]


def demo(
    out: Annotated[Path, typer.Option("--out", help="Where everything goes.")] = Path("runs/demo"),
) -> None:
    """Train two drafts for a small target, check and score them.

    The competition in miniature: the target is pocket, a small hybrid; its own MTP head is the
    baseline that scores 100. About five minutes on two cores. An earlier demo at --out is replaced.
    """
    from paceline.cli.arms import open_arms
    from paceline.cli.measure import plan_arms
    from paceline.cli.train import run_training
    from paceline.cli.validate import print_findings
    from paceline.records import clear_folder, storage_errors
    from paceline.rules import read_rules
    from paceline.target import read_target
    from paceline.train import read_recipe
    from paceline.validate import validate_draft

    part = _stopwatch()
    _require_own(out)
    clear_folder(out)
    rules = read_rules(_RULES)
    target = read_target(rules.target.name)
    part(f"1 of 5: {target.name}, a hybrid target, answers training prompts")
    logs = out / "engines"
    with storage_errors(logs):
        logs.mkdir(parents=True)
    arms = plan_arms(
        target, {"plain": "none", "baseline": _BASELINE}, rules, max_num_seqs=_CONCURRENCY
    )
    with open_arms(arms, logs) as endpoints:
        field = _Field(target=target, rules=rules, arms=tuple(arms), endpoints=endpoints)
        _answer(field, out / "data")
        part("2 of 5: training two drafts on those answers")
        for family, words in _FAMILIES.items():
            say(f"{words}:")
            recipe = read_recipe(_RECIPES / f"demo-{family}.toml")
            run_training(recipe, target, out / "data", out / family, None, False)
        part("3 of 5: validating their files")
        for family, words in _FAMILIES.items():
            say(f"{words}:")
            found = validate_draft(out / family, target=target, limits=rules.limits, deep=True)
            print_findings(found)
        part("4 of 5: measuring each against the target's own MTP head")
        results = {family: _measure(field, family, out) for family in _FAMILIES}
    part("5 of 5: the scores")
    _show(results, out)
    part("done")


def _stopwatch() -> Callable[[str], None]:
    begun = time.monotonic()
    return lambda title: say(f"\n[{time.monotonic() - begun:4.0f} s] {title}")


def _answer(field: _Field, data: Path) -> None:
    from paceline.data import answer_prompts, read_prompts
    from paceline.endpoint import Sampling

    with progress("answering") as show:
        answer_prompts(
            read_prompts(_PROMPTS),
            field.endpoints["plain"],
            field.target,
            out_dir=data,
            sampling=Sampling(max_tokens=_MAX_TOKENS),
            concurrency=_CONCURRENCY,
            thinking="off",
            on_progress=show,
        )


def _measure(field: _Field, family: str, out: Path) -> dict[str, Any]:
    """One candidate, beside the plain target and the baseline, in a run folder of its own."""
    from paceline.cli.arms import open_arms
    from paceline.cli.measure import build_questions, finish_run, measure_endpoints, plan_arms
    from paceline.records import storage_errors

    target, rules, run = field.target, field.rules, out / f"run-{family}"
    with storage_errors(run):
        run.mkdir()
    drafts = {"candidate": str(out / family)}
    arms = [*field.arms, *plan_arms(target, drafts, rules, max_num_seqs=_CONCURRENCY)]
    with open_arms(arms[-1:], run) as opened:
        questions = build_questions(rules.prompts.name, target, rules, thinking="off")
        measure_endpoints({**field.endpoints, **opened}, arms, target, rules, questions, out=run)
    return finish_run(run, arms, target, rules, with_replay=True, thinking="off")


def _show(results: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    from paceline.eval import compare_runs
    from paceline.report import print_report, render_comparison, write_report

    for family, result in results.items():
        say(f"\n== {_FAMILIES[family]} ==")
        print_report(result, console)
        say(f"report: {write_report(out / f'run-{family}')}")
    console.print(render_comparison(compare_runs([out / f"run-{name}" for name in results])))


def _require_own(out: Path) -> None:
    """Raises StorageError for a folder that holds more than an earlier demo: it is not replaced."""
    from paceline.errors import StorageError

    if not out.exists():
        return
    if not out.is_dir():
        raise StorageError("is not a folder", where=str(out), fix="Choose another --out.")
    strange = sorted({entry.name for entry in out.iterdir()} - _OWN)
    if strange:
        raise StorageError(
            f"holds '{strange[0]}', which no demo made, so the folder is not replaced",
            where=str(out),
            fix="Choose another --out.",
        )
