"""Runs in cycles of A B B A blocks, with scripted servers; every block is a server of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    GREEDY,
    TARGET,
    ScriptedEndpoint,
    build_draft,
    build_facts,
    build_memory,
    build_prompts,
    build_rules,
)
from scripted_arms import BASE, FAST, PLAIN, WARM, WARM_UP

from paceline.endpoint import TokenChoice
from paceline.errors import EngineError, ResultError
from paceline.eval import Cycles, measure_cycles, read_answers, score_run
from paceline.eval import cycles as cycles_module
from paceline.eval.cycles import plan_order

NAMES = [f"{category}-{i}" for category in ("chat", "code") for i in range(4)]
RULES = build_rules(
    min_tokens_for_tpot="4",
    num_resamples="200",
    num_categories="2",
    max_block_reruns="2",
    max_other_cpu_share="0.1",
)
DRAFTS = {"baseline": build_draft("base"), "candidate": build_draft("mine")}


class Servers:
    """Starts scripted servers; `log` holds (arm, requests asked) of each, in order.

    slow: arm -> factor on the step time of its n-th server. stop_after: raise Ctrl-C as the
    measured request of that number is asked.
    """

    def __init__(self, **changes: Any) -> None:
        self.log: list[tuple[str, list[str]]] = []
        self.slow: dict[str, list[float]] = {}
        self.tokens: dict[tuple[str, int], tuple[int, ...]] = {}
        self.facts: dict[tuple[str, int], dict[str, Any]] = {}
        self.stop_after: int | None = None
        self.choices: dict[tuple[int, ...], TokenChoice] = {}
        self.arguments: dict[str, Any] = {
            "cycles": Cycles(num_cycles=2),
            "with_plain": True,
            "drafts": DRAFTS,
            "prompts": build_prompts(NAMES),
            "warm_up": WARM_UP,
            "rules": RULES,
            "target": TARGET,
            "prompt_set_name": "demo-eval",
            **changes,
        }

    @contextlib.contextmanager
    def open_arm(self, name: str) -> Iterator[ScriptedEndpoint]:
        number = sum(1 for arm, _ in self.log if arm == name)
        asked: list[str] = []
        self.log.append((name, asked))
        script = {"plain": PLAIN, "baseline": BASE, "candidate": FAST}[name]
        factor = (self.slow.get(name) or [1.0])[number % len(self.slow.get(name) or [1.0])]
        scripts = {
            key: replace(
                script,
                step_ms=script.step_ms * factor * (1 + 0.01 * i),
                tokens=self.tokens.get((name, number)) if key == "code-3" else None,
            )
            for i, key in enumerate(NAMES)
        }
        facts = build_facts() if name == "plain" else build_facts("eagle3", 3)
        facts = replace(facts, **self.facts.get((name, number), {}))
        memory = None if name == "plain" else build_memory(900 if name == "baseline" else 600)
        endpoint = ScriptedEndpoint(
            facts, {**WARM, **scripts}, memory_facts=memory, choices=self.choices
        )
        generate = endpoint.generate

        def counted(requests: Any, **options: Any) -> Any:
            for request in requests:
                if not request.request_id.startswith("warm"):
                    if self.stop_after == sum(len(names) for _, names in self.log):
                        raise KeyboardInterrupt
                    asked.append(request.request_id)
            return generate(requests, **options)

        endpoint.generate = counted  # type: ignore[method-assign]
        yield endpoint

    def measure(self, out: Path, **changes: Any) -> dict[str, Any]:
        return measure_cycles(self.open_arm, out_dir=out, **{**self.arguments, **changes})


def test_order_is_abba_or_baab_by_the_seed() -> None:
    orders = {plan_order(cycle, seed=0) for cycle in range(20)}
    first = ("baseline", "candidate", "candidate", "baseline")
    assert orders == {first, tuple("candidate" if n == "baseline" else "baseline" for n in first)}
    assert [plan_order(c, seed=3) for c in range(9)] == [plan_order(c, seed=3) for c in range(9)]
    assert [plan_order(c, seed=3) for c in range(9)] != [plan_order(c, seed=4) for c in range(9)]


def test_each_block_is_a_fresh_server_with_all_prompts_in_order(tmp_path: Path) -> None:
    servers = Servers()
    result = servers.measure(tmp_path)
    order = [*plan_order(0, seed=0), *plan_order(1, seed=0)]
    assert [name for name, _ in servers.log] == ["plain", *order, "plain"]
    assert all(asked == NAMES for _, asked in servers.log)
    entries = result["arms"]["candidate"]["requests"]
    assert [e["block"] for e in entries] == [b for b in range(4) for _ in NAMES]
    protocol = result["protocol"]
    assert (protocol["kind"], protocol["num_cycles"], protocol["stopped_by"]) == (
        "cycles",
        2,
        "cycles",
    )
    assert protocol["order"] == [list(plan_order(0, seed=0)), list(plan_order(1, seed=0))]
    assert len(protocol["loads"]) == 10
    assert result["arms"]["candidate"]["tau"]["by_category"]["chat"]["num_prompts"] == 4
    assert result["prompts"]["num_prompts"] == 8
    assert result["ratios"]["tau"]["value"] == 2.0
    assert result["ratios"]["memory"]["value"] == 1.5
    assert result["ratios"]["tpot"]["value"] == pytest.approx(2.0)
    assert result["score"]["ranked"], result["score"]["reasons"]
    assert result["fidelity"]["plain"]["identical"] == 8  # the target against itself
    assert result["fidelity"]["candidate"]["num_texts"] == 32
    assert len(read_answers(tmp_path, "candidate")) == 8
    assert score_run(tmp_path) == result
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_a_drift_of_the_machine_cancels(tmp_path: Path) -> None:
    """Both arms slow down by 10 % from each block to the next."""
    servers = Servers(cycles=Cycles(num_cycles=1), with_plain=False)
    order = plan_order(0, seed=0)
    for name in ("baseline", "candidate"):
        servers.slow[name] = [1.1**place for place, arm in enumerate(order) if arm == name]
    assert servers.measure(tmp_path)["ratios"]["tpot"]["value"] == pytest.approx(2.0)


def test_servers_that_differ_widen_the_interval(tmp_path: Path) -> None:
    steady = Servers(cycles=Cycles(num_cycles=3), with_plain=False).measure(tmp_path / "a")
    servers = Servers(cycles=Cycles(num_cycles=3), with_plain=False)
    servers.slow["candidate"] = [0.95, 1.05]
    moving = servers.measure(tmp_path / "b")
    width = [r["ratios"]["tpot"]["high"] - r["ratios"]["tpot"]["low"] for r in (steady, moving)]
    assert width[1] > 5 * width[0]


def test_stops_once_the_interval_is_narrow_enough(tmp_path: Path) -> None:
    cycles = Cycles(num_cycles=5, stop_at=0.5)
    result = Servers(cycles=cycles).measure(tmp_path / "a")
    assert result["protocol"]["stopped_by"] == "width"
    assert result["protocol"]["num_cycles"] == 1
    assert result["score"]["high"] - result["score"]["value"] <= 0.5
    servers = Servers(cycles=Cycles(num_cycles=3, stop_at=0.5))
    servers.slow["candidate"] = [0.9, 1.1]
    assert servers.measure(tmp_path / "b")["protocol"]["num_cycles"] == 3


def test_a_stopped_run_goes_on_and_a_half_block_is_measured_again(tmp_path: Path) -> None:
    whole = Servers().measure(tmp_path / "whole")
    servers = Servers()
    servers.stop_after = 8 + 8 + 3  # in the middle of the second block of the first cycle
    with pytest.raises(KeyboardInterrupt):
        servers.measure(tmp_path / "out")
    again = Servers()
    result = again.measure(tmp_path / "out")
    assert sum(len(asked) for _, asked in again.log) == 80 - 16
    assert [void["reason"] for void in result["protocol"]["voids"]] == ["stopped in the middle"]
    assert result["ratios"]["tau"] == whole["ratios"]["tau"]
    assert result["score"]["value"] == pytest.approx(whole["score"]["value"])
    assert result["arms"]["candidate"]["vllm"] == whole["arms"]["candidate"]["vllm"]
    assert score_run(tmp_path / "out") == result


def test_more_cycles_are_added_to_a_finished_run(tmp_path: Path) -> None:
    Servers(cycles=Cycles(num_cycles=1)).measure(tmp_path)
    more = Servers(cycles=Cycles(num_cycles=2))
    result = more.measure(tmp_path)
    assert result["protocol"]["num_cycles"] == 2
    assert [name for name, asked in more.log if asked] == [*plan_order(1, seed=0)]


def test_a_quick_run_does_not_become_one_of_cycles(tmp_path: Path) -> None:
    Servers().measure(tmp_path, seed=1)
    with pytest.raises(ResultError, match="other settings"):
        Servers().measure(tmp_path)


def disturb(monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> None:
    """The n-th block sees that share of other work; then none."""

    @contextlib.contextmanager
    def watch(**_: Any) -> Iterator[Any]:
        share = shares.pop(0) if shares else 0.0
        found = type("Watch", (), {"record": {"other_share": share, "gpu": None}})()
        yield found

    monkeypatch.setattr(cycles_module, "watch_load", watch)


def test_a_disturbed_block_is_void_and_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, [0.0, 0.0, 0.5])
    servers = Servers()
    result = servers.measure(tmp_path)
    order = [*plan_order(0, seed=0), *plan_order(1, seed=0)]
    assert [name for name, _ in servers.log] == ["plain", *order[:2], order[1], *order[2:], "plain"]
    assert result["protocol"]["voids"] == [
        {
            "arm": order[1],
            "block": 0,
            "reason": "other processes took 50% of the CPU, at most 10% may be",
        }
    ]
    assert len(result["arms"][order[1]]["requests"]) == 32
    assert result["arms"]["candidate"]["vllm"]["agrees"]
    assert result["score"]["ranked"]
    assert score_run(tmp_path) == result


def test_a_block_that_stays_disturbed_is_kept_and_not_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, [0.0, 0.5, 0.5, 0.5])
    result = Servers().measure(tmp_path)
    assert len(result["protocol"]["voids"]) == 2
    assert not result["score"]["ranked"]
    assert "stayed disturbed: other processes took 50%" in result["score"]["reasons"][0]
    assert score_run(tmp_path) == result


def test_another_engine_in_a_later_block_is_refused(tmp_path: Path) -> None:
    servers = Servers()
    servers.facts["candidate", 1] = {"runner": "v1"}
    with pytest.raises(EngineError, match=r"runner of 'candidate' was 'v2'.*now 'v1'"):
        servers.measure(tmp_path)


def test_the_target_against_itself_is_the_floor_of_fidelity(tmp_path: Path) -> None:
    """code-3 really forks on one server of three, also on the target's own second server."""
    servers = Servers(rules=build_rules(min_tokens_for_tpot="4", num_resamples="200"))
    tokens = (1000, 77, *range(1002, 1009))
    servers.choices = {(*b"code-3", 1000): TokenChoice(token_ids=(1001, 77), logprobs=(-0.1, -6.0))}
    servers.tokens = {("candidate", 1): tokens}
    result = servers.measure(tmp_path / "a")
    assert list(result["withheld"]) == ["candidate"]  # 1 of 32, at most 2 % may
    servers.log.clear()
    servers.tokens["plain", 1] = tokens
    result = servers.measure(tmp_path / "b")
    assert result["fidelity"]["plain"]["real_fork"] == 1
    assert result["withheld"] == {}


