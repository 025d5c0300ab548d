"""The tables of docs/forecasts/TARGET.md, from measured runs, the step-time model and the rules.

    python recipes/forecast/entry.py qwen3.8-27b qwen3.5-4b

Writes between the page's two marks and nothing else; the words around them are by hand. Every
design of recipes/forecast/TARGET.toml has a row: bytes from its shape, step times of its engine
where that ran (bench/results/steps-TARGET-h200.jsonl), else of the bundled model, acceptance as the
default space of `paceline forecast --search` assumes it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.forecast import (
    CachePlan,
    Candidate,
    Configuration,
    MeasurePlan,
    StepModel,
    StepRun,
    TargetShape,
    build_forecast,
    measure_memory,
    read_measure_plan,
    read_runs,
    read_shape,
    read_space,
    read_step_model,
    search_designs,
)
from paceline.forecast.fit import undisturbed_ms
from paceline.forecast.measured_record import foresee_memory
from paceline.forecast.score import Goal, model_step
from paceline.records import write_text
from paceline.rules import read_rules

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
RULES, MODEL = "emc2-2027", "h200"
GIGA = 1e9


def main() -> None:
    for name in sys.argv[1:]:
        entry = read_entry(name)
        write_page(
            ROOT / "docs" / "forecasts" / f"{name}.md",
            [
                "### Measured by shape\n",
                *measured(entry),
                "\n### Designs under emc2-2027\n",
                *designs(entry),
                "\n### Time a token, by length of the prompt\n",
                *speeds(entry),
            ],
        )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One target. runs: by the name in the plan."""

    plan: MeasurePlan
    shape: TargetShape
    runs: dict[str, StepRun]
    model: StepModel

    @property
    def contexts(self) -> list[int]:
        """Tokens in the middle of each measured answer."""
        return [length + self.plan.max_tokens // 2 for length in self.plan.lengths]

    @property
    def everyone(self) -> list[Configuration]:
        """The target alone, the native head by K, then the designs as the plan has them."""
        own = self.plan.configurations
        heads = [self.plan.reference, *(one for one in own if one.name.startswith("mtp"))]
        heads.sort(key=lambda one: one.name)
        others = [one for one in own if one not in heads]
        return [*(one for one in others if one.design is None), *heads] + [
            one for one in others if one.design is not None
        ]

    @functools.cached_property
    def judged(self) -> dict[str, Candidate]:
        """Name in the plan -> the design with the score that its assumed acceptance gives."""
        own = {one.name: one.settings for one in self.everyone if one.design is not None}
        blocks = tuple({key: (value,) for key, value in table.items()} for table in own.values())
        space = dataclasses.replace(read_space("default"), name="the plan's designs", blocks=blocks)
        found = search_designs(space, self.shape, read_rules(RULES), model=self.model)
        candidates = [*found.candidates, found.baseline]
        return {
            name: next(one for one in candidates if one.settings == settings)
            for name, settings in own.items()
        }

    def fastest_ms(self, name: str, place: int) -> float:
        """Milliseconds of a measured step at contexts[place]."""
        run = self.runs[name]
        return undisturbed_ms(run, run.points[place], list(self.runs.values()))

    def step_ms(self, one: Configuration, place: int) -> float:
        """The same; by the model where its engine has not run."""
        if one.name in self.runs:
            return self.fastest_ms(one.name, place)
        tokens, plan = self.contexts[place], CachePlan()
        memory = None
        if one.design is not None:
            memory = measure_memory(one.design, self.shape, context_tokens=tokens, plan=plan)
        return model_step(
            one.design,
            memory,
            self.shape,
            tokens=tokens,
            bandwidth_gb_s=1.0,  # the model has its own
            plan=plan,
            model=self.model,
        ).step_ms


def read_entry(name: str) -> Entry:
    shape = read_shape(name)
    return Entry(
        plan=read_measure_plan(ROOT / "recipes" / "forecast" / f"{name}.toml", shape),
        shape=shape,
        runs={r.name: r for r in read_runs(ROOT / f"bench/results/steps-{name}-h200.jsonl")},
        model=read_step_model(MODEL),
    )


def write_page(path: Path, lines: Sequence[str]) -> None:
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    write_text(path, f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")


def measured(entry: Entry) -> list[str]:
    contexts = entry.contexts
    lines = [
        f"| engine | K | {' | '.join(f'{c:,} tokens: ms a step' for c in contexts)} |"
        f" of the reference's step, {contexts[-1]:,} tokens | M held | M foreseen |",
        "| --- | --- | " + " | ".join("---" for _ in contexts) + " | --- | --- | --- |",
    ]
    for one in entry.everyone:
        if one.name not in entry.runs:
            continue
        run = entry.runs[one.name]
        cells = [one.name, str(run.num_speculative_tokens or "")]
        cells += [
            f"{p.step_ms:.2f} ({p.step_ms_low:.2f} to {p.step_ms_high:.2f}), least"
            f" {entry.fastest_ms(one.name, place):.2f}"
            for place, p in enumerate(run.points)
        ]
        last = run.points[-1]
        cells.append(
            "the reference"
            if last.ratio is None
            else f"{last.ratio:.3f} ({last.ratio_low:.3f} to {last.ratio_high:.3f})"
        )
        if run.memory is None:
            cells += ["", ""]
        else:
            foreseen = foresee_memory(run, entry.shape)
            cells += [f"{run.memory['total_bytes']:,}", f"{foreseen:,}"]
        lines.append("| " + " | ".join(cells) + " |")
    missing = [one.name for one in entry.everyone if one.name not in entry.runs]
    if missing:
        lines.append(f"\nNot measured yet: {', '.join(missing)}.")
    return lines


def designs(entry: Entry) -> list[str]:
    rules = read_rules(RULES)
    base = entry.judged[entry.plan.reference.name]
    lines = [
        "| design | K | parameters | files, GB | M at 16K, GB | M_B / M | ms a step, 8K |"
        " acceptance for 100 | for 125 | at most | assumed acceptance | score then |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in entry.everyone:
        if one.design is None:
            continue
        own = entry.judged[one.name]
        forecast = build_forecast(
            one.design,
            entry.shape,
            rules,
            model=entry.model,
            baseline_acceptance_length=base.acceptance_length,
        )
        goals = {goal.score: goal for goal in forecast.goals or ()}
        needs = [show_goal(goals.get(score)) for score in (100.0, 125.0)]
        most = f"{forecast.best.score:.0f}" if forecast.best else "no limit"
        step, how = forecast.step.step_ms, "model"
        if one.name in entry.runs:
            step, how = entry.fastest_ms(one.name, -1), "measured"
        broken = f" (over: {', '.join(own.broken)})" if own.broken else ""
        cells = [
            f"{one.name}{broken}",
            str(one.design.num_speculative_tokens),
            f"{own.num_parameters:,}",
            f"{own.files_bytes / GIGA:.3f}",
            f"{own.memory_bytes / GIGA:.3f}",
            f"{base.memory_bytes / own.memory_bytes:.2f}",
            f"{step:.2f} ({how})",
            *needs,
            most,
            f"{own.acceptance_length:.2f}",
            f"{own.score:.1f}" + ("" if own.ranked else ", not ranked"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def show_goal(goal: Goal | None) -> str:
    if goal is None or goal.acceptance_length is None or not goal.reachable:
        return "out of reach"
    return f"{goal.acceptance_length:.2f}"


def speeds(entry: Entry) -> list[str]:
    """Milliseconds a token at the assumed acceptance, against the target alone."""
    places = range(len(entry.contexts))
    alone = next(one for one in entry.everyone if one.design is None)
    plain = [entry.step_ms(alone, place) for place in places]
    lines = [
        "| engine | K | acceptance (assumed) | "
        + " | ".join(f"{c:,} tokens: ms a token" for c in entry.contexts)
        + " | times as fast as the target alone, mean |",
        "| --- | --- | --- | " + " | ".join("---" for _ in places) + " | --- |",
    ]
    for one in entry.everyone:
        length = entry.judged[one.name].acceptance_length if one.design else 1.0
        steps = [entry.step_ms(one, place) / length for place in places]
        mean = sum(p / s for p, s in zip(plain, steps, strict=True)) / len(steps)
        k = one.design.num_speculative_tokens if one.design else ""
        how = "" if one.name in entry.runs else " (model)"
        shown = " | ".join(f"{step:.2f}" for step in steps)
        lines.append(f"| {one.name}{how} | {k} | {length:.2f} | {shown} | {mean:.2f} |")
    return lines


if __name__ == "__main__":
    main()
