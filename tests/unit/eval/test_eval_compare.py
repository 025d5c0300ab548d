"""Runs side by side: what is real, what is noise, what is a tie, and what cannot be compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import Script, build_draft, build_prompts, build_rules
from scripted_arms import WARM, Arms

from paceline.errors import ResultError
from paceline.eval import compare_runs, write_result
from paceline.eval.ranks import Standing, compare_standings, rank_standings

NAMES = [f"{category}-{i}" for category in ("chat", "code") for i in range(6)]
RULES = build_rules(min_tokens_for_tpot="4", num_resamples="400", num_categories="2")
# per prompt: some are harder than others
HARD = [((1, 3),) * 4, ((1, 3), (2, 3), (2, 3)), ((0, 3), (1, 3), (2, 3), (1, 3))]
EASY = [((3, 3),) * 2, ((2, 3), (2, 3), (1, 3)), ((3, 3), (1, 3), (1, 3))]


def script(steps: Any, step_ms: float) -> Script:
    return Script(steps=steps, num_tokens=9, step_ms=step_ms)


def make_run(out: Path, *, slower: float = 0.0, jitter: int = 0, **changes: Any) -> Path:
    """A candidate of EASY steps. slower: its extra time; jitter: seed of 1 % noise in its times."""
    rules = changes.pop("rules", RULES)
    prompts = build_prompts(NAMES)
    arms = Arms(prompts=prompts, rules=rules, **changes)
    random = np.random.RandomState(jitter)
    plain = script((None,) * 8, 10.0)
    arms.plain.scripts = {**WARM, **dict.fromkeys(NAMES, plain)}
    arms.baseline.scripts = {**WARM}
    arms.candidate.scripts = {**WARM}
    for i, name in enumerate(NAMES):
        arms.baseline.scripts[name] = script(HARD[i % 3], 12.0)  # type: ignore[index]
        noise = 1 + (random.normal(0, 0.01) if jitter else 0.0)
        step = 12.0 * (1 + slower) * noise
        arms.candidate.scripts[name] = script(EASY[i % 3], step)  # type: ignore[index]
    arms.measure(out)
    return out


def test_one_run_twice_is_a_difference_of_nothing(tmp_path: Path) -> None:
    found = compare_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    assert [run["rank"] for run in found["runs"]] == [[1, 2], [1, 2]]
    by_score = found["differences"][0]
    assert (by_score["figure"], by_score["value"], by_score["verdict"]) == ("score", 0.0, "noise")
    assert found["noise_floor"] is None


def test_a_real_difference_is_told_from_noise(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", jitter=1),
        make_run(tmp_path / "b", jitter=2),
        make_run(tmp_path / "slow", jitter=3, slower=0.05),
    ]
    found = compare_runs(runs)
    verdict = {
        (row["figure"], Path(row["first"]).name, Path(row["second"]).name): row["verdict"]
        for row in found["differences"]
    }
    assert verdict["score", "a", "b"] == "noise"
    assert verdict["score", "a", "slow"] == verdict["score", "b", "slow"] == "real"
    assert verdict["tpot", "a", "slow"] == "real"
    assert verdict["tau", "a", "slow"] == "noise"  # same steps
    assert [run["rank"] for run in found["runs"]] == [[1, 2], [1, 2], [3, 3]]
    slow = next(r for r in found["differences"] if r["figure"] == "tpot" and "slow" in r["second"])
    assert slow["low"] < 1.05 < slow["high"]


def add_floor(run: Path, score: float) -> Path:
    result = json.loads((run / "result.json").read_text())
    floor = {"score": score, "tau": 0.0, "tpot": score / 25}
    value = result["score"]["value"]
    result["noise_floor"] = floor
    result["score"]["tie"] = abs(value - 100) <= score
    write_result(run, result)
    return run


def test_what_lies_below_the_noise_floor_is_a_tie(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "slow", slower=0.01)]
    found = compare_runs(runs)
    assert found["differences"][0]["verdict"] == "real"  # no noise in the script at all
    found = compare_runs([add_floor(run, 0.8) for run in runs])
    assert found["differences"][0]["verdict"] == "tie"
    assert found["noise_floor"]["score"] == 0.8
    assert [run["rank"] for run in found["runs"]] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"thinking": "on"}, "thinking is none in .*a, on in .*b"),
        ({"seed": 3}, "seed is 0 in .*, 3 in"),
        ({"prompt_set_sha256": "f" * 64}, "prompt set is nothing in .*, ffffffffffff in"),
        ({"rules": build_rules(num_resamples="300", min_tokens_for_tpot="4")}, "rules is "),
        (
            {"drafts": {"baseline": build_draft("other"), "candidate": build_draft("mine")}},
            "baseline draft is basebasebase",
        ),
    ],
)
def test_unlike_settings_are_refused_and_named(changes: Any, part: str, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", **changes)]
    with pytest.raises(ResultError, match=part):
        compare_runs(runs)


def test_unlike_engines_machines_and_prompts_are_refused(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a")

    def changed(name: str, *keys: str, by: Any) -> Path:
        out = make_run(tmp_path / name)
        result = json.loads((out / "result.json").read_text())
        place = result
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = by
        write_result(out, result)
        return out

    for name, keys, by, part in (
        ("b", ("arms", "baseline", "engine", "device_name"), "another", "device_name is toy"),
        ("c", ("provenance", "machine"), "another", "machine is "),
        ("d", ("target", "weights_fingerprint"), "x" * 64, "target weights is wwww"),
    ):
        with pytest.raises(ResultError, match=part):
            compare_runs([first, changed(name, *keys, by=by)])


def test_fewer_than_two_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    for runs in ([run], [run, run]):
        with pytest.raises(ResultError, match="two or more different run folders"):
            compare_runs(runs)


def test_a_withheld_run_has_no_rank(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    arms = Arms(prompts=build_prompts(NAMES), rules=RULES)
    loop = replace(script(((3, 3),) * 2, 1.0), tokens=(1000, *(7, 8) * 4))
    from paceline.endpoint import TokenChoice

    arms.plain.scripts = {**WARM, **dict.fromkeys(NAMES, script((None,) * 8, 10.0))}
    arms.baseline.scripts = {
        **WARM,
        **{name: script(HARD[i % 3], 12.0) for i, name in enumerate(NAMES)},
    }
    arms.candidate.scripts = {**WARM, **dict.fromkeys(NAMES, loop)}
    view = TokenChoice(token_ids=(1001, 7), logprobs=(-0.1, -9.0))
    arms.plain.choices = {(*name.encode(), 1000): view for name in NAMES}
    arms.measure(tmp_path / "loops")
    found = compare_runs([a, b, tmp_path / "loops"])
    assert found["runs"][2]["rank"] is None
    assert found["runs"][2]["score"] is None
    assert "candidate" in found["runs"][2]["withheld"]
    assert [run["rank"] for run in found["runs"][:2]] == [[1, 2], [1, 2]]


# --- standings ------------------------------------------------------------------------------------


def standing(name: str, values: Any, draws: Any) -> Standing:
    """The mean of values over prompts of one category, resampled."""
    values = np.asarray(values, dtype=np.float64)
    cells = (values - values.mean())[:, None]
    return Standing(
        name=name,
        value=float(values.mean()),
        cells=(cells,),
        deviations=(values - values.mean())[draws].mean(axis=1),
    )


def test_differences_are_paired() -> None:
    """Prompts differ by 10, the two runs by 1 on every prompt."""
    random = np.random.RandomState(0)
    base = random.normal(0, 10, 30)
    draws = random.randint(0, 30, (500, 30))
    noise = random.normal(0, 0.1, 30)
    one, other = standing("a", base + 1 + noise, draws), standing("b", base, draws)
    (found,) = compare_standings([one, other], confidence=0.95, floor=None)
    assert found.verdict == "real"
    assert found.half_width is not None
    assert found.half_width < 0.1
    assert rank_standings([one, other], [found]) == {"a": (1, 1), "b": (2, 2)}


def test_many_entries_do_not_make_differences() -> None:
    """Six runs of one draft: in 95 % of tables no pair at all is called real."""
    random = np.random.RandomState(1)
    draws = random.randint(0, 40, (300, 40))
    clean = 0
    for _ in range(40):
        runs = [standing(str(i), random.normal(0, 1, 40), draws) for i in range(6)]
        found = compare_standings(runs, confidence=0.95, floor=None)
        clean += all(row.verdict == "noise" for row in found)
    assert clean >= 34


def test_too_few_prompts_say_so() -> None:
    draws = np.array([[0, 1, 2], [1, 1, 2]])
    runs = [standing("a", [1, 2, 4], draws), standing("b", [9, 8, 9], draws)]
    (found,) = compare_standings(runs, confidence=0.95, floor=None)
    assert (found.verdict, found.half_width) == ("unknown", None)
    assert rank_standings(runs, [found]) == {"a": (1, 2), "b": (1, 2)}


def test_a_fixed_value_stands_beside_measured_ones() -> None:
    random = np.random.RandomState(2)
    draws = random.randint(0, 30, (300, 30))
    fixed = Standing(name="baseline", value=0.0, cells=(), deviations=np.empty(0))
    runs = [fixed, standing("a", random.normal(3, 1, 30), draws)]
    (found,) = compare_standings(runs, confidence=0.95, floor=None)
    assert found.verdict == "real"
    assert found.half_width == pytest.approx(2.05 / math.sqrt(30), rel=0.25)
