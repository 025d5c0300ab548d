"""Plans of engines by shape: dummy weights, acceptance by decree, and what goes with CUDA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.forecast import build_draft_config, list_own_tensors, parse_design, read_shape
from paceline.serve.plan import Plan
from paceline.serve.shape_run import ShapeDraft, plan_shape

SHAPE = read_shape("qwen3.5-4b")
_SMALL = (
    "hidden_size = 64\nintermediate_size = 64\nnum_heads = 2\nnum_kv_heads = 1\nhead_dim = 32\n"
)


def _draft(text: str) -> ShapeDraft:
    design = parse_design(text + "num_speculative_tokens = 3\n", SHAPE)
    return ShapeDraft(
        family=design.family,
        num_speculative_tokens=3,
        config=build_draft_config(design, SHAPE),
        own=list_own_tensors(design),
        kv_dtype="auto" if design.kv_dtype == "bfloat16" else design.kv_dtype,
    )


def _plan(folder: Path, draft: ShapeDraft | None, **settings: object) -> Plan:
    common = {
        "acceptance_length": None if draft is None else 2.8,
        "device": "cuda",
        "max_model_len": 4096,
        "kv_cache_bytes": 10**9,
    }
    return plan_shape(folder, SHAPE.facts, draft, **{**common, **settings})  # type: ignore[arg-type]


def test_the_native_head_by_decree(tmp_path: Path) -> None:
    plan = _plan(tmp_path, _draft('family = "mtp"\n'))
    args = plan.engine_args
    assert args["load_format"] == "dummy"
    assert args["gdn_prefill_backend"] == "triton"
    assert args["kv_cache_memory_bytes"] == 10**9
    assert args["gpu_memory_utilization"] < 0.1  # the pool's size is stated: two engines fit
    assert plan.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    speculative = args["speculative_config"]
    assert speculative["rejection_sample_method"] == "synthetic"
    assert speculative["synthetic_acceptance_length"] == 2.8
    assert "model" not in speculative  # the target's own head
    assert not (tmp_path / "draft").exists()
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert not [key for key in config["rope_parameters"] if key.startswith("mrope")]


def test_a_draft_is_a_folder_and_keeps_its_own_loader(tmp_path: Path) -> None:
    text = 'family = "eagle3"\nkv_dtype = "fp8"\ndraft_vocab_size = 64\n' + _SMALL
    speculative = _plan(tmp_path, _draft(text)).engine_args["speculative_config"]
    assert speculative["draft_load_config"] == {"load_format": "safetensors"}
    assert speculative["kv_cache_dtype"] == "fp8"
    assert (tmp_path / "draft" / "model.safetensors").exists()


def test_medusa_takes_the_runner_that_has_it(tmp_path: Path) -> None:
    config = {**SHAPE.facts.config, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    design = parse_design('family = "medusa"\nnum_speculative_tokens = 2\n', shape)
    draft = ShapeDraft(
        family="medusa", num_speculative_tokens=2, config=build_draft_config(design, shape)
    )
    plan = plan_shape(
        tmp_path,
        shape.facts,
        draft,
        acceptance_length=2.0,
        device="cuda",
        max_model_len=4096,
        kv_cache_bytes=10**9,
    )
    assert plan.runner == "v1"
    assert plan.env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert plan.engine_args["async_scheduling"] is False


def test_the_target_alone_has_no_speculation(tmp_path: Path) -> None:
    args = _plan(tmp_path, None).engine_args
    assert args["load_format"] == "dummy"
    assert "speculative_config" not in args


@pytest.mark.parametrize(
    ("has_draft", "settings"),
    [
        (True, {"acceptance_length": None}),
        (True, {"acceptance_length": 4.5}),
        (True, {"acceptance_length": 0.5}),
        (False, {"acceptance_length": 2.0}),
        (True, {"device": "cpu"}),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, has_draft: bool, settings: dict[str, object]
) -> None:
    with pytest.raises(PlanError, match="acceptance length is"):
        _plan(tmp_path, _draft('family = "mtp"\n') if has_draft else None, **settings)
