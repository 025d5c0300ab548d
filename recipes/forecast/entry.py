"""The tables of docs/forecasts/TARGET.md, from measured runs, the step-time model and the rules.

    python recipes/forecast/entry.py qwen3.8-27b qwen3.5-4b

Writes between the page's two marks and nothing else; the words around them are by hand. Every
design of recipes/forecast/TARGET.toml has a row: bytes from its shape, step times of its engine
where that ran (bench/results/steps-TARGET-h200.jsonl), else of the bundled model, acceptance as the
default space of `paceline forecast --search` assumes it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
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
from paceline.forecast.measured_record import shape_as_run
from paceline.forecast.score import Goal
from paceline.forecast.work import measure_work
from paceline.records import write_text
from paceline.rules import read_rules

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
RULES, MODEL = "emc2-2027", "h200"
GIGA = 1e9


def main() -> None:
    for name in sys.argv[1:]:
        shape = read_shape(name)
        plan = read_measure_plan(ROOT / "recipes" / "forecast" / f"{name}.toml", shape)
        runs = {r.name: r for r in read_runs(ROOT / f"bench/results/steps-{name}-h200.jsonl")}
        model = read_step_model(MODEL)
        found = judge(plan, shape, model)
        write_page(
            ROOT / "docs" / "forecasts" / f"{name}.md",
            [
                "### Measured by shape\n",
                *measured(plan, shape, runs),
                "\n### Designs under emc2-2027\n",
                *designs(plan, shape, runs, model, found),
                "\n### Time a token, by length of the prompt\n",
                *speeds(plan, shape, runs, model, found),
            ],
        )


def write_page(path: Path, lines: Sequence[str]) -> None:
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    write_text(path, f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")


def judge(plan: MeasurePlan, shape: TargetShape, model: StepModel) -> dict[str, Candidate]:
    """Name in the plan -> the design with the score that its assumed acceptance gives."""
    own = {one.name: one.settings for one in everyone(plan) if one.design is not None}
    blocks = tuple({key: (value,) for key, value in table.items()} for table in own.values())
    space = dataclasses.replace(read_space("default"), name="the plan's designs", blocks=blocks)
    found = search_designs(space, shape, read_rules(RULES), model=model)
    candidates = [*found.candidates, found.baseline]
    return {
        name: next(one for one in candidates if one.settings == settings)
        for name, settings in own.items()
    }


def everyone(plan: MeasurePlan) -> list[Configuration]:
    """The target alone, the native head by K, then the designs as the plan has them."""
    heads = [plan.reference, *(one for one in plan.configurations if one.name.startswith("mtp"))]
    heads.sort(key=lambda one: one.name)
    others = [one for one in plan.configurations if one not in heads]
    return [*(one for one in others if one.design is None), *heads] + [
        one for one in others if one.design is not None
    ]


def measured(plan: MeasurePlan, shape: TargetShape, runs: dict[str, StepRun]) -> list[str]:
    contexts = [length + plan.max_tokens // 2 for length in plan.lengths]
    lines = [
        f"| engine | K | {' | '.join(f'{c:,} tokens: ms a step' for c in contexts)} |"
        f" of the reference's step, {contexts[-1]:,} tokens | M held | M foreseen |",
        "| --- | --- | " + " | ".join("---" for _ in contexts) + " | --- | --- | --- |",
    ]
    for one in everyone(plan):
        if one.name not in runs:
            continue
        run = runs[one.name]
        cells = [one.name, str(run.num_speculative_tokens or "")]
        cells += [
            f"{p.step_ms:.2f} ({p.step_ms_low:.2f} to {p.step_ms_high:.2f}), least"
            f" {undisturbed_ms(run, p, list(runs.values())):.2f}"
            for p in run.points
        ]
        last = run.points[-1]
        cells.append(
            "the reference"
            if last.ratio is None
            else f"{last.ratio:.3f} ({last.ratio_low:.3f} to {last.ratio_high:.3f})"
        )
        if one.design is None or run.memory is None:
            cells += ["", ""]
        else:
            foreseen = measure_memory(
                one.design,
                shape_as_run(shape),
                context_tokens=run.memory["context_tokens"],
                plan=CachePlan(device="cuda"),
            ).total_bytes
            cells += [f"{run.memory['total_bytes']:,}", f"{foreseen:,}"]
        lines.append("| " + " | ".join(cells) + " |")
    missing = [one.name for one in everyone(plan) if one.name not in runs]
    if missing:
        lines.append(f"\nNot measured yet: {', '.join(missing)}.")
    return lines


def designs(
    plan: MeasurePlan,
    shape: TargetShape,
    runs: dict[str, StepRun],
    model: StepModel,
    found: dict[str, Candidate],
) -> list[str]:
    rules = read_rules(RULES)
    base = found[plan.reference.name]
    lines = [
        "| design | K | parameters | files, GB | M at 16K, GB | M_B / M | ms a step, 8K |"
        " acceptance for 100 | for 125 | at most | assumed acceptance | score then |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in everyone(plan):
        if one.design is None:
            continue
        own = found[one.name]
        forecast = build_forecast(
            one.design,
            shape,
            rules,
            model=model,
            baseline_acceptance_length=base.acceptance_length,
        )
        goals = {goal.score: goal for goal in forecast.goals or ()}
        needs = [show_goal(goals.get(score)) for score in (100.0, 125.0)]
        most = f"{forecast.best.score:.0f}" if forecast.best else "no limit"
        step = forecast.step.step_ms
        how = "measured" if one.name in runs else "model"
        if one.name in runs:
            run = runs[one.name]
            step = undisturbed_ms(run, run.points[-1], list(runs.values()))
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


def speeds(
    plan: MeasurePlan,
    shape: TargetShape,
    runs: dict[str, StepRun],
    model: StepModel,
    found: dict[str, Candidate],
) -> list[str]:
    """Milliseconds a token at the assumed acceptance, against the target alone."""
    contexts = [length + plan.max_tokens // 2 for length in plan.lengths]
    plain = [
        step_at(None, place, contexts, plan, shape, runs, model) for place in range(len(contexts))
    ]
    lines = [
        "| engine | K | acceptance (assumed) | "
        + " | ".join(f"{c:,} tokens: ms a token" for c in contexts)
        + " | times as fast as the target alone, mean |",
        "| --- | --- | --- | " + " | ".join("---" for _ in contexts) + " | --- |",
    ]
    for one in everyone(plan):
        length = found[one.name].acceptance_length if one.design else 1.0
        steps = [
            step_at(one, place, contexts, plan, shape, runs, model) / length
            for place in range(len(contexts))
        ]
        mean = sum(p / s for p, s in zip(plain, steps, strict=True)) / len(steps)
        k = one.design.num_speculative_tokens if one.design else ""
        how = "" if one.name in runs else " (model)"
        shown = " | ".join(f"{step:.2f}" for step in steps)
        lines.append(f"| {one.name}{how} | {k} | {length:.2f} | {shown} | {mean:.2f} |")
    return lines


def step_at(
    one: Configuration | None,
    place: int,
    contexts: Sequence[int],
    plan: MeasurePlan,
    shape: TargetShape,
    runs: dict[str, StepRun],
    model: StepModel,
) -> float:
    """Milliseconds of a step at contexts[place]: measured, else by the model. None: no draft."""
    name = "plain" if one is None else one.name
    if name in runs:
        return undisturbed_ms(runs[name], runs[name].points[place], list(runs.values()))
    design = None if one is None else one.design
    tokens = contexts[place]
    sizes = (
        measure_memory(design, shape, context_tokens=tokens, plan=CachePlan()).sizes
        if design
        else None
    )
    return model.predict(measure_work(design, sizes, shape, tokens=tokens, plan=CachePlan()))


if __name__ == "__main__":
    main()
