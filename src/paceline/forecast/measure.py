"""Step times of engines by shape: two engines side by side, asked in turn, pair by pair.

The reference is alive while every other configuration is measured, so a slow minute of the machine
slows both halves of a pair. Starting an engine is the host's work and takes longer than measuring
it: several may start at once and wait their turn, idle, beside each other. Each finished
configuration is one line of steps.jsonl; the same command goes on where it was stopped. Who starts
an engine is handed in: nothing here knows vLLM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
import numpy.typing

from paceline.endpoint import Answer, Endpoint, Request, Sampling
from paceline.errors import EngineError, PacelineError
from paceline.forecast.measure_plan import Configuration, MeasurePlan
from paceline.forecast.shape import TargetShape
from paceline.forecast.steps import (
    StepPoint,
    StepRun,
    append_run,
    configuration_key,
    read_runs,
    shape_sha256,
)
from paceline.records import build_provenance

__all__ = ["Measured", "build_point", "measure_steps"]

_LOG = logging.getLogger(__name__)
_RESAMPLES = 2000
_WARM_UP_TOKENS = 16
_CONTEXT_TOKENS = 16384
_MOST = 3  # times the planned pairs
_SETTLED = 0.01

_Floats = numpy.typing.NDArray[numpy.float64]
_Ints = numpy.typing.NDArray[numpy.int64]
Open = Callable[[Configuration], contextlib.AbstractContextManager[Endpoint]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one call did. runs: all of the plan that the file now holds, in the plan's order.
    failed: name -> why its engine gave no figure. left: names that the time did not reach."""

    runs: tuple[StepRun, ...]
    num_cached: int
    failed: dict[str, str]
    left: tuple[str, ...]


def measure_steps(
    plan: MeasurePlan,
    shape: TargetShape,
    open_endpoint: Open,
    *,
    path: Path,
    machine: str,
    engine: str,
    minutes: float | None = None,
    at_once: int = 1,
    seed: int = 0,
    settings: dict[str, object] | None = None,
) -> Measured:
    """Measures what the file does not hold yet, the reference first.

    minutes: no configuration is started that would, by its estimate or the longest so far, end
    later. at_once: engines that start together beside the reference and stay until all of them are
    measured; the device must hold them. settings: of the engines, part of the key. Raises
    EngineError when the reference gives no figure: without it nothing can be paired.
    """
    begun = time.monotonic()
    file_keys = {run.key: run for run in read_runs(path)} if path.exists() else {}
    common = {
        "lengths": list(plan.lengths),
        "num_repeats": plan.num_repeats,
        "max_tokens": plan.max_tokens,
        "seed": seed,
        **(settings or {}),
    }
    order = [plan.reference, *plan.configurations]
    keys = {
        one.name: configuration_key(
            machine=machine,
            engine=engine,
            target_sha256=shape_sha256(shape),
            design=one.design,
            acceptance_length=one.acceptance_length,
            settings=common,
        )
        for one in order
    }
    waiting = [one for one in order if keys[one.name] not in file_keys]
    num_cached = len(order) - len(waiting)
    failed: dict[str, str] = {}
    left: list[str] = []
    longest = 0.0

    def finish(one: Configuration, endpoint: Endpoint, points: tuple[StepPoint, ...]) -> None:
        k = one.design.num_speculative_tokens if one.design else 0
        run = StepRun(
            key=keys[one.name],
            machine=machine,
            engine=engine,
            target=shape.facts.name,
            target_sha256=shape_sha256(shape),
            arm=_arm(one, plan),
            name=one.name,
            settings=dict(one.settings),
            num_speculative_tokens=k,
            acceptance_length=one.acceptance_length,
            reference=None if one is plan.reference else keys[plan.reference.name],
            points=points,
            memory=_read_memory(endpoint) if one.design is not None else None,
            start_s=endpoint.facts.start_s,
            provenance=build_provenance(seed=seed),
        )
        append_run(path, run)
        file_keys[run.key] = run

    def has_time(batch: Sequence[Configuration]) -> bool:
        if minutes is None:
            return True
        needed = max(longest, *((one.minutes or 0.0) * 60 for one in batch))
        return time.monotonic() - begun + needed <= minutes * 60

    if waiting:
        _LOG.info("starting the reference, %s", plan.reference.name)
        with open_endpoint(plan.reference) as reference:
            if plan.reference in waiting:
                finish(plan.reference, reference, _ask(plan, shape, reference, None, seed))
                waiting.remove(plan.reference)
            for number in range(0, len(waiting), at_once):
                batch = waiting[number : number + at_once]
                if not has_time(batch):
                    left = [later.name for later in waiting[number:]]
                    break
                started = time.monotonic()
                names = ", ".join(one.name for one in batch)
                _LOG.info("%s: %d of %d left", names, len(waiting) - number, len(waiting))
                with _open_all(open_endpoint, batch) as opened:
                    for one, endpoint in zip(batch, opened, strict=True):
                        try:
                            if isinstance(endpoint, PacelineError):
                                raise endpoint
                            finish(one, endpoint, _ask(plan, shape, endpoint, reference, seed))
                        except PacelineError as problem:
                            _LOG.info("%s gave no figure", one.name)
                            failed[one.name] = str(problem)
                longest = max(longest, time.monotonic() - started)
    return Measured(
        runs=tuple(file_keys[keys[one.name]] for one in order if keys[one.name] in file_keys),
        num_cached=num_cached,
        failed=failed,
        left=tuple(left),
    )