def test_sampled_blocks_have_seeds_of_their_own(tmp_path: Path) -> None:
    sampling = replace(GREEDY, temperature=0.8)
    prompts = [
        replace(p, request=replace(p.request, sampling=sampling)) for p in build_prompts(NAMES)
    ]
    servers = Servers(prompts=prompts, with_plain=False)
    seeds: list[int | None] = []
    opened = servers.open_arm

    @contextlib.contextmanager
    def spy(name: str) -> Iterator[ScriptedEndpoint]:
        with opened(name) as endpoint:
            generate = endpoint.generate

            def note(requests: Any, **options: Any) -> Any:
                seeds.extend(
                    r.sampling.seed for r in requests if not r.request_id.startswith("warm")
                )
                return generate(requests, **options)

            endpoint.generate = note  # type: ignore[method-assign]
            yield endpoint

    servers.open_arm = spy  # type: ignore[method-assign]
    servers.measure(tmp_path, seed=10)
    assert set(seeds) == {10, 11, 12, 13}


def test_failures_in_a_block_are_scored(tmp_path: Path) -> None:
    rules = build_rules(
        min_tokens_for_tpot="4", num_resamples="200", max_failure_share="0.5", num_categories="2"
    )
    servers = Servers(rules=rules)
    opened = servers.open_arm

    @contextlib.contextmanager
    def failing(name: str) -> Iterator[ScriptedEndpoint]:
        with opened(name) as endpoint:
            if name == "candidate":
                endpoint.scripts = {**endpoint.scripts, "chat-1": EngineError("timed out")}
            yield endpoint

    servers.open_arm = failing  # type: ignore[method-assign]
    result = servers.measure(tmp_path)
    mine = result["arms"]["candidate"]
    assert mine["failures"] == 4
    assert all(e["stands_for"] == "plain" for e in mine["requests"] if e["failure"])
    # chat: 3 prompts of 8 in 2, one of 8 in 8, four times over
    assert mine["tau"]["by_category"]["chat"]["value"] == pytest.approx(32 / 14)
