"""Which vLLM server answers: started, watched, replaced with the requests it held in mind.

One server answers at a time. It is replaced when it dies or hangs, when its draft stops helping, or
when the operator asks. Requests wait at the gate while there is none; those that a lost server held
are asked again by who relays them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import EngineError
from paceline.serve.back import Back
from paceline.serve.exposition import FrontMetrics, read_sample
from paceline.serve.plan import Plan
from paceline.serve.watch import AcceptanceWatch, read_counters

__all__ = ["Conductor", "Operation"]

_MAX_FAILURES = 3  # servers in a row that answered nothing
_SIGNS_OF_LIFE = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",  # grows while a long prompt is read
)
_LOOK_S = 1.0
_PAUSE_S = 10.0  # between two looks; a server that does not answer is asked for half as long


@dataclass(frozen=True, kw_only=True)
class Operation:
    """How a served target is run.

    min_acceptance: acceptance length below which the draft does not help, over window_steps
    drafting steps. switches_off: then go on without the draft; else only say so. beside: keep the
    target alone ready as a spare (memory for both); else a next server starts after the old one.
    max_held: requests asked or waiting at once; beyond it they are refused. drain_s: how long the
    end, or a change of servers, waits for answers. silence_s: a server that makes no token for so
    long while it holds requests has hung. start_s: for a server's start.
    """

    min_acceptance: float = 1.2
    window_steps: int = 1000
    switches_off: bool = True
    beside: bool = False
    max_held: int = 1024
    drain_s: float = 30.0
    silence_s: float = 120.0
    start_s: float = 900.0


class Conductor:
    """The server that answers and its replacement. `plain` is the plan without the draft.

    tell: called with one line for whatever an operator should know.
    """

    def __init__(
        self,
        plan: Plan,
        plain: Plan,
        operation: Operation,
        *,
        log_path: Path,
        metrics: FrontMetrics,
        tell: Callable[[str], None],
    ) -> None:
        self.operation = operation
        self.metrics = metrics
        self.watch = AcceptanceWatch(
            minimum=operation.min_acceptance, window=operation.window_steps
        )
        self.current: Back | None = None
        self.failure: BaseException | None = None
        self.is_weak = False
        self._plan, self._plain = plan, plain
        self._log_path, self._tell = log_path, tell
        self._changed = asyncio.Condition()
        self._lock = asyncio.Lock()
        self._num_failures = 0
        self._told_weak: set[str] = set()
        self._backs: set[Back] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spare: asyncio.Task[Back | None] | None = None
        self._progress: tuple[list[float], float] = ([], 0.0)  # signs of life, and since when
        self._looked_at = time.monotonic()
        metrics.minimum.set(operation.min_acceptance)

    @property
    def max_model_len(self) -> int:
        return self._plan.max_model_len

    @property
    def has_draft(self) -> bool:
        """Whether the server that answers drafts."""
        return self.current is not None and self.current.plan.method != "none"

    async def start(self) -> None:
        """Starts the first server. Raises EngineError."""
        self._install(await self._open(self._plan))
        self._spawn(self._look())

    async def acquire(self) -> Back:
        """The server to ask now; waits while there is none. Raises `failure` when none comes."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.current or self.failure)
        if self.failure is not None:
            raise self.failure
        assert self.current is not None
        return self.current

    async def report(self, back: Back) -> bool:
        """A request failed on `back`: whether the server, and not the request, is to blame."""
        if not back.is_lost and await back.has_died():
            self._lose(back, "died")
        return back.is_lost

    def ask_switch(self, *, drafts: bool, reason: str) -> None:
        """Goes on without the draft, or with it again. Nothing where that is so already."""
        if self.current is not None and self._plan.method != "none":
            wanted = self._plan if drafts else self._plain
            if self.current.plan is not wanted:
                self._spawn(self._switch(wanted, reason))

    async def close(self) -> None:
        """Ends every server; requests that still wait for one get an EngineError."""
        self.failure = self.failure or EngineError("the server is ending")
        await self._notify()
        tasks = [*self._tasks, *([self._spare] if self._spare else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(back.stop() for back in self._backs))

    async def _open(self, plan: Plan) -> Back:
        back = Back(plan, log_path=self._log_path)
        self._backs.add(back)
        try:
            await back.start(timeout_s=self.operation.start_s)
        except BaseException:
            await self._end(back)
            raise
        return back

    async def _end(self, back: Back) -> None:
        await back.stop()
        self._backs.discard(back)

    async def _open_spare(self) -> Back | None:
        try:
            return await self._open(self._plain)
        except EngineError as problem:
            self._tell(f"there is no spare server: {problem}")
            return None

    async def _take(self, plan: Plan) -> Back:
        """A started server of the plan: the spare where it is one and lives. Raises EngineError."""
        if plan is self._plain and self._spare is not None:
            spare = await self._spare
            self._spare = None
            if spare is not None and await spare.is_healthy():
                return spare
            if spare is not None:
                await self._end(spare)
        return await self._open(plan)

    def _install(self, back: Back) -> None:
        self.current = back
        self.is_weak = False
        self._told_weak.clear()
        self.watch.forget()
        self._progress = ([], time.monotonic())
        self.metrics.draft_on.set(back.plan.method != "none")
        self.metrics.draft_helps.set(1)
        self._spawn(self._notify())
        if self.operation.beside and self._spare is None:
            self._spare = asyncio.get_running_loop().create_task(self._open_spare())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure, self.current = error, None
            self._spawn(self._notify())

    def _lose(self, back: Back, what: str) -> None:
        if back.is_lost:  # noticed by several requests at once
            return
        back.is_lost = True
        self.metrics.lost.inc()
        if back is self.current:
            self.current = None
            self._tell(
                f"the vLLM server {what} with {back.num_carried} requests in flight; they are asked"
                " again of the next one"
            )
            self._spawn(self._recover(back, what))

    async def _recover(self, back: Back, what: str) -> None:
        """After a loss: without the draft, whatever it was."""
        async with self._lock:
            error = back.failure(what)
            await self._end(back)
            self._num_failures = 0 if back.num_answered else self._num_failures + 1
            if self.current is None:
                await self._go_plain(error, what)

    async def _go_plain(self, error: EngineError, reason: str) -> None:
        """Starts the target alone, again if need be. Raises the last error after several in a row
        that answered nothing."""
        while self._num_failures < _MAX_FAILURES:
            try:
                self._install(await self._take(self._plain))
            except EngineError as problem:
                error = problem
                self._num_failures += 1
            else:
                self.metrics.switches.labels(reason).inc()
                self._tell("answers go on without a draft")
                return
        raise error

    async def _switch(self, plan: Plan, reason: str) -> None:
        async with self._lock:
            old = self.current
            if old is None or old.plan is plan:
                return
            if self.operation.beside:
                try:
                    new = await self._take(plan)
                except EngineError as problem:
                    self._tell(f"the next server did not start, the old one goes on: {problem}")
                    return
                if self.current is None:  # lost meanwhile: its own recovery finds the new one
                    old = None
                self._install(new)
                if old is not None:
                    self._spawn(self._retire(old))
            else:
                self.current = None
                await self._wait_idle(old)
                await self._end(old)
                try:
                    self._install(await self._open(plan))
                except EngineError as problem:
                    self._tell(f"the next server did not start: {problem}")
                    self._num_failures += 1
                    await self._go_plain(problem, reason)
                    return
            self.metrics.switches.labels(reason).inc()
            self._tell(f"answers go on {'without a' if plan is self._plain else 'with the'} draft")

    async def _retire(self, back: Back) -> None:
        await self._wait_idle(back)
        await self._end(back)

    async def _wait_idle(self, back: Back) -> None:
        """Until it holds no request; what takes longer than drain_s is asked again elsewhere."""
        deadline = time.monotonic() + self.operation.drain_s
        while back.num_carried and not back.is_lost and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            back = self.current
            if back is None:
                continue
            if back.has_exited():
                self._lose(back, "died")
                continue
            text = await back.read_metrics()
            if back is self.current:
                self._look_for_silence(back, text)
                self._look_at_draft(back, text)

    def _look_for_silence(self, back: Back, text: str | None) -> None:
        before, since = self._progress
        now = time.monotonic()
        paused = now - self._looked_at > _PAUSE_S  # this process stood still too, or the machine
        self._looked_at = now
        found = [read_sample(text, name) or 0.0 for name in _SIGNS_OF_LIFE] if text else before
        if found != before or not back.num_carried or paused:
            self._progress = (found, now)
        elif now - since > self.operation.silence_s:
            self._lose(back, f"made no token for {self.operation.silence_s:g} s")

    def _look_at_draft(self, back: Back, text: str | None) -> None:
        if back.plan.method == "none" or text is None:
            return
        self.watch.read(read_counters(text))
        for name, window in (("*", self.watch.overall), *self.watch.categories.items()):
            if window.acceptance_length is not None:
                self.metrics.length.labels(name).set(window.acceptance_length)
        minimum = self.operation.min_acceptance
        for name in self.watch.weak_categories():
            if name not in self._told_weak:
                self._told_weak.add(name)
                length = self.watch.categories[name].acceptance_length
                self._tell(
                    f"the draft does not help category {name!r}: acceptance length {length:.2f},"
                    f" below {minimum:g}"
                )
        if self.watch.is_weak and not self.is_weak:
            self.is_weak = True
            self.metrics.draft_helps.set(0)
            self._tell(
                f"the draft stopped helping: acceptance length"
                f" {self.watch.overall.acceptance_length:.2f} over the last"
                f" {self.watch.overall.num_steps} steps, below {minimum:g}"
            )
            if self.operation.switches_off:
                self.ask_switch(drafts=False, reason="weak draft")
