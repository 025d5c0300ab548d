"""Latency alone: speed-ups by hand, what is out of reach, and what has no effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.errors import PlanError
from paceline.forecast import (
    build_latency,
    describe_latency,
    parse_design,
    read_shape,
    read_step_model,
)

SHAPE = read_shape("qwen3.5-4b")
TEXT = 'family = "eagle3"\nnum_speculative_tokens = 2\ndraft_vocab_size = 32768\n'
REGIMES = [(64, 128), (2048, 256), (8192, 256)]


def test_speed_ups_by_hand() -> None:
    """With length a the speed-up of a regime is a * plain / step: the mean needs wanted / mean."""
    found = build_latency(parse_design(TEXT, SHAPE), SHAPE, REGIMES, model=read_step_model("h200"))
    shares = [point.plain_ms / point.step_ms for point in found.points]
    assert all(0.5 < share < 1 for share in shares)
    mean = sum(shares) / 3
    assert found.needed == pytest.approx({w: w / mean for w in (1.0, 1.5, 2.0, 3.0)})
    assert found.most == pytest.approx(3 * mean)
    shown = dict(dict(describe_latency(found))["As fast as the target alone, mean of the regimes"])
    assert shown["break-even"] == f"acceptance length {1 / mean:.2f}"
    assert shown["3 times"].endswith("OUT OF REACH: above K + 1")
    assert shown["at most"] == f"{3 * mean:.2f} times with acceptance length 3"


def test_the_middle_of_the_answer_is_the_context() -> None:
    """Roofline: the plain step of 64 + 128 tokens moves the weights, 128 tokens and the states."""
    found = build_latency(parse_design(TEXT, SHAPE), SHAPE, [(64, 128)], bandwidth_gb_s=1000.0)
    longer = build_latency(parse_design(TEXT, SHAPE), SHAPE, [(64, 1128)], bandwidth_gb_s=1000.0)
    kv = 8 * 2 * 4 * 256 * 2  # bytes a token of eight attention layers' keys and values
    difference = (longer.points[0].plain_ms - found.points[0].plain_ms) * 1e-3 * 1e12
    assert difference == pytest.approx(500 * kv, rel=0.01)  # aligned pages


def test_too_long_a_regime_is_refused() -> None:
    with pytest.raises(PlanError, match="262,145"):
        build_latency(parse_design(TEXT, SHAPE), SHAPE, [(262_144, 1)])


def test_by_command_line(tmp_path: Path) -> None:
    design = tmp_path / "d.toml"
    design.write_text(TEXT)
    words = ["forecast", str(design), "--target", "qwen3.5-4b", "--rules", "adaptfm-2026"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [point["prompt_tokens"] for point in found["points"]] == [64, 2048, 8192]
    assert found["needed"]["2"] == pytest.approx(2 * found["needed"]["1"])
    refused = CliRunner().invoke(app, [*words, "--baseline-acceptance", "2"])
    assert isinstance(refused.exception, PlanError)
    assert "no effect with adaptfm-2026" in str(refused.exception)
