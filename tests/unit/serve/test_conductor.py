"""Which server answers after which event; the servers themselves are scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline.errors import EngineError
from paceline.serve import Operation, build_plain_plan, build_plan, conductor
from paceline.serve.conductor import Conductor
from paceline.serve.exposition import FrontMetrics, read_sample
from paceline.serve.plan import Plan
from paceline.target import TargetFacts

Scene = Callable[[Conductor], Awaitable[None]]


class ScriptedBack:
    """Starts at once; `refuse` makes the next starts fail."""

    made: ClassVar[list[ScriptedBack]] = []
    refuse = 0

    def __init__(self, plan: Plan, *, log_path: Path) -> None:
        self.plan, self.num_carried, self.is_lost = plan, 0, False
        self.num_answered = 1
        self.is_ended = self.is_dead = False
        self.metrics = ""

    async def start(self, *, timeout_s: float) -> float:
        ScriptedBack.made.append(self)
        if ScriptedBack.refuse:
            ScriptedBack.refuse -= 1
            raise EngineError("no memory is left")
        return 0.0

    def has_exited(self) -> bool:
        return self.is_dead

    async def has_died(self) -> bool:
        await asyncio.sleep(0)  # as long as a probe takes, others ask the same
        return self.is_dead

    async def is_healthy(self) -> bool:
        return not self.is_dead

    async def read_metrics(self) -> str:
        return self.metrics

    def failure(self, what: str) -> EngineError:
        return EngineError(f"the engine {what}")

    async def stop(self) -> None:
        self.is_lost = self.is_ended = True


@pytest.fixture
def play(
    make_target: Callable[..., TargetFacts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Runs a scene on a conductor of scripted servers; what an operator was told."""
    monkeypatch.setattr(conductor, "Back", ScriptedBack)
    monkeypatch.setattr(conductor, "_LOOK_S", 0.01)
    ScriptedBack.made, ScriptedBack.refuse = [], 0

    def run(scene: Scene, **operation: Any) -> list[str]:
        told: list[str] = []
        plan = build_plan(make_target(), method="ngram", device="cpu", num_threads=1)

        async def act() -> None:
            made = Conductor(
                plan,
                build_plain_plan(plan),
                Operation(drain_s=0.3, silence_s=0.2, window_steps=10, **operation),
                log_path=tmp_path / "log",
                metrics=FrontMetrics(),
                tell=told.append,
            )
            await made.start()
            await asyncio.wait_for(scene(made), timeout=5)
            await made.close()
            assert all(back.is_ended for back in ScriptedBack.made)

        asyncio.run(act())
        return told

    return run


def current(made: Conductor) -> Any:
    assert made.current is not None
    return made.current


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_a_killed_server_is_replaced_by_the_target_alone(play: Callable[..., list[str]]) -> None:
    async def scene(made: Conductor) -> None:
        first = current(made)
        assert not await made.report(first)  # it lives: the request itself failed
        first.is_dead = True
        assert all(await asyncio.gather(*(made.report(first) for _ in range(5))))
        assert read_sample(made.metrics.show(), "paceline_servers_lost_total") == 1
        second = await made.acquire()  # waits at the gate
        assert second.plan.method == "none"
        assert await made.report(first)  # a second request that it held: told only once

    told = play(scene)
    assert sum("died" in line for line in told) == 1


def test_a_death_that_no_request_noticed(play: Callable[..., list[str]]) -> None:
    async def scene(made: Conductor) -> None:
        first = current(made)
        first.is_dead = True
        await until(lambda: made.current is not None and made.current is not first)

    play(scene)


def test_a_server_that_makes_no_token_has_hung(play: Callable[..., list[str]]) -> None:
    async def scene(made: Conductor) -> None:
        first = current(made)
        first.metrics = "vllm:generation_tokens_total 5.0\n"
        await asyncio.sleep(0.4)
        assert current(made) is first  # idle is not hung
        first.num_carried = 1
        await until(lambda: made.current is not None and made.current is not first)

    assert any("made no token for 0.2 s" in line for line in play(scene))


def test_a_pause_of_everything_is_no_silence(
    play: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "_PAUSE_S", 0.1)

    async def scene(made: Conductor) -> None:
        first = current(made)
        first.num_carried, first.metrics = 1, "vllm:generation_tokens_total 1"
        await asyncio.sleep(0.05)
        time.sleep(0.4)  # twice as long as a server may be silent; this one stood still with us
        for number in range(2, 10):
            await asyncio.sleep(0.05)
            assert made.current is first
            first.metrics = f"vllm:generation_tokens_total {number}"

    assert play(scene) == []


