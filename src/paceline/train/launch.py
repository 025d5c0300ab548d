"""Starts the processes that train together, through torchrun's own agent; one message at the end.

One machine needs a number of processes; several also need where they meet. Each process is the same
command again, which finds RANK and WORLD_SIZE in its environment and joins the others (ranks.py).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from typing import Any

from paceline.errors import PacelineError, RecipeError

__all__ = ["current_rank", "launch_training", "world_size"]

_MEETING_S = 300
_COMMAND = ("-c", "from paceline.cli import main; main()")


def world_size() -> int:
    """How many processes train together, as the launcher said; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def current_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def launch_training(
    words: Sequence[str],
    *,
    num_processes: int,
    num_machines: int = 1,
    meet_at: str | None = None,
    device: str | None = None,
) -> int:
    """Runs `paceline WORDS` in num_processes processes here; the exit code of the first to fail.

    With num_machines > 1 the same call runs on each, and `meet_at` ("host:port", on the first of
    them) is where they find one another. Whoever fails has printed why. Raises RecipeError for
    settings that cannot work, PacelineError when a process was killed or machines stayed away.
    """
    _check(num_processes, num_machines, meet_at, device)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the agent's; every word of ours is printed by a process
    alone = num_machines == 1
    with tempfile.TemporaryDirectory(prefix="paceline-train-") as folder:
        config = LaunchConfig(
            min_nodes=num_machines,
            max_nodes=num_machines,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex if alone else "paceline-train",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0" if alone else str(meet_at),
            rdzv_configs={"timeout": _MEETING_S, "join_timeout": _MEETING_S},
            local_addr="127.0.0.1" if alone else None,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)(*_COMMAND, *words)
        except ChildFailedError as failed:
            return _told(failed)
        except SignalException as stopped:
            return 130 if stopped.sigval == signal.SIGINT else 128 + int(stopped.sigval)
        except RendezvousError as problem:
            raise PacelineError(
                f"the machines did not find one another: {problem}",
                where=str(meet_at),
                expected=f"{num_machines} machines within {_MEETING_S // 60} minutes",
                fix="Run the same command on each, and let them reach the first one's port.",
                exit_code=6,
            ) from None
    return 0


def _told(failed: Any) -> int:
    """The first failure's exit code; the message of a process that could not print its own."""
    rank, first = failed.get_first_failure()
    code = int(first.exitcode)
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    raise PacelineError(
        f"training process {rank} was killed ({name})",
        expected="enough memory for every process, and nobody who ends one",
        fix="Set optim.tokens_per_part or lower optim.feature_cache_bytes if memory ran out; go on "
        "with the same command and --resume.",
        exit_code=4,
    )


def _check(num_processes: int, num_machines: int, meet_at: str | None, device: str | None) -> None:
    if (num_machines > 1) != (meet_at is not None):
        raise RecipeError(
            "several machines need a place to meet, and one needs none",
            expected="--nnodes above 1 and --meet-at HOST:PORT together",
        )
    if meet_at is not None and not meet_at.rpartition(":")[2].isdigit():
        raise RecipeError(f"--meet-at is {meet_at!r}", expected="HOST:PORT of the first machine")
    import torch

    num = torch.cuda.device_count() if device != "cpu" else 0
    if num == 0:
        threads = max(1, (os.cpu_count() or 1) // num_processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    elif num < num_processes:
        raise RecipeError(
            f"--nproc-per-node is {num_processes}",
            expected=f"at most {num}, the GPUs of this machine",
        )
