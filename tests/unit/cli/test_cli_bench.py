"""paceline bench without an engine: mistakes are told before anything starts; servers by URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Outcome
from completion_server import completion_server

from paceline.endpoint import Request, Sampling
from paceline.errors import EngineError
from paceline.eval import complete_ids
from paceline.records import read_json

Run = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "there is nothing to measure"),
        (("--draft", "nowhere", "--regime", "64:4"), "there is no draft 'nowhere'"),
        (("--draft", "ngram", "--regime", "64"), "'64' is no regime"),
        (("--draft", "ngram", "--regime", "64:1"), "'64:1' is no regime"),
        (("--draft", "ngram", "--regime", "64:x"), "'64:x' is no regime"),
        (("--draft", "ngram", "--regime", "20:4"), "leaves no room for text"),
        (("--draft", "ngram"), "a regime needs 8,448 tokens"),  # smollm2 has 8,192 positions
        (("--draft", "ngram", "--regime", "64:4", "--regime", "64:4"), "is named twice"),
        (("--draft", "ngram", "--draft", "ngram", "--regime", "64:4"), "ngram is named twice"),
        (("--draft", "ngram", "--regime", "64:4", "--requests", "20000"), "too few for so many"),
        (("--draft", "ngram", "--regime", "64:4", "--thinking", "on"), "no such switch"),
        (("--url", "localhost:1", "--regime", "64:4"), "is no server's address"),
        (("--url", "http://127.0.0.1:9", "--regime", "64:4", "--no-baseline"), "be reached"),
        (
            ("--url", "http://a", "--baseline-url", "http://b", "--no-baseline"),
            "--baseline-url has no effect",
        ),
    ],
)
def test_mistakes_are_told(run: Run, words: tuple[str, ...], expected: str) -> None:
    done = run("bench", "smollm2", *words, "--device", "cpu")
    assert done.code in (2, 4)
    done.require(done.code, expected)


def test_two_servers_side_by_side(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    with (
        completion_server(gap_s=0.03) as (slow, _),
        completion_server(gap_s=0.01) as (fast, seen),
    ):
        done = run(
            *("bench", "smollm2", "--url", fast, "--baseline-url", slow, "--out", out),
            *("--regime", "64:10", "--regime", "100:20", "--requests", "6"),
        )
    done.require(0)
    assert len(seen) == 2 * (6 + 2)
    assert {len(body["prompt"]) for body in seen} == {64, 100}
    result = read_json(out)
    assert (result["format"], result["prompts"]) == ("paceline-bench/1", "unique")
    speedup = result["arms"]["server"]["speedup"]
    assert 1.2 < speedup["mean"] < 9  # 3 on an idle machine, where sleeping were exact
    assert speedup["low"] < speedup["mean"] < speedup["high"]
    assert result["arms"]["baseline"]["speedup"] is None
    assert "server: mean speed-up over 2 regimes" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines() if "every number" not in line)


def test_a_repeated_prompt_is_labelled(run: Run) -> None:
    with completion_server(gap_s=0.001) as (url, seen):
        done = run(
            *("bench", "smollm2", "--url", url, "--no-baseline", "--repeated"),
            *("--regime", "64:4", "--requests", "2"),
        )
    done.require(0)
    assert len({tuple(body["prompt"]) for body in seen}) == 1
    assert "repeated prompts" in done.out
    assert "caches answer the repeated prompt, not the draft" in done.out
    assert "speed-up: not measured, there is no baseline" in done.out


def test_settings_of_tune_are_taken(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    words = ("bench", "smollm2", "--regime", "64:4", "--config", config, "--device", "cpu")
    config.write_text('draft = "ngram"\nk = 4\n[engine]\nasync_scheduling = true\n')
    run(*words).require(2, "async_scheduling has no effect here")
    config.write_text("[engine]\ncompiled = false\n")
    run(*words).require(2, "there is nothing to measure")
    run(*words, "--url", "http://a").require(2, "--config has no effect on a running server")


def test_a_server_without_token_ids_is_named() -> None:
    request = Request(request_id="r", prompt_ids=(1, 2), sampling=Sampling(max_tokens=2))
    with completion_server(gap_s=0.0) as (url, _):  # noqa: SIM117
        with pytest.raises(EngineError, match="the server gave no token ids"):
            complete_ids(url, "toy", request)
