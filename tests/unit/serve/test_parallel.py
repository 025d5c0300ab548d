"""Plans of drafts that fill their slots in one pass: what is set, what is refused and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.draft import Draft, build_dflash_config, build_eagle3_config
from paceline.errors import PlanError
from paceline.safetensors_header import TensorInfo
from paceline.serve import build_plan, check_plan
from paceline.target import TargetFacts

Targets = Callable[..., TargetFacts]
K, MASK = 3, 63


@pytest.fixture(autouse=True)
def _installed(play_vllm: Callable[..., None]) -> None:
    play_vllm("")


@pytest.fixture
def make_dflash(
    make_target: Targets, make_draft: Callable[..., Draft], tmp_path: Path
) -> Callable[..., Draft]:
    def make(change: dict[str, Any] | None = None, **shape: Any) -> Draft:
        settings: dict[str, Any] = {
            "aux_layer_ids": [1, 2, 3],
            "mask_token_id": MASK,
            "num_speculative_tokens": K,
            "head_dim": 32,
            **shape,
        }
        config = {**build_dflash_config(make_target(), **settings), **(change or {})}
        draft = make_draft(family="dflash", k=K, config=config)
        (draft.path / "config.json").write_text(json.dumps(config))
        return draft

    return make


@pytest.fixture
def parallel_eagle3(make_target: Targets, make_draft: Callable[..., Draft]) -> Draft:
    config = build_eagle3_config(
        make_target(), aux_layer_ids=[1, 2, 3], head_dim=32, mask_token_id=MASK
    )
    return make_draft(k=K, config=config)


def test_one_layer_is_served_on_a_cpu(
    make_target: Targets, make_dflash: Callable[..., Draft]
) -> None:
    plan = build_plan(make_target(), make_dflash(), device="cpu")
    spec = plan.engine_args["speculative_config"]
    assert (spec["method"], spec["num_speculative_tokens"]) == ("dflash", K)
    assert "parallel_drafting" not in spec  # vLLM turns it on for this method
    assert check_plan(plan) == []


def test_two_layers_are_refused_on_a_cpu_with_the_reason_and_served_on_cuda(
    make_target: Targets, make_dflash: Callable[..., Draft], play_vllm: Callable[..., None]
) -> None:
    draft = make_dflash(num_hidden_layers=2)
    with pytest.raises(PlanError, match="2 layers loses acceptance on a CPU") as caught:
        check_plan(build_plan(make_target(), draft, device="cpu"))
    assert "normalises the context keys of all layers with the first layer's" in str(caught.value)
    assert "num_hidden_layers" in caught.value.where
    assert "GPU" in caught.value.fix
    play_vllm("", versions="vllm 0.31.0")
    plan = build_plan(make_target(), draft, device="cuda", max_model_len=2048)
    assert plan.runner == "v2"
    check_plan(plan)


@pytest.mark.parametrize(("k", "fits"), [(3, True), (4, False)])
def test_k_is_at_most_the_block_less_the_anchor(
    make_target: Targets, make_dflash: Callable[..., Draft], k: int, fits: bool
) -> None:
    plan = build_plan(make_target(), make_dflash(), num_speculative_tokens=k, device="cpu")
    if fits:
        assert check_plan(plan) == []
        return
    with pytest.raises(PlanError, match="K = 4 does not fit a block of 4") as caught:
        check_plan(plan)
    assert caught.value.expected == "at most K = 3"


@pytest.mark.parametrize(("causal", "num_notes"), [(False, 1), (True, 0)])
def test_a_shorter_block_is_another_input_where_slots_see_one_another(
    make_target: Targets, make_dflash: Callable[..., Draft], causal: bool, num_notes: int
) -> None:
    plan = build_plan(
        make_target(), make_dflash(causal=causal), num_speculative_tokens=2, device="cpu"
    )
    notes = check_plan(plan)
    assert len(notes) == num_notes
    assert all("trained to fill 3 slots" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "the mask token is None"),
        (
            {"dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 64}},
            "the mask token is 64",
        ),
        ({"dflash_config": {"mask_token_id": MASK}}, "tapped layers are not named"),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 4]}},
            r"tapped layers \[1, 5\]",
        ),
        (
            {
                "dflash_config": {
                    "mask_token_id": MASK,
                    "target_layer_ids": [0],
                    "use_swa": True,
                }
            },
            "slides, but no window",
        ),
        ({"vocab_size": 65}, "vocab_size 65"),
    ],
)
def test_what_vllm_would_refuse_or_get_wrong(
    make_target: Targets, make_dflash: Callable[..., Draft], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        check_plan(build_plan(make_target(), make_dflash(change), device="cpu"))


def test_mixed_windows_need_the_v2_runner(
    make_target: Targets, make_dflash: Callable[..., Draft], play_vllm: Callable[..., None]
) -> None:
    mixed = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "use_sliding_window": True,
    }
    draft = make_dflash(mixed, num_hidden_layers=2)
    play_vllm("", versions="vllm 0.31.0")
    check_plan(build_plan(make_target(), draft, device="cuda", max_model_len=2048))
    with pytest.raises(PlanError):  # the layers are refused first
        check_plan(build_plan(make_target(), draft, device="cpu"))


def test_parallel_eagle3_is_asked_for_and_runs_on_v1(
    make_target: Targets, parallel_eagle3: Draft, make_draft: Callable[..., Draft]
) -> None:
    for device in ("cpu", "cuda"):
        plan = build_plan(make_target(), parallel_eagle3, device=device, max_model_len=2048)
        assert plan.engine_args["speculative_config"]["parallel_drafting"] is True
        assert plan.runner == "v1"
        assert plan.env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        told = [note for note in plan.notes if "V1 runner" in note]
        assert len(told) == (device == "cuda")
    plain = build_plan(make_target(), make_draft(), device="cuda", max_model_len=2048)
    assert "parallel_drafting" not in plain.engine_args["speculative_config"]
    assert plain.runner == "v2"


def test_parallel_eagle3_has_no_notes_on_a_cpu(
    make_target: Targets, parallel_eagle3: Draft
) -> None:
    assert check_plan(build_plan(make_target(), parallel_eagle3, device="cpu")) == []


@pytest.mark.parametrize("name", ["fc.weight_packed", "model.fc.weight_scale"])
@pytest.mark.parametrize(
    ("kind", "device"), [("parallel", "cpu"), ("one", "cpu"), ("parallel", "cuda")]
)
def test_a_quantised_fc_of_a_parallel_draft_is_refused_on_a_cpu(
    name: str,
    kind: str,
    device: str,
    make_target: Targets,
    make_draft: Callable[..., Draft],
    parallel_eagle3: Draft,
    play_vllm: Callable[..., None],
) -> None:
    """As others write it: Paceline's own quantiser keeps fc."""
    draft = parallel_eagle3 if kind == "parallel" else make_draft(k=K)
    tensor = TensorInfo(name=name, dtype="I8", shape=(16, 48), start=0, end=768)
    draft = dataclasses.replace(draft, tensors={"midlayer.mlp.weight_scale": tensor, name: tensor})
    if device == "cuda":
        play_vllm("", versions="vllm 0.31.0")
    plan = build_plan(make_target(), draft, device=device, max_model_len=2048)
    if (kind, device) != ("parallel", "cpu"):
        check_plan(plan)
        return
    with pytest.raises(PlanError, match=r"'fc' is quantised.*one row without a batch") as caught:
        check_plan(plan)
    assert "keeps fc" in caught.value.fix
    plain = dataclasses.replace(draft, tensors={"midlayer.mlp.weight_scale": tensor})
    check_plan(build_plan(make_target(), plain, device="cpu"))
