"""The bundled draft on a CUDA machine: served, measured and scored by unmodified vLLM 0.31.0.

make test-gpu (about seven minutes). With PACELINE_GPU_OUT the run folder is kept there.
Floors lie below what an H200 gave; figures: docs/results/smollm2-eagle3.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    from paceline.cli.measure import measure_drafts

    kept = os.environ.get("PACELINE_GPU_OUT")
    out = Path(kept) / "run" if kept else tmp_path_factory.mktemp("gpu") / "run"
    result = measure_drafts(
        "smollm2-eagle3",
        "ngram",
        target_name="smollm2",
        prompts="held-out",
        rules_name="demo",
        num_speculative_tokens=3,
        max_tokens=128,
        device="cuda",
        with_plain=True,
        with_replay=True,
        out=out,
    )
    return out, result


def test_engine_is_cuda(run: tuple[Path, dict[str, Any]]) -> None:
    engine = run[1]["arms"]["candidate"]["engine"]
    assert (engine["platform"], engine["method"]) == ("cuda", "eagle3")
    assert engine["num_speculative_tokens"] == 3
    assert not engine["prefix_caching"]


def test_acceptance_floor(run: tuple[Path, dict[str, Any]]) -> None:
    arm = run[1]["arms"]["candidate"]
    assert arm["tau"]["value"] >= 2.1
    assert arm["vllm"]["acceptance_length"] >= 2.1
    assert arm["coverage"] == pytest.approx(1.0)


def test_memory_is_weights_and_one_layer_of_keys(run: tuple[Path, dict[str, Any]]) -> None:
    memory = run[1]["arms"]["candidate"]["memory"]
    assert memory["weights_bytes"] == pytest.approx(10_179_072, rel=0.01)
    assert memory["kv_bytes"] == 16_384 * 768


def test_draft_is_faster_than_plain(run: tuple[Path, dict[str, Any]]) -> None:
    arms = run[1]["arms"]
    assert arms["candidate"]["tpot_ms"]["geomean"] < arms["plain"]["tpot_ms"]["geomean"]


def test_text_forks_only_at_near_ties(run: tuple[Path, dict[str, Any]]) -> None:
    assert run[1]["fidelity"]["candidate"]["real_fork"] == 0


def test_trained_equals_served(run: tuple[Path, dict[str, Any]]) -> None:
    replay = run[1]["replay"]["candidate"]
    assert replay["share"] >= 0.97
    assert abs(replay["position_1_served"] - replay["position_1_trained"]) <= 0.01


def test_score_is_recomputed(run: tuple[Path, dict[str, Any]]) -> None:
    from paceline.eval import score_run

    assert score_run(run[0])["score"]["value"] == run[1]["score"]["value"]