def test_it_gives_up_when_servers_die_one_after_the_other(play: Callable[..., list[str]]) -> None:
    async def scene(made: Conductor) -> None:
        ScriptedBack.refuse = 10
        first = current(made)
        first.is_dead = True
        await made.report(first)
        with pytest.raises(EngineError, match="no memory is left"):
            await made.acquire()

    play(scene)
    assert len(ScriptedBack.made) == 1 + 3


def test_one_that_answered_before_it_died_is_no_row(play: Callable[..., list[str]]) -> None:
    async def scene(made: Conductor) -> None:
        for number in range(8):
            back = current(made)
            back.num_answered = 0 if number % 3 else 1
            back.is_dead = True
            await made.report(back)
            await made.acquire()

    play(scene)
    assert len(ScriptedBack.made) == 9


def test_a_draft_that_does_not_start_again_leaves_the_target(
    play: Callable[..., list[str]],
) -> None:
    async def scene(made: Conductor) -> None:
        made.ask_switch(drafts=False, reason="operator")
        await until(lambda: made.current is not None and not made.has_draft)
        ScriptedBack.refuse = 1
        made.ask_switch(drafts=True, reason="operator")
        await until(lambda: len(ScriptedBack.made) == 4 and made.current is not None)
        assert not made.has_draft

    assert any("did not start: no memory is left" in line for line in play(scene))


def test_a_switch_waits_for_answers_and_not_forever(play: Callable[..., list[str]]) -> None:
    async def scene(made: Conductor) -> None:
        first = current(made)
        first.num_carried = 1
        made.ask_switch(drafts=False, reason="operator")
        await until(lambda: made.current is None)
        assert not first.is_ended
        first.num_carried = 0
        await until(lambda: made.current is not None)
        assert first.is_ended
        made.ask_switch(drafts=False, reason="operator")  # already so: nothing
        made.ask_switch(drafts=True, reason="operator")
        await until(lambda: made.has_draft)
        second = current(made)
        second.num_carried = 1  # an answer that never ends is asked again elsewhere
        made.ask_switch(drafts=False, reason="operator")
        await until(lambda: made.current is not None and not made.has_draft)

    play(scene)
    assert len(ScriptedBack.made) == 4


def test_the_end_lets_go_of_who_still_waits(play: Callable[..., list[str]]) -> None:
    waiting: list[asyncio.Task[Any]] = []

    async def scene(made: Conductor) -> None:
        current(made).num_carried = 1
        made.ask_switch(drafts=False, reason="operator")
        await until(lambda: made.current is None)
        waiting.append(asyncio.create_task(made.acquire()))
        await asyncio.sleep(0)
        await made.close()
        with pytest.raises(EngineError, match="is ending"):
            await waiting[0]

    play(scene)


def test_a_spare_takes_over_at_once_and_is_replaced(play: Callable[..., list[str]]) -> None:
    async def scene(made: Conductor) -> None:
        await until(lambda: len(ScriptedBack.made) == 2)
        first, spare = ScriptedBack.made
        assert current(made) is first
        assert spare.plan.method == "none"
        first.is_dead = True
        await made.report(first)
        assert await made.acquire() is spare
        await until(lambda: len(ScriptedBack.made) == 3)
        ScriptedBack.made[2].is_dead = True  # the next spare dies unnoticed
        spare.is_dead = True
        await made.report(spare)
        assert await made.acquire() is ScriptedBack.made[3]

    play(scene, beside=True)


COUNTERS = """\
vllm:spec_decode_num_drafts_total {steps}
vllm:spec_decode_num_accepted_tokens_total {accepted}
vllm:generation_tokens_total {steps}
"""


@pytest.mark.parametrize("switches_off", [True, False])
def test_a_weak_draft_is_told_once_and_switched_off_where_wanted(
    switches_off: bool, play: Callable[..., list[str]]
) -> None:
    async def scene(made: Conductor) -> None:
        made.watch.add_answer("code", [{"num_spec_steps": 20, "num_accepted_draft_tokens": 1}])
        current(made).metrics = COUNTERS.format(steps=9, accepted=0)
        await asyncio.sleep(0.1)
        assert not made.is_weak  # fewer steps than the window
        current(made).metrics = COUNTERS.format(steps=100, accepted=5)
        if switches_off:
            await until(lambda: made.current is not None and not made.has_draft)
        else:
            await until(lambda: made.is_weak)
            await asyncio.sleep(0.1)
            assert made.has_draft

    told = play(scene, switches_off=switches_off)
    assert sum("the draft stopped helping" in line for line in told) == 1
    assert sum("category 'code'" in line for line in told) == 1
    assert any("without a draft" in line for line in told) == switches_off
