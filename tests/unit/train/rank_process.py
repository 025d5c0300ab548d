"""One process of a run that test_ranks.py starts through torchrun: `rank_process.py JOB.json`.

JOB: target, data, out, recipe (as tiny.make_recipe takes it), log, and what is to go wrong where.
The first process appends one line a step to the log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from tiny import make_recipe

from paceline.cli import main
from paceline.cli.app import app
from paceline.target import read_target
from paceline.train import train_draft
from paceline.train.batches import build_batch
from paceline.train.loop import Progress

JOB: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
RANK = int(os.environ.get("RANK", "0"))


def show(progress: Progress) -> None:
    with open(JOB["log"], "a") as file:
        line = [progress.step, progress.loss, progress.position_accuracy, progress.row_ids]
        file.write(json.dumps(line) + "\n")
    if progress.step == JOB.get("stop_after"):
        os.killpg(os.getpgid(os.getppid()), signal.SIGINT) if JOB.get("all") else os.kill(
            os.getpid(), signal.SIGKILL
        )


def break_this_rank() -> None:
    """An error, a fault or a death in the middle of a run, on one process alone."""
    import paceline.train.prepare as prepare
    from paceline.errors import DataError

    left = int(JOB["break_after"])

    def build(rows: Any, **settings: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            if JOB["break_how"] == "error":
                raise DataError("the disk gave other rows", where="rows.jsonl:7", fix="Look at it.")
            if JOB["break_how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("a fault of ours")
        return build_batch(rows, **settings)

    prepare.build_batch = build


@app.command("rank-process")
def rank_process() -> None:
    torch.set_num_threads(1)
    if JOB.get("break_rank") == RANK:
        break_this_rank()
    train_draft(
        make_recipe(**JOB["recipe"]),
        target=read_target(JOB["target"]),
        data_dir=JOB["data"],
        out_dir=JOB["out"],
        device="cpu",
        resume=JOB.get("resume", False),
        sharded_target=JOB.get("sharded_target", False),
        on_progress=show,
    )


if __name__ == "__main__":
    sys.argv[1:] = ["rank-process"]
    main()
