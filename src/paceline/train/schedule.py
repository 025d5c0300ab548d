"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.train.recipe import Optim

__all__ = ["SCHEDULES", "learning_rate"]

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done: 1.0 - done,
    "constant": lambda done: 1.0,
}


def learning_rate(optim: Optim, step: int, *, num_steps: int) -> float:
    """The rate step `step` uses, counted from 1: a ramp, then the schedule down to 0.

    A pure function of the step number, so a resumed run cannot get it wrong (U29): warmup 5,
    20 steps, linear, peak 1e-3 gives 6.667e-4 at step 10.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, num_steps - optim.warmup_steps)
    return optim.lr * SCHEDULES[optim.schedule](min(1.0, done))
