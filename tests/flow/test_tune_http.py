"""A trial of `paceline tune` through vLLM's own server: text streamed in pieces, nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from process_tree import children_of

from paceline.cli.tune_run import EngineBench
from paceline.eval import Regime
from paceline.rules import read_rules
from paceline.target import read_target
from paceline.tune import Settings

pytestmark = pytest.mark.engine


def test_a_trial_through_http(tmp_path: Path) -> None:
    bench = EngineBench(
        read_target("pocket"),
        [Regime(prompt_tokens=24, new_tokens=24)],
        log_dir=tmp_path,
        rules=read_rules("pocket"),
        num_requests=3,
        num_texts=3,
        concurrency=1,
        thinking="off",
        device="cpu",
    )
    before = set(children_of(os.getpid()))
    trial = bench.measure(Settings(draft="native", k=3, http=True, stream_interval=8))
    assert set(children_of(os.getpid())) == before
    assert (trial["k"], trial["method"], trial["host"]) == (3, "mtp", None)
    requests = trial["regimes"][0]["requests"]
    assert [row["num_tokens"] for row in requests] == [24] * 3
    assert all(0 < row["ttft_ms"] < row["latency_ms"] for row in requests)
    assert all(0 < len(text["output_ids"]) <= 64 for text in trial["texts"])
    assert "stream_interval" in (tmp_path / "server.log").read_text()
