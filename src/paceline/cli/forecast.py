"""paceline forecast: what a draft will take and must reach, from its sizes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import print_facts

__all__ = ["forecast"]


def forecast(
    design: Annotated[Path, typer.Argument(help="DESIGN.toml: family, K and sizes.")],
    target: Annotated[
        str, typer.Option("--target", help="A folder, qwen3.8-27b, qwen3.5-4b or smollm2.")
    ],
    rules: Annotated[str, typer.Option("--rules", help="Contest rules.")] = "emc2-2027",
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", help="The baseline's DESIGN.toml; else the target's MTP head."),
    ] = None,
    baseline_acceptance: Annotated[
        float, typer.Option("--baseline-acceptance", help="Assumed length of the baseline.")
    ] = 2.8,
    bandwidth: Annotated[
        float, typer.Option("--bandwidth", help="Assumed bandwidth in GB/s.")
    ] = 3500.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell a draft's bytes and limits before it is trained.

    And the acceptance that a score needs; from sizes alone, without a GPU.
    """
    from paceline.forecast import build_forecast, describe_forecast, read_design, read_shape
    from paceline.rules import read_rules

    shape = read_shape(target)
    result = build_forecast(
        read_design(design, shape),
        shape,
        read_rules(rules),
        baseline=read_design(baseline, shape) if baseline else None,
        baseline_acceptance_length=baseline_acceptance,
        bandwidth_gb_s=bandwidth,
    )
    if as_json:
        typer.echo(json.dumps(result.to_json_dict(), indent=2, ensure_ascii=False))
        return
    for title, lines in describe_forecast(result):
        print_facts(title, lines)
