"""paceline forecast: what a draft will take and must reach, from its sizes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import print_facts, say
from paceline.errors import PlanError

if TYPE_CHECKING:
    from paceline.forecast import StepModel

__all__ = ["forecast"]


def forecast(
    target: Annotated[
        str,
        typer.Option(
            "--target",
            help="A folder, qwen3.8-27b, qwen3.5-4b or smollm2; with --fit also several: A,B.",
        ),
    ],
    designs: Annotated[
        list[Path] | None,
        typer.Argument(help="DESIGN.toml (family, K, sizes), or a draft that is there."),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option("--rules", help="Contest rules, emc2-2027; adaptfm-2026: latency alone."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", help="The baseline, likewise; else the target's MTP head."),
    ] = None,
    baseline_acceptance: Annotated[
        float | None,
        typer.Option("--baseline-acceptance", help="Assumed length of the baseline; 2.8."),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", help="Assumed bandwidth in GB/s; 3500.")
    ] = None,
    step_model: Annotated[
        Path | None,
        typer.Option("--step-model", help="Step times by a model: h200, or what --fit wrote."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option("--search", help="Try every design of SPACE.toml, or of the space 'default'."),
    ] = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option("--fit", help="Fit a step-time model to measured runs (steps.jsonl, ...)."),
    ] = None,
    acceptance: Annotated[
        Path | None,
        typer.Option("--acceptance", help="Foresee acceptance from measured points (POINTS.toml)."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Step times of real engines by shape: dummy weights."),
    ] = False,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="PLAN.toml for --measure, in place of designs.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Prompt tokens to measure at; 64,2048,8192.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", help="Pairs at each length; 6.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of each measured answer; 128.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Start nothing that would end later.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option("--at-once", min=1, help="Engines that start together, if they fit; 1."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu or cuda; --measure finds it, a forecast is of cuda."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where --search, --fit and --measure write.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what a draft takes, trained or not.

    And the acceptance that a score needs; from sizes alone, without a GPU. --search tries a whole
    space of designs, --measure runs real engines on the target's shape alone.
    """
    modes = {
        "--search": search is not None,
        "--fit": bool(fit),
        "--acceptance": acceptance is not None,
        "--measure": measure,
    }
    chosen = [name for name, is_on in modes.items() if is_on]
    if len(chosen) > 1:
        raise PlanError(f"{' and '.join(chosen)} are two commands", expected="one of them")
    mode = chosen[0] if chosen else ""
    _refuse(mode, designs, "a design", ("", "--measure"))
    _refuse(mode, out, "--out", ("--search", "--fit", "--measure"))
    for value, name in (
        (plan, "--plan"),
        (lengths, "--lengths"),
        (repeats, "--repeats"),
        (max_tokens, "--max-tokens"),
        (minutes, "--minutes"),
        (at_once, "--at-once"),
    ):
        _refuse(mode, value, name, ("--measure",))
    _refuse(mode, device, "--device", ("", "--measure"))
    _refuse(mode, baseline, "--baseline", ("",))
    _refuse(mode, baseline_acceptance, "--baseline-acceptance", ("",))
    _refuse(mode, step_model, "--step-model", ("", "--search"))
    _refuse(mode, bandwidth, "--bandwidth", ("", "--search"))
    _refuse(mode, rules, "--rules", ("", "--search", "--measure"))
    if bandwidth is not None and step_model is not None:
        raise PlanError("--bandwidth has no effect with --step-model", fix="Leave it out.")
    rules = rules or "emc2-2027"
    bandwidth = 3500.0 if bandwidth is None else bandwidth
    _refuse(mode, as_json or None, "--json", ("", "--search"))
    if search is not None:
        _search(search, target, rules, bandwidth, step_model, out, as_json)
    elif fit:
        _fit(fit, target, out)
    elif acceptance is not None:
        from paceline.forecast import describe_scaling, fit_scaling, read_scaling_points

        scaling = fit_scaling(read_scaling_points(acceptance))
        for title, lines in describe_scaling(scaling, target):
            print_facts(title, lines)
    elif measure:
        from paceline.cli.forecast_measure import measure_shape

        if out is None:
            raise PlanError(
                "--measure has no --out", expected="a folder; an unfinished one goes on"
            )
        measure_shape(
            designs or [],
            target,
            rules,
            plan_path=plan,
            lengths=lengths,
            num_repeats=repeats,
            max_tokens=max_tokens,
            minutes=minutes,
            at_once=at_once or 1,
            device=device,
            out=out,
        )
    else:
        if not designs or len(designs) > 1:
            raise PlanError(
                f"{len(designs or [])} designs are named",
                expected="one DESIGN.toml, or --search, --fit, --acceptance, --measure",
            )
        from paceline.rules import list_challenges

        if rules in list_challenges():
            for given, option in (
                (baseline, "--baseline"),
                (baseline_acceptance, "--baseline-acceptance"),
                (device, "--device"),
            ):
                if given is not None:
                    raise PlanError(f"{option} has no effect with {rules}", fix="Leave it out.")
            _forecast_latency(designs[0], target, bandwidth, step_model, as_json)
            return
        _forecast(
            designs[0],
            target,
            rules,
            baseline,
            2.8 if baseline_acceptance is None else baseline_acceptance,
            bandwidth,
            step_model,
            device or "cuda",
            as_json,
        )


