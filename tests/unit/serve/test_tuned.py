from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.draft import Draft
from paceline.errors import PlanError
from paceline.serve import (
    apply_engine_settings,
    build_plain_plan,
    build_plan,
    format_command,
    read_serve_config,
)
from paceline.target import TargetFacts
from paceline.tune import Settings, write_config

Targets = Callable[..., TargetFacts]
Drafts = Callable[..., Draft]


def test_what_tune_writes_is_what_serve_reads(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    settings = Settings(
        draft='a "b"', compiled=True, cudagraph_sizes=(4, 8), dynamic_k=((1, 4, 3), (5, 8, 1))
    )
    settings = replace(settings, gdn_decode_kernel="triton", stream_interval=8)
    write_config(path, settings, k=3, break_even=1.2345, title="t")
    found = read_serve_config(path)
    assert (found.draft, found.k, found.min_acceptance) == ('a "b"', 3, 1.234)
    assert found.engine == {
        "compiled": True,
        "prefix_caching": False,
        "cudagraph_sizes": [4, 8],
        "gdn_decode_kernel": "triton",
        "dynamic_k": [[1, 4, 3], [5, 8, 1]],
        "stream_interval": 8,
    }
    write_config(path, Settings(), k=None, break_even=None, title="t")
    assert read_serve_config(path).draft is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("draft = 3", "draft = 3"),
        ("k = true", "k = True"),
        ("speed = 9", "'speed' is unknown"),
        ("[engine]\nspeed = 9", "'engine.speed' is unknown"),
        ("engine = 1", "not a table"),
        ("draft = ", "not TOML"),
    ],
)
def test_a_file_that_says_nothing_true_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(PlanError, match=said):
        read_serve_config(path)
    with pytest.raises(PlanError, match="cannot be read"):
        read_serve_config(tmp_path / "none.toml")


def test_a_setting_without_effect_is_an_error(make_target: Targets, make_draft: Drafts) -> None:
    on_cpu = build_plan(make_target(), make_draft(), device="cpu", num_threads=1)
    for name, value in (
        ("async_scheduling", False),
        ("cudagraph_sizes", (4,)),
        ("gdn_prefill_backend", "triton"),
        ("gdn_decode_kernel", "triton"),
    ):
        with pytest.raises(PlanError, match=f"{name} has no effect"):
            apply_engine_settings(on_cpu, {name: value})
    plain = build_plan(make_target(), device="cpu", num_threads=1)
    with pytest.raises(PlanError, match="dynamic_k has no effect"):
        apply_engine_settings(plain, {"dynamic_k": ((1, 2, 1),)})
    own = build_plan(make_target(), method="ngram", device="cpu", num_threads=1)
    with pytest.raises(PlanError, match="K tokens on every step"):
        apply_engine_settings(own, {"dynamic_k": ((1, 2, 1),)})


def test_settings_reach_the_command(make_target: Targets, make_draft: Drafts) -> None:
    plan = build_plan(make_target(), make_draft(), device="cuda")
    tuned = apply_engine_settings(
        plan,
        {
            "async_scheduling": False,
            "cudagraph_sizes": (4, 8),
            "dynamic_k": ((1, 4, 3), (5, 8, 1)),
            "stream_interval": 4,
        },
    )
    command = format_command(tuned)
    assert "--no-async-scheduling" in command
    assert "--cudagraph-capture-sizes 4 8" in command
    assert '"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 1]]' in command.replace(
        "\\", ""
    )
    assert "--stream-interval 4" in command


def test_without_the_draft_everything_else_is_the_same(
    make_target: Targets, make_draft: Drafts
) -> None:
    plan = build_plan(
        make_target(),
        make_draft(),
        device="cuda",
        max_model_len=64,
        max_num_seqs=3,
        enforce_eager=True,
        seed=7,
    )
    plan = replace(plan, engine_args={**plan.engine_args, "stream_interval": 4})
    plain = build_plain_plan(plan)
    assert (plain.method, plain.draft, plain.num_speculative_tokens) == ("none", None, 0)
    assert "speculative_config" not in plain.engine_args
    own = {"speculative_config", "per_request_spec_decode_metrics", "kv_cache_memory_bytes"}
    for name in set(plan.engine_args) - own:
        assert plain.engine_args[name] == plan.engine_args[name], name
    assert build_plain_plan(plain) is plain
