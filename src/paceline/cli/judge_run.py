"""What `paceline judge run` measures with: engines, hidden questions, and what may be said of them.

The hidden prompts are read here and live in this process's memory; everything that anything prints
while they are asked goes through the judge's screen.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.arms import Arm
from paceline.cli.console import say
from paceline.cli.disk import told_when_full
from paceline.cli.measure import (
    Questions,
    build_questions,
    measure_endpoints,
    measure_in_cycles,
    plan_arms,
)
from paceline.cli.run_draft import add_run
from paceline.errors import DataError, PacelineError

if TYPE_CHECKING:
    from paceline.data import PromptSet, Thinking
    from paceline.endpoint import Endpoint
    from paceline.judge import Screen, Task
    from paceline.rules import Rules
    from paceline.target import TargetFacts
    from paceline.validate import Report

__all__ = ["Bench", "build_bench"]

_ORDER_SEED = 1
_ENGINE_S = 4 * 3600.0  # of one server, asked every prompt once


@dataclass(frozen=True, kw_only=True)
class Bench:
    """measure: makes one run. boot: what `paceline validate --run` adds to a report.

    pinned: setting -> (value, what it is), the same for every worker.
    notes: what the organiser should know of this machine, such as walls that the sandbox lacks.
    devices: what one worker at a time may have.
    """

    target: TargetFacts
    screen: Screen
    measure: Callable[[Task], None]
    boot: Callable[[Report, Path], Report]
    parts: tuple[str, ...]
    pinned: dict[str, tuple[str, str]]
    notes: tuple[str, ...]
    devices: tuple[str, ...]


def build_bench(
    *,
    target_name: str,
    hidden: str,
    twin: str | None,
    shuffle: bool,
    baseline: str,
    rules: Rules,
    thinking: Thinking,
    device: str | None,
    num_cycles: int | None,
) -> Bench:
    """Reads everything that must be right before an entry is taken. Raises DataError."""
    from paceline.data import read_prompts
    from paceline.draft import read_draft, resolve_draft
    from paceline.judge import build_screen, screened_output
    from paceline.methods import METHODS
    from paceline.serve import find_isolation
    from paceline.target import read_target

    secret = _read_hidden(hidden)
    public = [read_prompts("train"), *([read_prompts(twin)] if twin else [])]
    screen = build_screen(_texts(secret), [text for prompts in public for text in _texts(prompts)])
    target = read_target(target_name)
    with _screened_errors(screen), screened_output(screen):
        questions = {"hidden": build_questions(hidden, target, rules, thinking=thinking)}
        if shuffle:
            questions["shuffled"] = _reorder(questions["hidden"])
        if twin:
            questions["twin"] = build_questions(twin, target, rules, thinking=thinking)
        longest = max(asked.longest for asked in questions.values())
        arms = {"baseline": baseline, "plain": "none"}  # what is wrong without any entry, at once
        plan_arms(target, arms, rules, num_tokens=longest, device=device)

    def measure(task: Task) -> None:
        with screened_output(screen):
            _measure(
                task.run_dir,
                plan_arms(
                    target,
                    {"baseline": baseline, "candidate": str(task.draft_dir), "plain": "none"},
                    rules,
                    num_tokens=questions[task.part].longest,
                    device=device,
                    twice=num_cycles is not None,
                ),
                target,
                rules,
                questions[task.part],
                num_cycles=num_cycles,
            )

    def boot(report: Report, folder: Path) -> Report:
        with screened_output(screen):
            return add_run(report, folder, target, rules, run=True, run_tokens=None, quiet=False)

    has_folder = baseline not in METHODS or METHODS[baseline].has_weights
    base = read_draft(resolve_draft(baseline)).sha256 if has_folder else baseline
    pinned = {
        "prompts": (secret.sha256, "hidden prompts"),
        "target": (f"{target.weights_fingerprint} {target.tokenizer_sha256}", "target"),
        "baseline": (base, "baseline"),
        "parts": (" ".join(questions), "runs an entry (--twin, --shuffle)"),
        "cycles": (str(num_cycles), "--cycles"),
    }
    if twin:
        pinned["twin"] = (questions["twin"].sha256, "public twin prompts")
    return Bench(
        target=target,
        screen=screen,
        measure=measure,
        boot=boot,
        parts=tuple(questions),
        pinned=pinned,
        notes=tuple(f"sandbox: {text}" for text in find_isolation().missing),
        devices=_list_devices(device),
    )


def _list_devices(device: str | None) -> tuple[str, ...]:
    """What this worker measures on, each thing by itself: GPUs that it may see, or the CPU."""
    gpus = sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    if device == "cpu" or (device is None and not gpus):
        return ("cpu",)
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = gpus if stated is None else [part.strip() for part in stated.split(",") if part.strip()]
    return tuple(f"cuda:{number}" for number in ids) or ("cuda",)


def _measure(
    run_dir: Path,
    arms: list[Arm],
    target: TargetFacts,
    rules: Rules,
    questions: Questions,
    *,
    num_cycles: int | None,
) -> None:
    """One run by the protocol of `paceline eval`, every engine in the sandbox."""
    from paceline.eval import Cycles, add_noise_floor, find_noise_floor, write_result
    from paceline.records import read_json

    if num_cycles is not None:
        cycles = Cycles(num_cycles=num_cycles)
        measure_in_cycles(
            cycles, arms, target, rules, questions, out=run_dir, open_one=_open_confined
        )
    else:
        with contextlib.ExitStack() as stack:
            engines = {arm.name: stack.enter_context(_open_confined(arm, run_dir)) for arm in arms}
            measure_endpoints(engines, arms, target, rules, questions, out=run_dir)
    result = read_json(run_dir / "result.json")
    write_result(run_dir, add_noise_floor(result, find_noise_floor(result), rules))


@contextlib.contextmanager
def _open_confined(arm: Arm, run_dir: Path) -> Iterator[Endpoint]:
    from paceline.serve import open_confined

    say(f"starting {arm.name} ({arm.plan.method}) on vLLM, confined ...")
    log_path = run_dir / f"engine-{arm.name}.log"
    with (
        told_when_full(run_dir),
        open_confined(arm.plan, log_path=log_path, time_s=_ENGINE_S) as endpoint,
    ):
        yield endpoint


def _read_hidden(path: str) -> PromptSet:
    """The hidden prompts; what is wrong with them is told by line number alone."""
    from paceline.data import read_prompts

    try:
        prompts = read_prompts(path)
    except PacelineError:
        exists = Path(path).expanduser().is_file()
        raise DataError(
            "the hidden prompts cannot be read" if exists else "there is no such prompt file",
            where=path,
            expected="a JSONL file of prompts",
            fix="Look at it where nobody else does; its lines are not quoted here."
            if exists
            else "",
        ) from None
    if prompts.rejected:
        lines = ", ".join(str(line) for line, _ in prompts.rejected[:10])
        raise DataError(
            f"{len(prompts.rejected)} of the hidden prompts cannot be used: lines {lines}",
            where=path,
            expected="every line a prompt, for a contest is measured on all of them",
        )
    return prompts


def _texts(prompts: PromptSet) -> list[str]:
    """Every message, and ids that were given by hand."""
    own = [message["content"] for prompt in prompts.prompts for message in prompt.messages]
    return [*own, *(prompt.prompt_id for prompt in prompts.prompts)]


def _reorder(questions: Questions) -> Questions:
    prompts = list(questions.prompts)
    random.Random(_ORDER_SEED).shuffle(prompts)
    return replace(questions, prompts=tuple(prompts))


@contextlib.contextmanager
def _screened_errors(screen: Screen) -> Iterator[None]:
    """Errors leave the block without hidden words."""
    from paceline.judge import screen_error

    try:
        yield
    except PacelineError as problem:
        raise type(problem)(screen_error(screen, problem)) from None
