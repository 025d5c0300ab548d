"""One plan several times beside one another: each engine on a GPU, or a share of the cores, of its
own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from paceline.errors import PlanError
from paceline.serve.install import find_device
from paceline.serve.plan import Plan

__all__ = ["find_gpus", "require_places", "spread_plan"]


def find_gpus() -> tuple[str, ...]:
    """The GPUs that this process may see, as CUDA_VISIBLE_DEVICES names them: CUDA counts from 0
    what it finds, whatever the numbers of the devices are (a container may see nvidia3 alone)."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    if stated is not None:
        return tuple(part.strip() for part in stated.split(",") if part.strip())
    found = Path("/dev").glob("nvidia[0-9]*")
    return tuple(str(number) for number, _ in enumerate(found))


def require_places(num: int, device: str | None) -> None:
    """Raises PlanError where there are fewer GPUs, or cores, than engines."""
    kind = "GPU" if (device or find_device()) == "cuda" else "core"
    places = len(find_gpus()) if kind == "GPU" else len(os.sched_getaffinity(0))
    if 1 < num > places:
        raise PlanError(
            f"{num} engines at once, and this machine has {places} {kind}"
            + ("" if places == 1 else "s"),
            expected=f"a {kind} for each engine",
            fix=f"Use --data-parallel {places}." if places > 1 else "Leave --data-parallel out.",
        )


def spread_plan(plan: Plan, num: int) -> list[Plan]:
    """`num` plans that answer alike. Raises PlanError where there is no room for so many."""
    require_places(num, plan.device)
    if num == 1:
        return [plan]
    if plan.device == "cuda":
        gpus = find_gpus()[:num]
        return [replace(plan, env={**plan.env, "CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus]
    threads = len(os.sched_getaffinity(0)) // num
    env = {**plan.env, "OMP_NUM_THREADS": str(threads)}
    return [replace(plan, num_threads=threads, env=env) for _ in range(num)]