def _refuse(mode: str, value: object, name: str, modes: tuple[str, ...]) -> None:
    """A setting without effect is an error."""
    if value is not None and value != [] and mode not in modes:
        here = f"with {mode}" if mode else "here"
        raise PlanError(
            f"{name} has no effect {here}",
            expected=f"it with {' or '.join(m or 'a single design' for m in modes)}",
            fix="Leave it out.",
        )


def _read_model(path: Path | None) -> StepModel | None:
    from paceline.forecast import read_step_model

    return None if path is None else read_step_model(path)


def _forecast(
    design: Path,
    target: str,
    rules: str,
    baseline: Path | None,
    baseline_acceptance: float,
    bandwidth: float,
    step_model: Path | None,
    device: str,
    as_json: bool,
) -> None:
    from paceline.forecast import (
        CachePlan,
        build_forecast,
        describe_forecast,
        read_design_or_draft,
        read_shape,
    )
    from paceline.rules import read_rules

    shape = read_shape(target)
    result = build_forecast(
        read_design_or_draft(design, shape),
        shape,
        read_rules(rules),
        baseline=read_design_or_draft(baseline, shape) if baseline else None,
        baseline_acceptance_length=baseline_acceptance,
        bandwidth_gb_s=bandwidth,
        plan=CachePlan(device=device),
        model=_read_model(step_model),
    )
    if as_json:
        typer.echo(json.dumps(result.to_json_dict(), indent=2, ensure_ascii=False))
        return
    for title, lines in describe_forecast(result):
        print_facts(title, lines)


def _forecast_latency(
    design: Path, target: str, bandwidth: float, step_model: Path | None, as_json: bool
) -> None:
    from paceline.eval import REGIMES
    from paceline.forecast import (
        build_latency,
        describe_latency,
        read_design_or_draft,
        read_shape,
    )

    shape = read_shape(target)
    found = build_latency(
        read_design_or_draft(design, shape),
        shape,
        [(regime.prompt_tokens, regime.new_tokens) for regime in REGIMES],
        bandwidth_gb_s=bandwidth,
        model=_read_model(step_model),
    )
    if as_json:
        typer.echo(json.dumps(found.to_json_dict(), indent=2, ensure_ascii=False))
        return
    for title, lines in describe_latency(found):
        print_facts(title, lines)


def _search(
    space: str,
    target: str,
    rules: str,
    bandwidth: float,
    step_model: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from paceline.forecast import (
        describe_search,
        read_shape,
        read_space,
        search_designs,
        search_to_json,
    )
    from paceline.records import atomic_folder, write_json, write_text
    from paceline.rules import read_rules

    found = search_designs(
        read_space(space),
        read_shape(target),
        read_rules(rules),
        bandwidth_gb_s=bandwidth,
        model=_read_model(step_model),
    )
    record = search_to_json(found)
    if out is not None:
        from paceline.report import draw_frontier

        with atomic_folder(out) as folder:
            write_json(folder / "search.json", record)
            write_text(folder / "frontier.svg", str(draw_frontier(record)))
    if as_json:
        typer.echo(json.dumps(record, indent=2, ensure_ascii=False))
        return
    for title, lines in describe_search(found):
        print_facts(title, lines)
    if out is not None:
        say(f"frontier: {out / 'frontier.svg'}")


def _fit(files: list[Path], target: str, out: Path | None) -> None:
    from paceline.forecast import describe_fit, fit_runs, read_runs, read_shape, write_step_model

    model = fit_runs(
        [run for file in files for run in read_runs(file)],
        [read_shape(name) for name in target.split(",")],
        where=", ".join(str(file) for file in files),
    )
    if out is not None:
        write_step_model(out, model)
    print_facts("Step-time model", describe_fit(model))
    if out is not None:
        say(f"model: {out}")
