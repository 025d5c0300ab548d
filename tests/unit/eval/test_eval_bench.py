"""Latency regimes by hand, and a real HTTP server that streams."""

from __future__ import annotations

import os
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completion_server import completion_server
from scripted import Script, ScriptedEndpoint, build_facts

from paceline.endpoint import Request
from paceline.errors import EngineError, PlanError, ResultError
from paceline.eval import (
    REGIMES,
    Regime,
    ask_endpoint,
    ask_server,
    build_bench_requests,
    compare_arms,
    find_model,
    measure_arm,
)
from paceline.eval.bench import Timing, median_interval

SHORT = Regime(prompt_tokens=6, new_tokens=4)
LONG = Regime(prompt_tokens=10, new_tokens=8)
ENDS = ((1, 2), (3,))


def build(**changes: Any) -> dict[Regime, tuple[list[Request], list[Request]]]:
    values: dict[str, Any] = {"num_requests": 3, "num_warm_up": 1, "repeated": False, **changes}
    return build_bench_requests(range(100, 200), ENDS, (SHORT, LONG), **values)


def test_regimes_are_the_challenges() -> None:
    assert [regime.name for regime in REGIMES] == ["64:128", "2048:256", "8192:256"]


def test_prompts_have_their_exact_length_and_share_nothing() -> None:
    requests = build()
    for regime, (warm_up, asked) in requests.items():
        assert (len(warm_up), len(asked)) == (1, 3)
        for request in (*warm_up, *asked):
            assert len(request.prompt_ids) == regime.prompt_tokens
            assert request.prompt_ids[:2] == (1, 2)
            assert request.prompt_ids[-1] == 3
            assert request.sampling.max_tokens == regime.new_tokens
            assert request.sampling.ignore_eos
            assert request.sampling.temperature == 0
    bodies = [r.prompt_ids[2:-1] for pair in requests.values() for r in chain(*pair)]
    tokens = list(chain(*bodies))
    assert len(tokens) == len(set(tokens))  # the text has no token twice


def test_a_repeated_prompt_is_one_prompt() -> None:
    for warm_up, asked in build(repeated=True).values():
        assert len({request.prompt_ids for request in (*warm_up, *asked)}) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"num_requests": 30}, "too few for so many different prompts"), ({}, "leaves no room")],
)
def test_prompts_that_cannot_be_made(changes: dict[str, int], words: str) -> None:
    regimes = (SHORT, LONG) if changes else (Regime(prompt_tokens=3, new_tokens=4),)
    with pytest.raises(PlanError, match=words):
        build_bench_requests(
            range(100, 200),
            ENDS,
            regimes,
            **{"num_requests": 2, "num_warm_up": 1, "repeated": False, **changes},  # type: ignore[arg-type]
        )


