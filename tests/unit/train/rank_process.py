"""One process of a run of test_ranks.py, or with --launch N the launcher of N of them; both are
forked by warm_processes.py.

    rank_process.py JOB.json
    rank_process.py --launch N [--machines M --meet-at HOST:PORT] JOB.json

JOB: target, data, out, log, recipe (as tiny.make_recipe takes it) or several recipes, and what is
to go wrong: `fault` at the batch number `at` that process `rank` prepares. The first process
appends one line a step to the log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer
from warm_processes import start_forks_of_workers

from paceline.cli import main
from paceline.cli.app import app


def break_off(fault: str) -> None:
    from paceline.errors import DataError

    if fault == "error":
        raise DataError("the disk gave other rows", where="rows.jsonl:7", fix="Look at it.")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(600)
    raise ZeroDivisionError("a fault of ours")


def arm(job: dict[str, Any]) -> None:
    """Breaks this process alone, in the middle of a run."""
    from paceline.train import prepare

    build, left = prepare.build_batch, int(job["at"])

    def build_batch(rows: Any, **settings: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            break_off(job["fault"])
        return build(rows, **settings)

    prepare.build_batch = build_batch


@app.command("rank-process")
def rank_process(
    path: Path, launch: int = 0, machines: int = 1, meet_at: str | None = None
) -> None:
    from paceline.train import current_rank, launch_training, train_draft

    if launch:
        from paceline.train import launch as launcher

        launcher._COMMAND = (__file__,)
        start_forks_of_workers()
        code = launch_training(
            [str(path)],
            num_processes=launch,
            num_machines=machines,
            meet_at=meet_at,
            device="cpu",
        )
        raise typer.Exit(code)
    from tiny import make_recipe

    from paceline.target import read_target

    job = json.loads(path.read_text())
    Path(f"{job['log']}.{current_rank()}").write_text(str(os.getpid()))
    if job.get("rank") == current_rank():
        arm(job)

    def show(progress: Any) -> None:
        with open(job["log"], "a") as file:
            file.write(json.dumps([progress.step, progress.loss, progress.row_ids]) + "\n")
        time.sleep(job.get("pause_s", 0.0))

    for number, recipe in enumerate(job.get("recipes", [job.get("recipe", {})])):
        train_draft(
            make_recipe(**recipe),
            target=read_target(job["target"]),
            data_dir=job["data"],
            out_dir=job["out"] + (f"-{number}" if number else ""),
            device="cpu",
            resume=job.get("resume", False),
            sharded_target=job.get("sharded_target", False),
            on_progress=show,
        )


def run() -> None:
    sys.argv.insert(1, "rank-process")
    main()
