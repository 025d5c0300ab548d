from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from paceline.draft import Draft, read_native_draft
from paceline.endpoint import EngineFacts
from paceline.errors import EngineError, PlanError
from paceline.serve import build_plan, describe_plan
from paceline.serve.endpoint import check_facts
from paceline.serve.pool_size import kv_bytes_per_token
from paceline.target import TargetFacts, read_target

Targets = Callable[..., TargetFacts]
Drafts = Callable[..., Draft]


def test_method_and_k_come_from_the_draft_and_are_explicit(
    make_target: Targets, make_draft: Drafts
) -> None:
    plan = build_plan(make_target(), make_draft(k=5), device="cpu")
    spec = plan.engine_args["speculative_config"]
    assert (plan.method, plan.num_speculative_tokens, plan.runner) == ("eagle3", 5, "v1")
    assert spec["method"] == "eagle3"
    assert spec["num_speculative_tokens"] == 5
    assert spec["rejection_sample_method"] == "standard"
    assert plan.engine_args["per_request_spec_decode_metrics"] == "detailed"
    assert plan.engine_args["load_format"] == "safetensors"
    assert plan.engine_args["trust_remote_code"] is False
    assert plan.engine_args["enable_prefix_caching"] is False


def test_the_path_of_a_draft_never_reaches_the_engine(
    make_target: Targets, make_draft: Drafts
) -> None:
    # U32 (e): vLLM reads the method from words in the path
    plan = build_plan(make_target(), make_draft("runs/dflash-vs-eagle3/a"), device="cpu")
    model = plan.engine_args["speculative_config"]["model"]
    assert model == "draft-" + "c" * 12
    assert plan.engine_args["model"] == "target-" + "b" * 12