def test_times_of_a_scripted_engine() -> None:
    requests = build()
    # first token after 100 ms; then two steps of 10 ms
    steps = {SHORT: ((1, 3), (0, 3)), LONG: ((3, 3), (2, 3))}
    scripts = {
        request.request_id: Script(steps=steps[regime], num_tokens=regime.new_tokens)
        for regime, pair in requests.items()
        for request in chain(*pair)
    }
    endpoint = ScriptedEndpoint(facts=build_facts("suffix", 3), scripts=scripts)
    seen: list[tuple[int, int]] = []
    short, long = measure_arm(
        ask_endpoint(endpoint), requests, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (8, 8)
    assert len(endpoint.log) == 8
    assert short["num_requests"] == 3
    assert short["latency_ms"]["median"] == pytest.approx(120)
    assert short["ttft_ms"]["median"] == pytest.approx(100)
    assert short["tpot_ms"]["median"] == pytest.approx(20 / 3)
    assert long["tpot_ms"]["median"] == pytest.approx(20 / 7)
    assert (short["tau"], long["tau"]) == (1.5, 3.5)  # delivered after the first, over two steps
    assert short["energy_j_per_token"] is None
    assert short["requests"][0]["num_accepted"] == 1


def test_an_answer_cut_short_is_no_measurement() -> None:
    with pytest.raises(ResultError, match="an answer has 3 tokens"):
        measure_arm(lambda request: timing(10.0, num_tokens=3), build())


def test_energy_is_the_gpus_mean_power_times_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"  # the columns that are asked for; 300 W
    tool.write_text("#!/bin/sh\nwhile :; do echo '1980, 2619, 40, 300.0, 0x0'; sleep 0.02; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def ask(request: Request) -> Timing:
        time.sleep(0.1)
        return timing(100.0)

    requests = build_bench_requests(
        range(100), ENDS, (SHORT,), num_requests=3, num_warm_up=0, repeated=False
    )
    (record,) = measure_arm(ask, requests, gpu=True)
    assert 300 * 0.3 <= record["energy_j"] <= 300 * 1.0
    assert record["energy_j_per_token"] == pytest.approx(record["energy_j"] / 12)


def timing(latency_ms: float, num_tokens: int = 4) -> Timing:
    return Timing(ttft_ms=1.0, latency_ms=latency_ms, tpot_ms=1.0, num_tokens=num_tokens)


def arm(*regimes: list[float]) -> list[dict[str, Any]]:
    return [{"requests": [{"latency_ms": value} for value in times]} for times in regimes]


def test_speedup_is_the_mean_over_regimes_of_mean_latency_ratios() -> None:
    found = compare_arms(arm([100, 300], [50, 50]), arm([50, 50], [50, 50]))
    assert found["regimes"] == [4.0, 1.0]
    assert found["mean"] == 2.5
    assert found["low"] is None  # two prompts a regime: no interval


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        slow = [rng.normal(100, 8, 10), rng.normal(400, 30, 10)]
        fast = [rng.normal(25, 3, 10), rng.normal(200, 10, 10)]
        found = compare_arms(arm(*map(list, slow)), arm(*map(list, fast)))
        held += found["low"] <= 3.0 <= found["high"]
    assert 0.91 <= held / 400 <= 0.99


@pytest.mark.parametrize(
    ("count", "ranks"), [(5, None), (6, (0, 5)), (8, (0, 7)), (9, (1, 7)), (20, (5, 14))]
)
def test_median_interval_takes_the_tables_order_statistics(
    count: int, ranks: tuple[int, int] | None
) -> None:
    # the binomial table of the sign test at 95 %
    found = median_interval([float(value) for value in reversed(range(count))])
    assert found["median"] == (count - 1) / 2
    assert (found["low"], found["high"]) == (ranks or (None, None))


# --- over HTTP ---


def test_a_running_server_is_timed_by_its_own_count() -> None:
    request = build()[SHORT][1][0]
    with completion_server() as (url, _):
        assert find_model(url) == "toy"
        found = ask_server(url + "/v1", "toy")(request)
    assert found.num_tokens == 4  # not the two chunks
    assert 45 < found.latency_ms - found.ttft_ms < 500
    assert found.tpot_ms == pytest.approx((found.latency_ms - found.ttft_ms) / 3)
    assert found.num_steps is None


def test_what_is_sent_asks_for_exactly_so_many_tokens() -> None:
    request = build()[SHORT][1][0]
    with completion_server() as (url, seen):
        ask_server(url, "toy")(request)
    (body,) = seen
    assert body["prompt"] == list(request.prompt_ids)
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (4, True, 0.0)


def test_servers_that_cannot_be_measured_say_why() -> None:
    request = build()[SHORT][1][0]
    with (
        completion_server() as (url, _),
        pytest.raises(EngineError, match=r"answered 404: .*no such model"),
    ):
        ask_server(url, "other")(request)
    with (
        completion_server(with_usage=False) as (url, _),
        pytest.raises(EngineError, match="gave no usage"),
    ):
        ask_server(url, "toy")(request)
    with pytest.raises(EngineError, match="cannot be reached"):
        find_model("http://127.0.0.1:9")
    with pytest.raises(PlanError, match="is no server's address"):
        find_model("127.0.0.1:8000")
