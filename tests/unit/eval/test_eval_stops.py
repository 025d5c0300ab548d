"""Runs in which a request fails, an engine dies or a person stops; nothing finished is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    build_draft,
    build_facts,
    build_prompts,
    build_rules,
)
from scripted_arms import BASE, FAST, NAMES, PLAIN, WARM, Arms

from paceline.errors import EngineError, ResultError
from paceline.eval import read_answers, score_run


def fail(arms: Arms, *names: str) -> None:
    arms.candidate.scripts = {
        **arms.candidate.scripts,
        **dict.fromkeys(names, EngineError("timed out")),
    }


def test_a_failure_counts_as_decoding_without_a_draft(tmp_path: Path) -> None:
    arms = Arms()
    fail(arms, "chat-2")
    result = arms.measure(tmp_path)
    mine = result["arms"]["candidate"]
    # chat-2 stands as plain: D 8, S 8, TPOT 10
    assert mine["tau"]["by_category"]["chat"] == {
        "value": 16 / 10,
        "num_prompts": 2,
        "delivered": 16,
        "steps": 10,
    }
    assert mine["failures"] == 1
    assert mine["tpot_ms"]["num_requests"] == 4
    # ratios 6/3, 6/10 in chat; 2, 2 in code
    assert result["ratios"]["tpot"]["value"] == pytest.approx((2 * 0.6) ** 0.25 * 2**0.5)
    entry = next(e for e in mine["requests"] if e["id"] == "chat-2")
    assert (entry["failure"], entry["stands_for"]) == ("timed out.", "plain")
    assert result["score"]["ranked"]  # 25 % is what these rules allow
    assert score_run(tmp_path)["score"] == result["score"]


def test_too_many_failures_are_not_ranked(tmp_path: Path) -> None:
    arms = Arms()
    fail(arms, "chat-1", "code-1")
    score = arms.measure(tmp_path)["score"]
    assert not score["ranked"]
    assert score["reasons"] == ["'candidate' failed on 50.0% of the prompts"]


def test_a_failure_without_a_plain_arm_has_no_time(tmp_path: Path) -> None:
    arms = Arms()
    fail(arms, "chat-2")
    result = arms.measure(tmp_path, plain=None)
    entry = next(e for e in result["arms"]["candidate"]["requests"] if e["id"] == "chat-2")
    assert (entry["delivered"], entry["steps"], entry["tpot_ms"]) == (8, 8, None)
    assert result["ratios"]["tpot"]["num_excluded"] == 1


def test_a_dead_engine_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    names = [f"chat-{i}" for i in range(6)]
    arms = Arms(prompts=build_prompts(names))
    for endpoint, script in ((arms.plain, PLAIN), (arms.baseline, BASE)):
        endpoint.scripts = {**WARM, **dict.fromkeys(names, script)}
    dead = EngineError("the engine died")
    arms.candidate.scripts = {**WARM, **dict.fromkeys(names, dead), "chat-0": FAST}
    with pytest.raises(EngineError, match=r"arm 'candidate': 3 requests in a row failed.*died"):
        arms.measure(tmp_path)
    assert len(read_answers(tmp_path, "candidate")) == 1
    again = Arms(prompts=build_prompts(names))
    for name in ("plain", "baseline"):
        getattr(again, name).scripts = getattr(arms, name).scripts
    again.candidate.scripts = {**WARM, **dict.fromkeys(names, FAST)}
    result = again.measure(tmp_path)
    assert result["arms"]["candidate"]["failures"] == 0
    assert len(again.log) == 6 + 18 - 1 - len(
        {e for e in arms.log if e[1].startswith("chat") and e[0] != "candidate"}
    )


def test_an_unusable_answer_stops_at_once(tmp_path: Path) -> None:
    arms = Arms()
    arms.candidate.facts = build_facts("eagle3", 2)  # the scripts draft three
    with pytest.raises(EngineError, match="drafted"):
        arms.measure(tmp_path)


def stop_after(num_answers: int) -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        assert total == 12
        if done == num_answers:
            raise KeyboardInterrupt

    return show


@pytest.mark.parametrize("num_answers", [0, 1, 5, 11])
def test_a_stopped_run_goes_on(num_answers: int, tmp_path: Path) -> None:
    whole = Arms().measure(tmp_path / "whole")
    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        Arms().measure(out, on_progress=stop_after(num_answers))
    assert not (out / "result.json").exists()
    with open(out / "requests.jsonl", "a") as file:
        file.write('{"kind": "answer", "arm"')  # a write cut by a kill
    second = Arms()
    result = second.measure(out)
    assert len([1 for _, name in second.log if not name.startswith("warm")]) == 12 - num_answers
    assert result["ratios"]["tau"] == whole["ratios"]["tau"]
    assert result["ratios"]["tpot"]["value"] == pytest.approx(whole["ratios"]["tpot"]["value"])
    assert result["score"]["value"] == pytest.approx(whole["score"]["value"])
    for name in ("baseline", "candidate"):
        assert result["arms"][name]["vllm"] == whole["arms"][name]["vllm"]
    assert score_run(out)["score"] == result["score"]


def test_a_finished_run_is_only_written_again(tmp_path: Path) -> None:
    first = Arms().measure(tmp_path)
    (tmp_path / "result.json").unlink()
    again = Arms()
    assert again.measure(tmp_path)["score"] == first["score"]
    assert all(name.startswith("warm") for _, name in again.log)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 9}, "seed was 0, now 9"),
        ({"thinking": "on"}, "thinking was 'none', now 'on'"),
        ({"rules": build_rules(min_tokens_for_tpot="4")}, "rules was"),
        ({"prompts": build_prompts([*NAMES, "chat-3"])}, "prompts was"),
        ({"plain": None}, "arms was"),
        ({"drafts": {"baseline": build_draft("base")}}, "draft of 'candidate' was"),
    ],
)
def test_other_settings_are_refused(changes: Any, message: str, tmp_path: Path) -> None:
    Arms().measure(tmp_path)
    before = (tmp_path / "requests.jsonl").read_bytes()
    with pytest.raises(ResultError, match=message):
        Arms().measure(tmp_path, **changes)
    assert (tmp_path / "requests.jsonl").read_bytes() == before


def test_a_restart_between_requests_is_an_error(tmp_path: Path) -> None:
    arms = Arms()

    def restart(done: int, total: int) -> None:
        if done == 6:
            arms.candidate.restart()

    with pytest.raises(ResultError, match="server restarted"):
        arms.measure(tmp_path, on_progress=restart)