def test_without_a_draft_nothing_speculates(make_target: Targets) -> None:
    plan = build_plan(make_target(), device="cpu")
    assert (plan.method, plan.num_speculative_tokens) == ("none", 0)
    assert "speculative_config" not in plan.engine_args
    assert "per_request_spec_decode_metrics" not in plan.engine_args


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "eagle3"}, "needs a draft folder"),
        ({"method": "prompt"}, "unknown"),
        ({"num_speculative_tokens": 3}, "no effect without a draft"),
        ({"ngram_min": 2}, "no effect with method 'none'"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"device": "cuda", "num_threads": 2}, "no effect on CUDA"),
    ],
)
def test_contradictions_are_refused(
    make_target: Targets, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        build_plan(make_target(), **{"device": "cpu", **settings})  # type: ignore[arg-type]


def test_a_method_that_is_not_the_drafts_is_refused(
    make_target: Targets, make_draft: Drafts
) -> None:
    with pytest.raises(PlanError, match="whose family is 'eagle3'"):
        build_plan(make_target(), make_draft(), method="ngram", device="cpu")


@pytest.mark.parametrize(
    ("bounds", "effective"),
    [
        ({}, "1/5"),
        ({"ngram_min": 2}, "2/2"),
        ({"ngram_max": 4}, "4/4"),
        ({"ngram_min": 2, "ngram_max": 4}, "2/4"),
    ],
)
def test_effective_ngram_bounds_are_printed(
    make_target: Targets, bounds: dict[str, int], effective: str
) -> None:  # U32 (d)
    plan = build_plan(make_target(), method="ngram", device="cpu", **bounds)  # type: ignore[arg-type]
    assert ("n-gram min/max", effective) in describe_plan(plan)
    assert (len(plan.notes) == 1) == (len(bounds) < 2)
    assert all(effective in note for note in plan.notes)


def test_ngram_folder_settings_reach_the_engine(make_target: Targets, make_draft: Drafts) -> None:
    draft = make_draft(family="ngram", k=4, spec={"prompt_lookup_min": 2, "prompt_lookup_max": 6})
    plan = build_plan(make_target(), draft, device="cpu")
    spec = plan.engine_args["speculative_config"]
    assert spec["method"] == "custom_class"
    assert spec["model"] == "paceline.serve.proposers.classes.NgramProposer"
    assert plan.draft_name is None
    assert plan.engine_args["additional_config"] == {
        "paceline": {"prompt_lookup_min": 2, "prompt_lookup_max": 6}
    }


def test_vllms_own_proposer_is_asked_for_by_name(make_target: Targets, make_draft: Drafts) -> None:
    spec = {"prompt_lookup_max": 6, "proposer": "vllm"}
    args = build_plan(make_target(), make_draft(family="ngram", spec=spec), device="cpu")
    config = args.engine_args["speculative_config"]
    assert (config["method"], config["prompt_lookup_max"]) == ("ngram", 6)
    assert "model" not in config
    assert "additional_config" not in args.engine_args
    plain = build_plan(
        make_target(), make_draft(family="ngram", spec={"proposer": "vllm"}), device="cpu"
    )
    assert ("n-gram min/max", "5/5") in describe_plan(plain)


def test_the_suffix_cache_is_off_unless_asked_for(make_target: Targets, make_draft: Drafts) -> None:
    cold = build_plan(make_target(), method="suffix", device="cpu")
    assert cold.engine_args["additional_config"] == {"paceline": {"cache_tokens": 0}}
    assert cold.notes == ()
    draft = make_draft(family="suffix", k=6, spec={"cache_tokens": 4096})
    warm = build_plan(make_target(), draft, device="cpu")
    assert warm.engine_args["additional_config"] == {"paceline": {"cache_tokens": 4096}}
    assert "keeps 4096 tokens of finished answers" in warm.notes[0]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_loaded_class_is_proven(make_target: Targets, method: str) -> None:
    plan = build_plan(make_target(), method=method, device="cpu")
    facts = EngineFacts(
        vllm_version="0.31.0",
        platform="cpu",
        device_name="toy",
        method=method,
        num_speculative_tokens=3,
        runner="v1",
        target_architecture="LlamaForCausalLM",
        draft_architecture=None,
        rejection_sample_method="standard",
        draft_sample_method="greedy",
        dtype="bfloat16",
        max_model_len=plan.max_model_len,
        prefix_caching=False,
        enforce_eager=True,
        start_s=0.0,
        proposer=plan.engine_args["speculative_config"]["model"],
    )
    check_facts(plan, facts)
    with pytest.raises(EngineError, match="resolved proposer to None"):
        check_facts(plan, dataclasses.replace(facts, proposer=None))


def test_prefix_caching_on_a_hybrid_is_turned_off_and_said(make_target: Targets) -> None:
    hybrid = make_target(layer_types=("linear_attention",) * 3 + ("full_attention",))
    plan = build_plan(hybrid, device="cpu", prefix_caching=True)
    assert plan.engine_args["enable_prefix_caching"] is False
    assert "prefix caching is turned off" in plan.notes[0]
    assert build_plan(make_target(), device="cpu", prefix_caching=True).engine_args[
        "enable_prefix_caching"
    ]


def test_device_defaults(make_target: Targets, make_draft: Drafts) -> None:
    cpu = build_plan(make_target(), device="cpu")
    cuda = build_plan(make_target(), make_draft(), device="cuda")
    assert cpu.engine_args["enforce_eager"] is True
    assert cpu.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert cuda.engine_args["enforce_eager"] is False
    assert cuda.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert (cuda.runner, cuda.env["VLLM_USE_V2_MODEL_RUNNER"]) == ("v2", "1")
    assert cuda.engine_args["async_scheduling"] is True
    for method in ("ngram", "suffix"):  # vLLM runs custom classes on V1, in step
        plan = build_plan(make_target(), method=method, device="cuda")
        assert (plan.runner, plan.engine_args["async_scheduling"]) == ("v1", False)
    assert all(plan.env["VLLM_PLUGINS"] == "" for plan in (cpu, cuda))


def test_default_lengths_follow_the_target(make_target: Targets) -> None:
    assert build_plan(make_target(), device="cpu").max_model_len == 2048
    assert build_plan(make_target(max_position_embeddings=512), device="cpu").max_model_len == 512


def test_kv_bytes_per_token_by_hand(make_target: Targets, make_draft: Drafts) -> None:
    # 4 layers, 2 KV heads of 8, K and V, 2 bytes: 256; the draft's own layer, of 32, adds 256
    assert kv_bytes_per_token(make_target(), None) == 4 * 2 * 8 * 2 * 2
    assert kv_bytes_per_token(make_target(), make_draft()) == 256 + 256
    hybrid = make_target(layer_types=("linear_attention",) * 3 + ("full_attention",))
    assert kv_bytes_per_token(hybrid, None) == 64


def test_on_cuda_every_pool_is_stated_so_that_servers_stand_side_by_side(
    make_target: Targets,
) -> None:
    """pocket, by hand: 1 KiB of keys and values a token, 6 states of 133 to 137 KB a sequence."""
    pocket = read_target("pocket")
    native = read_native_draft(pocket, num_speculative_tokens=3)
    for draft, least in ((None, 17_000_000), (native, 26_000_000)):
        plan = build_plan(pocket, draft, device="cuda", max_num_seqs=8)
        pool = plan.engine_args["kv_cache_memory_bytes"]
        assert 8 * least < pool < 8 * 5 * least
        assert plan.engine_args["gpu_memory_utilization"] < 0.1
    for target in (pocket, make_target(max_position_embeddings=16448)):
        many = build_plan(target, device="cuda", max_num_seqs=4096)
        assert many.engine_args["kv_cache_memory_bytes"] <= 16 * 2**30


def test_description_holds_every_argument_and_variable(
    make_target: Targets, make_draft: Drafts
) -> None:
    plan = build_plan(make_target(), make_draft(), device="cpu")
    labels = [label for label, _ in describe_plan(plan)]
    for name in plan.engine_args:
        assert name in labels or name == "speculative_config"
    for name in plan.engine_args["speculative_config"]:
        assert f"speculative_config.{name}" in labels
    for name in plan.env:
        assert f"env {name}" in labels


def test_medusa_runs_on_the_first_runner_and_keeps_no_cache(
    make_target: Targets, make_draft: Drafts
) -> None:
    target = make_target()
    config = {"hidden_size": 16, "vocab_size": 64, "num_heads": 3, "num_hidden_layers": 4}
    draft = make_draft(family="medusa", config=config)
    plan = build_plan(target, draft, device="cuda")
    assert (plan.runner, plan.engine_args["async_scheduling"]) == ("v1", False)
    assert plan.env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert kv_bytes_per_token(target, draft) == kv_bytes_per_token(target, None)
    assert "hf_overrides" not in plan.engine_args
    # a multimodal target's outer config has no vocab_size, and vLLM asks it for Medusa's
    nested = make_target(config={"text_config": {"vocab_size": 64}})
    assert build_plan(nested, draft, device="cpu").engine_args["hf_overrides"] == {"vocab_size": 64}
    assert "hf_overrides" not in build_plan(nested, device="cpu").engine_args