@contextlib.contextmanager
def _open_all(
    open_endpoint: Open, batch: Sequence[Configuration]
) -> Iterator[list[Endpoint | PacelineError]]:
    """Started together, in the batch's order; the reason in place of one that did not start."""

    def enter(one: Configuration) -> tuple[contextlib.ExitStack, Endpoint | PacelineError]:
        own = contextlib.ExitStack()
        try:
            return own, own.enter_context(open_endpoint(one))
        except PacelineError as problem:
            return own, problem

    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(batch)) as pool:
            futures = [pool.submit(enter, one) for one in batch]
            for future in futures:
                future.add_done_callback(lambda done: stack.push(done.result()[0]))
        yield [future.result()[1] for future in futures]


def _arm(one: Configuration, plan: MeasurePlan) -> str:
    if one.design is None:
        return "plain"
    return "baseline" if one is plan.reference or one.design.family == "mtp" else "design"


def _read_memory(endpoint: Endpoint) -> dict[str, int] | None:
    found = endpoint.memory(context_tokens=_CONTEXT_TOKENS)
    if found is None:
        return None
    names = ("weights_bytes", "buffers_bytes", "kv_bytes", "state_bytes", "total_bytes")
    return {"context_tokens": _CONTEXT_TOKENS, **{name: getattr(found, name) for name in names}}


def _ask(
    plan: MeasurePlan,
    shape: TargetShape,
    endpoint: Endpoint,
    reference: Endpoint | None,
    seed: int,
) -> tuple[StepPoint, ...]:
    """One point a length: a warm-up each, then pairs in turn, who is first changing every time.

    After the planned pairs it goes on, to three times as many, until the two fastest answers of
    either side agree within 1 %: what a shared host does to an answer only slows it down, and the
    fastest is then hardly disturbed.
    """
    points = []
    for length in plan.lengths:
        dice = numpy.random.default_rng([seed, length])
        both = [endpoint] if reference is None else [endpoint, reference]
        for one in both:
            _answer(one, _make_request(shape, dice, length, _WARM_UP_TOKENS))
        answers: list[list[Answer]] = [[] for _ in both]
        for repeat in range(_MOST * plan.num_repeats):
            if repeat >= plan.num_repeats and all(_has_settled(side) for side in answers):
                break
            request = _make_request(shape, dice, length, plan.max_tokens)
            sides = list(range(len(both)))
            for side in sides if repeat % 2 == 0 else reversed(sides):
                answers[side].append(_answer(both[side], request))
        points.append(
            build_point(
                answers[0],
                answers[1] if reference is not None else None,
                context_tokens=length + plan.max_tokens // 2,
                seed=seed,
            )
        )
    return tuple(points)


def _has_settled(answers: Sequence[Answer]) -> bool:
    first, second = sorted(_step_ms(answer) for answer in answers)[:2]
    return second <= first * (1 + _SETTLED)


def _make_request(
    shape: TargetShape, dice: numpy.random.Generator, length: int, max_tokens: int
) -> Request:
    ids = dice.integers(0, shape.facts.vocab_size, length)
    return Request(
        request_id=f"{length}-{max_tokens}",
        prompt_ids=tuple(int(token) for token in ids),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
    )


def _answer(endpoint: Endpoint, request: Request) -> Answer:
    (answer,) = endpoint.generate([request])
    if len(answer.chunk_times_s) < 3:
        raise EngineError(
            f"the answer came in {len(answer.chunk_times_s)} steps",
            expected="at least 3 for a step time",
            fix="Ask for more tokens (--max-tokens).",
        )
    return answer


def build_point(
    own: Sequence[Answer],
    reference: Sequence[Answer] | None,
    *,
    context_tokens: int,
    seed: int = 0,
) -> StepPoint:
    """Step time from paired answers: own[i] and reference[i] were asked one after the other.

    A step is the time between two chunks: (last - first chunk) / (chunks - 1). Medians over
    repeats; intervals by resampling repeats, pairs kept together.
    """
    steps = numpy.array([_step_ms(answer) for answer in own])
    dice = numpy.random.default_rng(seed)
    picks = dice.integers(0, len(steps), (_RESAMPLES, len(steps)))
    low, high = _interval(steps, picks)
    delivered = sum(len(a.output_ids) - a.chunk_tokens[0] for a in own)
    num_steps = sum(len(a.chunk_times_s) - 1 for a in own)
    tpots = [answer.tpot_ms for answer in own]
    point = StepPoint(
        context_tokens=context_tokens,
        num_repeats=len(own),
        step_ms=float(numpy.median(steps)),
        step_ms_low=low,
        step_ms_high=high,
        tpot_ms=float(numpy.median([t for t in tpots if t is not None])),
        acceptance_length=delivered / num_steps,
        reference_ms=None,
        ratio=None,
        ratio_low=None,
        ratio_high=None,
        repeats_ms=tuple(float(step) for step in steps),
    )
    if reference is None:
        return point
    others = numpy.array([_step_ms(answer) for answer in reference])
    ratios = steps / others
    ratio_low, ratio_high = _interval(ratios, picks)
    return dataclasses.replace(
        point,
        reference_ms=float(numpy.median(others)),
        ratio=float(numpy.median(ratios)),
        ratio_low=ratio_low,
        ratio_high=ratio_high,
    )


def _step_ms(answer: Answer) -> float:
    times = answer.chunk_times_s
    return (times[-1] - times[0]) * 1000.0 / (len(times) - 1)


def _interval(values: _Floats, picks: _Ints) -> tuple[float, float]:
    medians = numpy.median(values[picks], axis=1)
    low, high = numpy.quantile(medians, [0.025, 0.975])
    return float(low), float(high)
