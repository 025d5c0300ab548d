"""What the ladder starts: engines together, and the quantised target beside them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from run import PACELINE, plan_steps
from rungs import Opener, Rung

from paceline.errors import PacelineError
from paceline.serve import VllmEndpoint
from paceline.target import TargetFacts

__all__ = ["begin_quantising", "open_together", "say"]

W4A16 = {"scheme": "w4a16", "method": "gptq", "group_size": 64, "head": "w8a16"}


@contextlib.contextmanager
def open_together(
    batch: Sequence[tuple[Rung, Opener]], logs: Path
) -> Iterator[Iterator[tuple[Rung, VllmEndpoint | PacelineError]]]:
    """Engines started together, handed out one by one; each is closed when the next is asked for.

    In place of one that did not start comes its reason.
    """

    def enter(one: tuple[Rung, Opener]) -> tuple[contextlib.ExitStack, Any]:
        own = contextlib.ExitStack()
        try:
            return own, own.enter_context(one[1](logs / f"{one[0].name}.log"))
        except PacelineError as problem:
            return own, problem

    with contextlib.ExitStack() as stack:
        if len(batch) == 1:  # the main thread's own child: it dies with this process
            started = [enter(batch[0])]
        else:
            with ThreadPoolExecutor(len(batch)) as pool:
                started = list(pool.map(enter, batch))
        for own, _ in started:
            stack.push(own)

        def hand_out() -> Iterator[tuple[Rung, VllmEndpoint | PacelineError]]:
            for (rung, _), (own, endpoint) in zip(batch, started, strict=True):
                yield rung, endpoint
                own.close()

        yield hand_out()


def begin_quantising(
    target: TargetFacts, work: Path, *, device: str, data: Path | None, num_answers: int
) -> tuple[Path | None, subprocess.Popen[bytes] | None]:
    """(W4A16 folder, the process that is making it), by the commands of recipes/adaptfm/run.py.

    No process where the folder is there already. data: answers made before; without them they are
    made first, and only the quantising goes on beside the caller. No folder where that failed.
    """
    recipe = {"target": W4A16, "draft": {"family": "suffix", "k": 8}}
    steps = plan_steps(
        recipe,
        target,
        work,
        device=device,
        regimes=[],
        num_steps=0,
        num_requests=1,
        num_answers=num_answers,
    )
    made = Path(steps.target)
    for row in steps.open_rows:
        say(f"open: {row}")
    if made.exists():
        return made, None
    answer, quantise = steps.commands[:2]
    if data is not None:
        quantise[quantise.index("--data") + 1] = str(data)
    else:
        say("paceline " + " ".join(answer))
        if subprocess.run([*PACELINE, *answer]).returncode:
            return None, None
    say("paceline " + " ".join(quantise))
    return made, subprocess.Popen([*PACELINE, *quantise])


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
