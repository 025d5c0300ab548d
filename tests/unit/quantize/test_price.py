"""The price of a quantisation: ratios by hand, and a gate that keeps what it must."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.errors import ResultError
from paceline.quantize import build_price, build_target_price
from paceline.report import render_price


def build_result(tau: float = 0.99, low: float | None = 0.985, high: float | None = 0.995) -> Any:
    arm = {
        "memory": {"total_bytes": 4_000_000},
        "tau": {"value": 2.0},
        "tpot_ms": {"median": 20.0},
        "vllm": {"acceptance_length": 2.1},
    }
    return {
        "arms": {"baseline": arm, "candidate": {**arm, "memory": {"total_bytes": 2_000_000}}},
        "ratios": {
            "tau": {"value": tau, "low": low, "high": high},
            "memory": {"value": 2.0, "low": 2.0, "high": 2.0},
            "tpot": {"value": 1.1, "low": 1.0, "high": 1.2},
        },
        "score": {"value": 105.0, "low": 101.0, "high": 109.0},
    }


def price(result: Any, max_loss: float | None = None) -> Any:
    return build_price(result, files_bytes=(100, 25), kernels={}, max_loss=max_loss)


def test_rows() -> None:
    rows = price(build_result()).rows
    assert rows["files_bytes"]["ratio"] == 4.0
    assert rows["memory_bytes"] == {
        "before": 4_000_000,
        "after": 2_000_000,
        "ratio": 2.0,
        "low": 2.0,
        "high": 2.0,
    }
    assert rows["score"]["before"] == 100.0
    assert rows["score"]["ratio"] == pytest.approx(1.05)
    assert rows["acceptance_length"]["ratio"] is None


@pytest.mark.parametrize(
    ("tau", "low", "high", "limit", "verdict"),
    [
        (0.99, 0.985, 0.995, 0.02, "within"),
        (0.99, 0.975, 1.005, 0.02, "open"),
        (0.99, None, None, 0.02, "open"),
        (0.97, 0.96, 0.985, 0.02, "exceeds"),
        (0.50, 0.40, 0.60, None, "within"),
        (1.01, 1.00, 1.02, 0.0, "within"),
    ],
)
def test_the_gate(
    tau: float, low: float | None, high: float | None, limit: float | None, verdict: str
) -> None:
    found = price(build_result(tau, low, high), limit)
    assert found.verdict == verdict
    assert found.loss == pytest.approx(1 - tau)
    if low is not None:
        assert found.loss_high == pytest.approx(1 - low)


def test_a_run_of_one_arm_has_no_price() -> None:
    with pytest.raises(ResultError, match="not both measured"):
        price({"arms": {}, "ratios": None})


def test_what_was_not_measured_is_said() -> None:
    import dataclasses

    from rich.console import Console

    result = build_result(low=None, high=None)
    result["score"] = None
    result["arms"]["candidate"]["vllm"] = None
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_price(dataclasses.asdict(price(result))))
    text = console.export_text()
    assert text.count("not measured") == 2
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_targets_price_by_hand() -> None:
    """Two texts of 2 and 4 tokens: 0.1 and 0.3 nats lost, of 6 tokens 0.4."""
    before = [[-1.0, -1.0], [-0.5, -0.5, -0.5, -0.5]]
    after = [[-1.05, -1.05], [-0.6, -0.6, -0.6, -0.5]]
    found = build_target_price(
        before,
        after,
        identical=1,
        tpot_ms=([20.0, 22.0], [10.0, 11.0]),
        files_bytes=(100, 50),
        kernels={},
        max_loss=0.1,
    )
    mean = 0.4 / 6
    assert found.loss == pytest.approx(math.expm1(mean))
    rests = [0.1 - 2 * mean, 0.3 - 4 * mean]
    error = math.sqrt(sum(rest**2 for rest in rests) / 1 / 2) / 3
    t = 12.706204736  # 97.5 % of Student's t with one degree of freedom
    assert found.loss_high == pytest.approx(math.expm1(mean + t * error))
    assert found.loss_low == pytest.approx(math.expm1(mean - t * error))
    assert found.verdict == "open"
    assert found.rows["perplexity"]["before"] == pytest.approx(math.exp(4 / 6))
    assert found.rows["perplexity"]["after"] == pytest.approx(math.exp(4.4 / 6))
    assert found.rows["perplexity"]["ratio"] == pytest.approx(math.exp(-mean))
    assert found.rows["tpot_ms"]["ratio"] == pytest.approx(2.0)
    assert found.rows["tpot_ms"]["low"] == pytest.approx(2.0)
    assert found.rows["identical"] == {
        "before": 2,
        "after": 1,
        "ratio": 0.5,
        "low": None,
        "high": None,
    }


def test_a_target_must_have_read_the_same_texts() -> None:
    settings: dict[str, Any] = {
        "identical": 0,
        "tpot_ms": ([], []),
        "files_bytes": (2, 1),
        "kernels": {},
        "max_loss": None,
    }
    for before, after in (([[-1.0]], [[-1.0, -2.0]]), ([], []), ([[]], [[]])):
        with pytest.raises(ResultError, match="the same texts"):
            build_target_price(before, after, **settings)
    one = build_target_price([[-1.0]], [[-2.0]], **settings)
    assert one.loss_high is None
    assert one.rows["tpot_ms"]["ratio"] is None
