"""One plan several times beside one another: each engine on a GPU, or a share of the cores, of its
own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from paceline.errors import PlanError
from paceline.serve.plan import Plan

__all__ = ["find_gpus", "spread_plan"]


def find_gpus() -> tuple[str, ...]:
    """The GPUs that this process may see, as CUDA_VISIBLE_DEVICES names them: CUDA counts from 0
    what it finds, whatever the numbers of the devices are (a container may see nvidia3 alone)."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    if stated is not None:
        return tuple(part.strip() for part in stated.split(",") if part.strip())
    found = Path("/dev").glob("nvidia[0-9]*")
    return tuple(str(number) for number, _ in enumerate(found))


def spread_plan(plan: Plan, num: int) -> list[Plan]:
    """`num` plans that answer alike. Raises PlanError where there are fewer GPUs, or cores."""
    if num == 1:
        return [plan]
    cores = len(os.sched_getaffinity(0))
    gpus = find_gpus() if plan.device == "cuda" else ()
    num_places = len(gpus) if plan.device == "cuda" else cores
    if num > num_places:
        kind = "GPU" if plan.device == "cuda" else "core"
        raise PlanError(
            f"{num} engines at once, and this machine has {num_places} {kind}"
            + ("" if num_places == 1 else "s"),
            expected=f"a {kind} for each engine",
            fix=f"Use --data-parallel {num_places}." if num_places > 1 else "Leave it out.",
        )
    if plan.device == "cuda":
        return [replace(plan, env={**plan.env, "CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:num]]
    threads = cores // num
    env = {**plan.env, "OMP_NUM_THREADS": str(threads)}
    return [replace(plan, num_threads=threads, env=env) for _ in range(num)]
