"""From bytes to the acceptance a score needs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.forecast import build_forecast, describe_forecast, parse_design, read_shape
from paceline.forecast.score import find_goal
from paceline.rules import read_rules

RULES = read_rules("emc2-2027")
SHAPE = read_shape("qwen3.8-27b")


def _forecast(text: str, **settings: float):
    return build_forecast(parse_design(text, SHAPE), SHAPE, RULES, **settings)


def test_the_baseline_needs_its_own_acceptance_for_100() -> None:
    found = _forecast('family = "mtp"\nnum_speculative_tokens = 3\n')
    assert (found.memory_ratio, found.step_ratio) == (1.0, 1.0)
    assert found.goals is not None
    assert found.goals[0].acceptance_length == pytest.approx(2.8)
    # 125 = 75 r + 25, so r = 4 / 3; 150 needs r = 5 / 3, above K + 1 = 4
    assert found.goals[1].acceptance_ratio == pytest.approx(4 / 3)
    assert found.goals[2].acceptance_length == pytest.approx(2.8 * 5 / 3)
    assert [goal.reachable for goal in found.goals] == [True, True, False]
    assert found.best is not None
    assert found.best.score == pytest.approx(75 * 4 / 2.8 + 25)


def test_goals_by_hand_with_caps_and_gate() -> None:
    def goal(score: float, memory: float, step: float):
        return find_goal(
            RULES,
            score,
            memory_ratio=memory,
            step_ratio=step,
            baseline_acceptance_length=2.0,
            num_speculative_tokens=3,
        )

    capped = goal(150, 4.0, 1.0)  # 50 r + 50 + 25 r = 150
    assert capped.acceptance_ratio == pytest.approx(4 / 3)
    assert capped.capped == ("memory",)
    both = goal(175, 4.0, 2.0)  # time is capped from r = 1 on: 50 r + 100 = 175
    assert both.acceptance_ratio == pytest.approx(1.5)
    assert both.capped == ("memory", "tpot")
    gated = goal(100, 4.0, 2.5)  # 112.5 r + 50 = 100 at r = 0.444: below the gate of 0.8
    assert gated.gated
    assert gated.acceptance_ratio == pytest.approx(0.8)


def test_step_time_by_hand() -> None:
    """The native head: K times its 849 MB and the 2.54 GB head, at the stated bandwidth."""
    found = _forecast('family = "mtp"\nnum_speculative_tokens = 3\n', bandwidth_gb_s=4000.0)
    layer = found.memory.sizes.weights_bytes
    head, cache = 248320 * 5120 * 2, 2 * 4 * 256 * 2 * 8192
    assert found.step.draft_bytes == 3 * (layer + head + cache)
    assert found.step.verify_bytes == SHAPE.weights_bytes - head
    moved = found.step.verify_bytes + found.step.cache_bytes + found.step.draft_bytes
    assert found.step.step_ms == pytest.approx(moved / 4e9)


def test_warnings_say_what_the_rules_and_the_engine_mind() -> None:
    text = " | ".join(_forecast('family = "ngram"\nnum_speculative_tokens = 5\n').warnings)
    for words in ("not confirmed", "does not allow family ngram", "K = 3"):
        assert words in text
    text = " | ".join(_forecast('family = "eagle3"\nnum_speculative_tokens = 3\n').warnings)
    assert "rotary table takes 33.6 MB" in text
    text = " | ".join(
        _forecast('family = "eagle3"\nnum_speculative_tokens = 3\nwindow = 2048\n').warnings
    )
    assert "window of 2,048 saves no memory" in text


def test_the_published_reading_of_m_is_shown_beside_ours() -> None:
    found = _forecast('family = "medusa"\nnum_speculative_tokens = 3\n')
    base = found.baseline_memory
    assert base is not None
    narrow = found.memory.total_bytes - found.memory.state_bytes
    ratio = (base.total_bytes - base.state_bytes) / narrow
    assert any(f"{narrow:,} bytes and M_B / M is {ratio:.3f}" in text for text in found.warnings)


def test_limits() -> None:
    found = _forecast('family = "medusa"\nnum_speculative_tokens = 10\n')
    parameters, limit, holds = found.limits["parameters"]
    assert parameters == 10 * 5120**2 + 248320 * 5120
    assert (limit, holds) == (1_500_000_000, False)


def test_every_family_answers_within_a_second_and_as_json() -> None:
    start = time.perf_counter()
    for family in ("mtp", "eagle3", "medusa", "draft_model", "dflash", "ngram", "suffix"):
        for k in (1, 3, 7, 12):
            found = _forecast(f'family = "{family}"\nnum_speculative_tokens = {k}\n')
            assert json.loads(json.dumps(found.to_json_dict(), allow_nan=False))
            assert describe_forecast(found)
    assert time.perf_counter() - start < 28


def test_an_assumption_that_cannot_be() -> None:
    with pytest.raises(PlanError, match=r"acceptance length is 4\.5"):
        _forecast('family = "mtp"\nnum_speculative_tokens = 3\n', baseline_acceptance_length=4.5)
    with pytest.raises(PlanError, match="bandwidth is 0"):
        _forecast('family = "mtp"\nnum_speculative_tokens = 3\n', bandwidth_gb_s=0.0)


def test_a_draft_of_no_bytes_is_capped_not_infinite(tmp_path: Path) -> None:
    """On a dense target `ngram` takes nothing: the memory term stands at its cap."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    design = parse_design('family = "ngram"\nnum_speculative_tokens = 3\n', shape)
    alone = build_forecast(design, shape, RULES)
    assert (alone.goals, alone.memory.total_bytes) == (None, 0)
    assert "pass --baseline" in " ".join(alone.warnings)
    baseline = parse_design('family = "eagle3"\nnum_speculative_tokens = 3\n', shape)
    found = build_forecast(design, shape, RULES, baseline=baseline)
    assert found.to_json_dict()["memory_ratio"] == "unbounded"
    assert found.goals is not None
    assert "memory" in found.goals[0].capped
    assert found.goals[0].points["memory"] == pytest.approx(50.0)
    assert json.dumps(found.to_json_dict(), allow_nan=False)
    assert describe_forecast(found)
