"""dflash and parallel EAGLE-3: trained, served by real vLLM on a CPU, and trained equals served.

On a hybrid of the tests' own, whose drafts are trained in seconds, and on smollm2 with a draft that
has learnt the very answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from block_drafts import Served, serve_and_replay, train_on_texts
from toy_hybrid import make_prompts, make_texts, make_toy_hybrid

from paceline.draft import Draft
from paceline.endpoint import Request
from paceline.forecast import CachePlan, measure_memory, parse_design, read_shape
from paceline.serve import VllmEndpoint, build_plan
from paceline.target import TargetFacts, read_target

pytestmark = pytest.mark.engine

K = 3
QUESTIONS = ("Why is the sky blue?", "Name three colours.", "Say hello.", "What is a boat?")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a window, its own vocabulary": (
        "dflash",
        {"mask_token_id": 127, "sliding_window": 16, "draft_vocab_size": 64},
    ),
    "P-EAGLE": ("eagle3", {"mask_token_id": 127, "parallel": True}),
    "EAGLE-3 with its norms": (
        "eagle3",
        {"norm_before_fc": True, "fc_norm": True, "norm_output": True},
    ),
}
NEAR = 0.25  # of the draft's own logits: what bf16 rounds away


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return read_target(make_toy_hybrid(tmp_path_factory.mktemp("hybrid") / "toy"))


def train(folder: Path, toy: TargetFacts, family: str, shape: dict[str, Any]) -> Draft:
    texts = [(text[:12], text[12:]) for text in make_texts(48, 64)]
    shape = {"num_speculative_tokens": K, **shape}
    return train_on_texts(folder, toy, texts, family=family, shape=shape, num_steps=80)


def require_equal(found: Served) -> None:
    replay = found.replay
    near = sum(gap <= NEAR for gap in replay.gaps)
    assert replay.num_agree + near == replay.num_steps
    assert replay.num_agree >= 0.9 * replay.num_steps
    far = max(0.02, near / replay.num_steps) + 1e-9  # each of them moves a share by one step
    assert replay.position_trained == pytest.approx(replay.position_served, abs=far)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_hybrid(kind: str, toy: TargetFacts, tmp_path: Path) -> None:
    family, shape = KINDS[kind]
    draft = train(tmp_path, toy, family, shape)
    plan = build_plan(toy, draft, device="cpu", max_model_len=256)
    found = serve_and_replay(plan, make_prompts(12), log_path=tmp_path / "engine.log")
    assert found.replay.num_steps >= 150
    assert found.replay.position_served[0] > 0.4
    assert found.replay.position_served[1] > 0.2
    require_equal(found)


def test_on_smollm2_with_the_memory_that_was_foreseen(
    smollm2: TargetFacts,
    plain_endpoint: VllmEndpoint,
    ask: Callable[..., Request],
    tmp_path: Path,
) -> None:
    requests = [ask(question, max_tokens=32, ignore_eos=True) for question in QUESTIONS]
    answers = plain_endpoint.generate(requests, concurrency=4)
    draft = train_on_texts(
        tmp_path,
        smollm2,
        [(a.prompt_ids, a.output_ids) for a in answers],
        family="dflash",
        shape={
            "num_speculative_tokens": K,
            "mask_token_id": 16,
            "aux_layer_ids": [2, 15, 27],
            "draft_vocab_size": 512,
        },
        num_steps=60,
        lr=2e-3,
    )
    found = serve_and_replay(
        build_plan(smollm2, draft, device="cpu"),
        [a.prompt_ids for a in answers],
        log_path=tmp_path / "engine.log",
        max_tokens=32,
    )
    assert found.replay.position_served[0] > 0.3
    require_equal(found)
    shape = read_shape("smollm2")
    design = f'family = "dflash"\nnum_speculative_tokens = {K}\ndraft_vocab_size = 512\n'
    foreseen = measure_memory(
        parse_design(design, shape), shape, context_tokens=16384, plan=CachePlan(device="cpu")
    )
    assert found.memory.total_bytes == pytest.approx(foreseen.total_bytes, rel=0.01)
    assert found.memory.weights_bytes + found.memory.buffers_bytes == pytest.approx(
        foreseen.sizes.weights_bytes + foreseen.sizes.buffers_bytes, rel=0.001
    )
