"""The search on scripted figures: what it tries, what it takes for a gain, what it goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError, PlanError, ResultError
from paceline.tune import Journal, Settings, Situation, search
from paceline.tune.search import judge_ratio
from paceline.tune.space import build_knobs, neighbours_of_k, vary

LAPTOP = Situation(device="cpu", is_hybrid=False, concurrency=1, max_k=6)
PLAIN = Settings()


class Killed(BaseException):
    pass


class Script:
    """Latency by settings, in ms; every request a little different. Counts what was measured."""

    def __init__(self, *, kill_at: int | None = None) -> None:
        self.measured: list[Settings] = []
        self.judged: list[list[str]] = []
        self.kill_at = kill_at
        self.bad: set[str] = set()

    def latency(self, settings: Settings) -> float:
        found = {"none": 100.0, "ngram": 101.0, "good": 70.0, "corrupt": 20.0}[settings.draft]
        if settings.draft == "good":
            found += 4 * abs((settings.k or 3) - 5)
        found *= {None: 1.0, 256: 1.2, 1024: 0.9}[settings.drafter_window]
        found *= (1.3 if settings.http else 1.0) * (0.9 if settings.stream_interval else 1.0)
        return found * (0.8 if settings.compiled else 1.0) * (1.1 if settings.prefix_caching else 1)

    def measure(self, settings: Settings) -> dict[str, Any]:
        if len(self.measured) == self.kill_at:
            raise Killed
        self.measured.append(settings)
        if settings.draft == "broken":
            raise PlanError("the draft does not fit")
        k = None if settings.draft == "none" else settings.k or 3
        return {"k": k, "texts": settings.draft, "regimes": self.records(self.latency(settings))}

    def records(self, latency: float) -> list[dict[str, Any]]:
        requests = [{"latency_ms": latency * (1 + 0.01 * n)} for n in range(12)]
        return [{"requests": requests, "tpot_ms": {"median": latency / 10}, "tau": 2.0}]

    def judge(
        self, plain: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], *, again: bool
    ) -> tuple[list[list[str]], list[dict[str, Any]] | None]:
        self.judged.append([trial["label"] for trial in trials])
        reasons = [["it forks"] if trial["texts"] == "corrupt" else [] for trial in trials]
        return reasons, self.records(102.0) if again else None


def run(
    script: Script,
    folder: Path,
    *drafts: str,
    budget_s: float = 1e9,
    situation: Situation = LAPTOP,
    **header: Any,
) -> Any:
    ticks = iter(range(10**6))
    return search(
        [Settings(draft=name) for name in drafts],
        situation,
        script,
        Journal(folder, {"target": "t", **header}),
        budget_s=budget_s,
        clock=lambda: float(next(ticks)),
    )


def verdicts(outcome: Any) -> dict[str, str]:
    return {row.label: row.verdict for row in outcome.rows}


def test_the_fastest_that_keeps_the_text_and_every_setting_a_row(tmp_path: Path) -> None:
    outcome = run(Script(), tmp_path, "ngram", "good", "corrupt", "broken")
    assert outcome.best == Settings(draft="good", k=5, compiled=True, stream_interval=8)
    assert outcome.k == 5
    assert outcome.noise == pytest.approx(abs(100 / 102 - 1))
    found = verdicts(outcome)
    assert found["target alone"] == "baseline"
    assert found["draft ngram"] == "tie"  # 1 % slower, within what two starts differ by
    assert found["draft good"] == "faster"
    assert found["draft corrupt"] == "withheld"  # five times as fast, and not the target's text
    assert found["draft broken"] == "failed"
    assert (found["K = 4"], found["K = 5"], found["K = 6"]) == ("faster", "faster", "slower")
    assert found["compiled on"] == "faster"
    assert found["prefix_caching on"] == "slower"
    assert found["best, no compiled"] == found["best, no draft"] == "slower"
    assert found["best, through HTTP"] == "slower"
    assert found["stream_interval 8"] == "faster"  # than the same with a piece for each token
    speedup = next(row.speedup for row in outcome.rows if row.label == "compiled on")
    assert speedup["mean"] == pytest.approx(100 / 56)
    # a drafted token takes 7.0 x 0.8, one without 10 x 0.8; at two tokens a step
    assert outcome.break_even == pytest.approx(2.0 * 5.6 / 8.0)
    assert {knob.name for knob in outcome.knobs if knob.reason} >= {"cudagraph_sizes", "dynamic_k"}


def test_killed_anywhere_it_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    whole = Script()
    wanted = run(whole, tmp_path / "whole", "ngram", "good")
    for kill_at in range(len(whole.measured)):
        first, second = Script(kill_at=kill_at), Script()
        folder = tmp_path / str(kill_at)
        with pytest.raises(Killed):
            run(first, folder, "ngram", "good")
        with open(folder / "trials.jsonl", "a") as file:
            file.write('{"key": "cut by a kill')
        assert run(second, folder, "ngram", "good").best == wanted.best
        assert first.measured + second.measured == whole.measured


def test_another_search_is_not_gone_on_with(tmp_path: Path) -> None:
    run(Script(), tmp_path, "ngram")
    with pytest.raises(ResultError, match="differs in requests"):
        run(Script(), tmp_path, "ngram", requests=3)


def test_a_spent_budget_says_what_was_not_measured(tmp_path: Path) -> None:
    outcome = run(Script(), tmp_path, "ngram", "good", budget_s=2.0)
    found = verdicts(outcome)
    assert found["draft good"] == "not measured"
    assert [row.why for row in outcome.rows if row.verdict == "not measured"]
    with pytest.raises(EngineError, match="was not measured"):
        run(Script(), tmp_path / "none", "ngram", budget_s=0.0)


def test_a_small_or_uncertain_difference_is_a_tie() -> None:
    assert judge_ratio({"mean": 1.05, "low": 1.01, "high": 1.09}, 0.02) == "faster"
    assert judge_ratio({"mean": 1.05, "low": 0.99, "high": 1.11}, 0.02) == "tie"
    assert judge_ratio({"mean": 1.05, "low": 1.04, "high": 1.06}, 0.06) == "tie"
    assert judge_ratio({"mean": 0.9, "low": 0.85, "high": 0.95}, 0.02) == "slower"
    assert judge_ratio({"mean": 1.05, "low": None, "high": None}, 0.02) == "faster"


def test_every_setting_is_searched_or_has_its_reason() -> None:
    best = Settings(draft="d", k=4, compiled=True)
    hybrid_gpu = Situation(device="cuda", is_hybrid=True, concurrency=8)
    dense_gpu = Situation(device="cuda", is_hybrid=False, concurrency=8)
    names = None
    for situation in (LAPTOP, hybrid_gpu, dense_gpu):
        knobs = build_knobs(best, 4, situation)
        names = names or [knob.name for knob in knobs]
        assert [knob.name for knob in knobs] == names
        assert all(bool(knob.values) != bool(knob.reason) for knob in knobs)
    graphs = next(k for k in build_knobs(best, 4, dense_gpu) if k.name == "cudagraph_sizes")
    assert graphs.values == ((5, 10, 15, 20, 25, 30, 35, 40),)  # whole drafts of K + 1
    dynamic = next(k for k in build_knobs(best, 4, dense_gpu) if k.name == "dynamic_k")
    assert dynamic.values == (((1, 4, 4), (5, 8, 2)),)
    assert vary(best, next(k for k in build_knobs(best, 4, LAPTOP) if k.name == "compiled")) == []


def test_neighbours_of_k_end_at_the_edges() -> None:
    assert neighbours_of_k(1, [1], max_k=6) == [2]
    assert neighbours_of_k(3, [3], max_k=6) == [2, 4]
    assert neighbours_of_k(7, [7], max_k=32) == [6, 8]
    assert neighbours_of_k(6, [5, 6], max_k=6) == []


def test_a_window_is_searched_where_the_draft_takes_one(tmp_path: Path) -> None:
    windows = {"good": (256, 1024), "ngram": "a draft without weights has no attention"}
    situation = replace(LAPTOP, windows=windows)
    outcome = run(Script(), tmp_path / "a", "good", situation=situation)
    found = verdicts(outcome)
    assert outcome.best.drafter_window == 1024
    assert (found["drafter_window 256"], found["drafter_window 1024"]) == ("slower", "faster")
    assert found["best, no drafter_window"] == "slower"
    plain = next(row.settings for row in outcome.rows if row.label == "best, no draft")
    assert plain == Settings(compiled=True)
    knobs = build_knobs(Settings(draft="ngram"), 3, situation)
    assert knobs[0].reason == "a draft without weights has no attention"


def test_several_in_flight_are_not_asked_through_http(tmp_path: Path) -> None:
    outcome = run(Script(), tmp_path, "good", situation=replace(LAPTOP, concurrency=4))
    assert not any(row.settings.http for row in outcome.rows)
    assert next(knob.reason for knob in outcome.knobs if knob.name == "stream_interval")


@pytest.mark.parametrize(
    ("k", "head_dim", "searched"), [(7, 128, True), (8, 128, False), (7, 64, False)]
)
def test_the_fused_decode_kernel_has_its_limits(k: int, head_dim: int, searched: bool) -> None:
    situation = Situation(device="cuda", is_hybrid=True, concurrency=1, gdn_head_dim=head_dim)
    knobs = build_knobs(Settings(draft="d", k=k), k, situation)
    knob = next(knob for knob in knobs if knob.name == "gdn_decode_kernel")
    assert knob.values == (("triton",) if searched else ())
