"""A score is recomputed from its file; a changed number is found and named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_arms import RULES, Arms, forked

from paceline.errors import ResultError
from paceline.eval import add_replay, score_run, write_result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    arms = Arms()
    forked(arms, 0.125)
    arms.measure(tmp_path)
    return tmp_path


def read(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())


def test_same_score_from_both_files(run: Path) -> None:
    assert score_run(run) == read(run)


def test_same_score_from_result_json_alone(run: Path) -> None:
    (run / "requests.jsonl").unlink()
    assert score_run(run)["score"] == read(run)["score"]


def test_no_rules_file_is_needed(run: Path) -> None:
    """The rules of this run are in no file of the package."""
    assert "min_tokens_for_tpot = 4" in read(run)["rules"]["text"]
    assert score_run(run)["rules"]["sha256"] == RULES.sha256


def change(*path: str | int, by: Any) -> Callable[[Any], None]:
    def apply(result: Any) -> None:
        *parents, last = path
        for key in parents:
            result = result[key]
        result[last] = by

    return apply


@pytest.mark.parametrize(
    ("tamper", "field"),
    [
        (change("score", "value", by=199.0), "score.value"),
        (change("score", "low", by=199.0), "score.low"),
        (change("score", "ranked", by=False), "score.ranked"),
        (change("score", "terms", "tau", "points", by=1.0), "score.terms.tau.points"),
        (change("score", "gate", "minimum_tau_ratio", by=0.1), "score.gate.minimum_tau_ratio"),
        (change("score", by=None), "score"),
        (change("withheld", by={"candidate": ["it loops"]}), "withheld"),
        (change("ratios", "tau", "value", by=1.9), "ratios.tau.value"),
        (change("ratios", "tpot", "high", by=9.0), "ratios.tpot.high"),
        (change("ratios", "memory", "value", by=2.0), "ratios.memory.value"),
        (change("arms", "candidate", "tau", "value", by=3.9), "arms.candidate.tau.value"),
        (
            change("arms", "candidate", "tau", "by_category", "code", "steps", by=5),
            "arms.candidate.tau.by_category.code.steps",
        ),
        (change("arms", "baseline", "tpot_ms", "median", by=60.0), "arms.baseline.tpot_ms.median"),
        (
            change("arms", "candidate", "memory", "total_bytes", by=1),
            "arms.candidate.memory.total_bytes",
        ),
        (change("arms", "candidate", "memory", "kv_bytes", by=1), "memory.total_bytes"),
        (change("arms", "candidate", "coverage", by=0.5), "arms.candidate.coverage"),
        (
            change("arms", "candidate", "requests", 0, "steps", by=1),
            "arms.candidate.tau.by_category",
        ),
        (change("arms", "candidate", "failures", by=1), "arms.candidate.failures"),
        (
            change("arms", "candidate", "vllm", "from_requests", "num_accepted", by=30),
            "arms.candidate.vllm.from_requests.num_accepted",
        ),
        (change("cache_state", by="cold"), "cache_state"),
        (change("rules", "sha256", by="0" * 64), "rules.sha256"),
        (change("rules", "name", by="other"), "rules.name"),
        (change("rules", "provisional", by=["gate"]), "rules.provisional"),
        (change("format", by="paceline-result/2"), "format"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_changed_number_is_named(
    tamper: Callable[[Any], None], field: str, alone: bool, run: Path
) -> None:
    result = read(run)
    tamper(result)
    write_result(run, result)
    if alone:
        (run / "requests.jsonl").unlink()
    with pytest.raises(ResultError) as caught:
        score_run(run)
    assert field in str(caught.value)
    assert "result.json" in str(caught.value)


@pytest.mark.parametrize(
    ("tamper", "field"),
    [
        (
            change("arms", "candidate", "vllm", "acceptance_length", by=3.9),
            "arms.candidate.vllm.acceptance_length",
        ),
        (change("arms", "plain", "prefix_cache", "hits", by=1), "arms.plain.prefix_cache.hits"),
        (change("fidelity", "candidate", "max_near_tie_gap", by=0.1), "max_near_tie_gap"),
        (change("arms", "candidate", "requests", 0, "num_prompt_tokens", by=9), "requests[0]"),
    ],
)
def test_facts_of_the_engine_are_checked_against_its_transcript(
    tamper: Callable[[Any], None], field: str, run: Path
) -> None:
    result = read(run)
    tamper(result)
    write_result(run, result)
    with pytest.raises(ResultError) as caught:
        score_run(run)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "tamper",
    [
        change("arms", "candidate", "requests", 0, "itl_ms", by="x"),
        change("arms", "candidate", "requests", 0, "tpot_ms", by=0.0),
        change("arms", "candidate", "requests", 0, "tpot_ms", by="x"),
        change("arms", "candidate", "requests", 0, "delivered", by=10**400),
        change("arms", "candidate", "requests", 0, "accepted_at", by=["x"]),
        change("seed", by=-1),
        change("seed", by=2**40),
        change("arms", "candidate", "engine", "num_speculative_tokens", by=-1),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_of_no_sense_are_an_error_of_the_file(
    tamper: Callable[[Any], None], run: Path
) -> None:
    result = read(run)
    tamper(result)
    (run / "result.json").write_text(json.dumps(result))
    (run / "requests.jsonl").unlink()
    with pytest.raises(ResultError, match=r"result\.json"):
        score_run(run)


def test_a_changed_rule_in_the_text_is_found(run: Path) -> None:
    result = read(run)
    result["rules"]["text"] = result["rules"]["text"].replace("weight = 0.50", "weight = 0.40")
    write_result(run, result)
    with pytest.raises(ResultError, match=r"rules\.sha256"):
        score_run(run)


def test_a_changed_transcript_is_found(run: Path) -> None:
    path = run / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(r for r in rows if r["kind"] == "answer" and r["arm"] == "candidate")
    row["chunk_times_s"][-1] += 0.001
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(ResultError, match=r"arms\.candidate\.requests"):
        score_run(run)


@pytest.mark.parametrize("key", ["arms", "ratios", "rules", "seed", "aliases", "score"])
def test_a_missing_part_is_one_message(key: str, run: Path) -> None:
    result = read(run)
    del result[key]
    write_result(run, result)
    with pytest.raises(ResultError, match=key):
        score_run(run)


def test_a_broken_row_is_named(run: Path) -> None:
    path = run / "requests.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = '{"kind": "answer", "arm": "plain"}'
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ResultError, match=r"requests\.jsonl:5"):
        score_run(run)


def test_a_result_of_before_the_gate_is_scored_anew(run: Path) -> None:
    """Its intervals were percentiles; its values, its texts and its entries are as ever."""
    result = read(run)
    new = dict(result["score"])
    for key in ("withheld", "protocol", "noise_floor"):
        del result[key]
    for key in ("by_category", "worst_category", "by_prompt_tokens"):
        del result["ratios"][key]
    result["ratios"]["tau"] = {"value": result["ratios"]["tau"]["value"], "low": 1.1, "high": 9.9}
    result["score"] |= {"low": 1.0, "high": 300.0}
    for fidelity in result["fidelity"].values():
        del fidelity["differences"]
        for loops in fidelity["loops"].values():
            del loops["mean_num_tokens"], loops["eos_share"]
    for arm in result["arms"].values():
        for entry in arm["requests"]:
            del entry["block"]
    write_result(run, result)
    assert score_run(run)["score"] == new
    result["score"]["value"] += 1
    write_result(run, result)
    with pytest.raises(ResultError, match=r"score\.value"):
        score_run(run)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="does not exist"):
        score_run(tmp_path / "nothing")


def test_replay_is_judged_by_the_rules_and_changes_no_number(run: Path) -> None:
    result = read(run)
    tie = RULES.replay.near_tie_logits
    figures = {
        "num_steps": 200,
        "num_agree": 194,
        "gaps": [0.0, tie / 2, tie, tie, tie + 0.01, math.inf],
        "position_1_served": 0.70,
        "position_1_trained": 0.705,
    }
    added = add_replay(result, {"candidate": figures}, RULES)
    found = added["replay"]["candidate"]
    # 194 agree and 4 of the 6 others are near ties: 198 of 200 is just enough
    assert (found["share"], found["num_near_tie"], found["num_real"]) == (0.97, 4, 2)
    assert found["max_near_tie_gap"] == tie
    assert found["passed"]
    assert {k: v for k, v in added.items() if k != "replay"} == {
        k: v for k, v in result.items() if k != "replay"
    }
    write_result(run, added)
    assert score_run(run)["score"] == result["score"]
    off = {**figures, "position_1_trained": 0.72}
    assert add_replay(result, {"candidate": off}, RULES)["replay"]["candidate"]["passed"] is False
    few = {**figures, "gaps": [0.0, tie, tie, tie + 0.01, tie + 0.02, math.inf]}
    assert add_replay(result, {"candidate": few}, RULES)["replay"]["candidate"]["passed"] is False
    with pytest.raises(ResultError, match="does not fit"):
        add_replay(result, {"other": figures}, RULES)
