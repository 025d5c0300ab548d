"""The command line is a contract: a new, renamed or removed option shows up here."""

from __future__ import annotations

from typing import Any

import typer.main

from paceline.cli.app import app

OPTIONS: dict[str, list[str]] = {
    "bench": [
        "--baseline",
        "--baseline-url",
        "--device",
        "--draft",
        "--k",
        "--model",
        "--no-baseline",
        "--out",
        "--prefix-caching",
        "--regime",
        "--repeated",
        "--requests",
        "--thinking",
        "--url",
        "target",
    ],
    "compare": ["--json", "runs"],
    "data answer": [
        "--concurrency",
        "--device",
        "--max-tokens",
        "--model",
        "--out",
        "--prompts",
        "--seed",
        "--server",
        "--target",
        "--temperature",
        "--thinking",
    ],
    "data show": ["--rows", "--target", "data"],
    "data tokenize": ["--out", "--target", "--thinking", "conversations"],
    "data vocabulary": ["--target", "data"],
    "demo": ["--out"],
    "eval": [
        "--baseline",
        "--cycles",
        "--device",
        "--k",
        "--max-tokens",
        "--no-plain",
        "--no-replay",
        "--noise-floor",
        "--out",
        "--plain",
        "--prompts",
        "--replay",
        "--rules",
        "--seed",
        "--stop-at",
        "--target",
        "--thinking",
        "draft",
    ],
    "fetch": ["--as", "--max-bytes", "--out", "--verify", "ref"],
    "forecast": [
        "--acceptance",
        "--bandwidth",
        "--baseline",
        "--baseline-acceptance",
        "--device",
        "--fit",
        "--json",
        "--lengths",
        "--max-tokens",
        "--measure",
        "--minutes",
        "--out",
        "--plan",
        "--repeats",
        "--rules",
        "--search",
        "--step-model",
        "--target",
        "designs",
    ],
    "judge add": ["--final", "--home", "--queue", "--rules", "--team", "draft"],
    "judge publish": ["--home", "--out", "--queue"],
    "judge run": [
        "--baseline",
        "--boot",
        "--cycles",
        "--device",
        "--home",
        "--lease",
        "--max-entries",
        "--prompts",
        "--queue",
        "--rules",
        "--shuffle",
        "--target",
        "--thinking",
        "--twin",
        "--wait",
    ],
    "judge status": ["--home", "--json", "--queue"],
    "judge verify": ["--key", "results"],
    "leaderboard": ["--out", "--rules", "results"],
    "quantize": [
        "--data",
        "--device",
        "--edges",
        "--group-size",
        "--head",
        "--keep",
        "--max-length",
        "--max-loss",
        "--max-tokens",
        "--measure",
        "--method",
        "--out",
        "--prompts",
        "--recurrent",
        "--rows",
        "--rules",
        "--scheme",
        "--share-head",
        "--target",
        "--thinking",
        "--vocab",
        "--window",
        "model",
    ],
    "report": ["--out", "--phase1", "--phase2", "run"],
    "score": ["--json", "run"],
    "serve": [
        "--device",
        "--draft",
        "--host",
        "--k",
        "--max-model-len",
        "--plan",
        "--port",
        "target",
    ],
    "submit": ["--deep", "--listed", "--rules", "--target", "draft", "repo"],
    "target show": ["--json", "target"],
    "train": [
        "--data",
        "--device",
        "--meet-at",
        "--nnodes",
        "--nproc-per-node",
        "--out",
        "--resume",
        "--sharded-target",
        "--target",
        "recipe",
    ],
    "validate": [
        "--deep",
        "--explain",
        "--json",
        "--junit",
        "--rules",
        "--run",
        "--run-tokens",
        "--strict",
        "--target",
        "draft",
    ],
}


def _walk(command: Any, path: str) -> dict[str, list[str]]:
    if hasattr(command, "commands"):
        found: dict[str, list[str]] = {}
        for name, child in command.commands.items():
            found |= _walk(child, f"{path} {name}".strip())
        return found
    names = sorted(
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    )
    return {path: names}


def test_options_are_frozen() -> None:
    assert _walk(typer.main.get_command(app), "") == OPTIONS
