"""paceline forecast --measure with real engines on a tiny hybrid shape, dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.forecast_measure import measure_shape
from paceline.forecast import CachePlan, measure_memory, parse_design, read_runs, read_shape
from paceline.forecast.measured_record import shape_as_run
from paceline.serve import ShapeDraft, open_shape

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 20000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
    "dtype": "bfloat16",
}
DESIGN = 'family = "eagle3"\nnum_speculative_tokens = 2\ndraft_vocab_size = 256\n'


def test_three_engines_by_shape_and_a_rerun_that_starts_none(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    design = tmp_path / "small.toml"
    design.write_text(DESIGN)

    def measure() -> None:
        measure_shape(
            [design],
            str(target),
            "emc2-2027",
            plan_path=None,
            lengths="16,200",
            num_repeats=2,
            max_tokens=16,
            minutes=None,
            at_once=1,
            device="cpu",
            out=tmp_path / "out",
        )

    measure()
    runs = read_runs(tmp_path / "out" / "steps.jsonl")
    assert [run.name for run in runs] == ["baseline", "plain", "small"]
    for run in runs:
        assert [point.context_tokens for point in run.points] == [24, 208]
        assert run.machine.startswith("cpu ")
    baseline, plain, small = runs
    assert plain.memory is None
    assert all(point.acceptance_length == 1 for point in plain.points)
    # a CPU engine cannot be told what to accept
    for run, k in ((baseline, 3), (small, 2)):
        assert run.acceptance_length is None
        assert all(1 <= point.acceptance_length <= k + 1 for point in run.points)
    assert small.points[0].ratio is not None
    # what the started engine holds for the draft is what was foreseen
    shape = shape_as_run(read_shape(target))
    for run, text in (
        (baseline, 'family = "mtp"\nnum_speculative_tokens = 3\n'),
        (small, DESIGN),
    ):
        foreseen = measure_memory(
            parse_design(text, shape), shape, context_tokens=16384, plan=CachePlan(device="cpu")
        )
        assert run.memory is not None
        assert run.memory["total_bytes"] == pytest.approx(foreseen.total_bytes, rel=0.01)
    logs = {file.name: file.stat().st_size for file in (tmp_path / "out" / "logs").iterdir()}
    assert sorted(logs) == ["baseline.log", "plain.log", "small.log"]
    measure()  # starts no engine: no log has grown
    for file in (tmp_path / "out" / "logs").iterdir():
        assert file.stat().st_size == logs[file.name]
    assert read_runs(tmp_path / "out" / "steps.jsonl") == runs


def test_memory_is_that_of_the_context_whatever_the_engines_length(tmp_path: Path) -> None:
    """An attention block longer than max_model_len is cut by vLLM: 16,384 tokens are not counted in
    such blocks. Caches of the 4 B shape, the rest of it small."""
    config = dict(read_shape("qwen3.5-4b").facts.config)
    config |= {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    design = parse_design('family = "mtp"\nnum_speculative_tokens = 2\n', shape)
    said = measure_memory(
        design, shape_as_run(shape), context_tokens=16384, plan=CachePlan(device="cpu")
    )
    draft = ShapeDraft(family="mtp", num_speculative_tokens=2, config={}, own=(), kv_dtype="auto")
    with open_shape(
        shape.facts,
        draft,
        acceptance_length=None,
        device="cpu",
        max_model_len=256,
        kv_cache_bytes=2**30,
        log_path=tmp_path / "engine.log",
    ) as endpoint:
        held = endpoint.memory(context_tokens=16384)
    assert held is not None
    assert (held.kv_bytes, held.state_bytes) == (said.kv_bytes, said.state_bytes)
