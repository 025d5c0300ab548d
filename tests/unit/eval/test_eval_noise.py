"""The noise floor: measured from one draft against itself, kept by machine, found again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEndpoint, build_draft, build_memory, build_rules
from scripted_arms import BASE
from test_eval_compare import make_run
from test_eval_cycles import NAMES as CYCLE_NAMES
from test_eval_cycles import Servers

from paceline.errors import ResultError
from paceline.eval import (
    Cycles,
    add_noise_floor,
    find_noise_floor,
    keep_noise_floor,
    measure_noise_floor,
    score_run,
    write_result,
)
from paceline.eval.noise import FLOOR_CONFIDENCE

RULES = build_rules(min_tokens_for_tpot="4", num_resamples="400", num_categories="2")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def against_itself(out: Path, **changes: Any) -> dict[str, Any]:
    """The baseline's draft as both arms, on servers that differ by a percent."""
    draft = build_draft("base")
    servers = Servers(
        rules=RULES,
        with_plain=False,
        drafts={"baseline": draft, "candidate": draft},
        **changes,
    )
    speeds = {"baseline": [1.0, 1.01, 0.99, 1.0], "candidate": [1.01, 1.0, 0.99, 1.005]}
    opened = servers.open_arm

    @contextlib.contextmanager
    def open_arm(name: str) -> Iterator[ScriptedEndpoint]:
        with opened(name) as endpoint:
            number = sum(1 for arm, _ in servers.log if arm == name) - 1
            step_ms = 12.0 * speeds[name][number % 4]
            own = {
                key: replace(BASE, step_ms=step_ms * (1 + 0.01 * i))
                for i, key in enumerate(CYCLE_NAMES)
            }
            endpoint.scripts = {**endpoint.scripts, **own}
            endpoint.memory_facts = build_memory(900)
            yield endpoint

    servers.open_arm = open_arm  # type: ignore[method-assign]
    return servers.measure(out)


def test_floor_is_the_wider_half_width_of_a_run_against_itself(tmp_path: Path) -> None:
    result = against_itself(tmp_path / "aa")
    floor = measure_noise_floor(result, RULES)
    assert floor["confidence"] == FLOOR_CONFIDENCE == pytest.approx(0.95 ** (1 / 20), abs=5e-5)
    half = result["ratios"]["tpot"]["high"] / result["ratios"]["tpot"]["value"] - 1
    assert floor["tpot"] > half  # 99.74 % is wider than 95 %
    assert floor["score"] == pytest.approx(25 * floor["tpot"], rel=0.2)
    assert floor["tau"] == 0.0  # the same steps on every server
    assert (floor["protocol"], floor["num_cycles"], floor["num_prompts"]) == ("cycles", 2, 8)
    assert "toy" in floor["machine"]["device_name"]


def test_floor_is_kept_and_found_again(tmp_path: Path) -> None:
    result = against_itself(tmp_path / "aa")
    assert find_noise_floor(result) is None
    floor = measure_noise_floor(result, RULES)
    path = keep_noise_floor(floor)
    assert path.is_relative_to(tmp_path / "cache" / "noise")
    assert find_noise_floor(result) == floor
    # a run of more cycles or prompts has less noise; of fewer, more
    more = against_itself(tmp_path / "more", cycles=Cycles(num_cycles=3))
    fewer = against_itself(tmp_path / "fewer", cycles=Cycles(num_cycles=1))
    assert find_noise_floor(more) == floor
    assert find_noise_floor(fewer) is None
    assert find_noise_floor({**result, "rules": {"sha256": "0" * 64}}) is None
    small = {**result, "prompts": {**result["prompts"], "num_prompts": 7}}
    assert find_noise_floor(small) is None
    quick = {**result, "protocol": {"kind": "quick"}}
    assert find_noise_floor(quick) is None


def test_floor_makes_ties_and_is_recomputed_from_the_file(tmp_path: Path) -> None:
    result = against_itself(tmp_path / "aa")
    floor = measure_noise_floor(result, RULES)
    assert result["score"]["tie"] is None
    added = add_noise_floor(result, floor, RULES)
    assert added["score"]["tie"] is True
    assert abs(added["score"]["value"] - 100) <= floor["score"]
    write_result(tmp_path / "aa", added)
    assert score_run(tmp_path / "aa") == added
    wrong = {**added, "score": {**added["score"], "tie": False}}
    write_result(tmp_path / "aa", wrong)
    with pytest.raises(ResultError, match=r"score\.tie"):
        score_run(tmp_path / "aa")


def test_a_run_of_two_drafts_gives_no_floor(tmp_path: Path) -> None:
    result = json.loads((make_run(tmp_path / "a") / "result.json").read_text())
    with pytest.raises(ResultError, match="not one draft on two servers"):
        measure_noise_floor(result, RULES)


def test_a_faster_draft_is_no_tie(tmp_path: Path) -> None:
    result = json.loads((make_run(tmp_path / "a") / "result.json").read_text())
    floor = {"score": 0.5, "tau": 0.0, "tpot": 0.02}
    assert add_noise_floor(result, floor, RULES)["score"]["tie"] is False
