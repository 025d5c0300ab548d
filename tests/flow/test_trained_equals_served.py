"""Trained acceptance is served acceptance: the same model twice, in vLLM and in the trainer.

In float32 the two must take the very same steps. In bfloat16 each rounds in its own places, so a
few steps fall either way where the draft's own logits are nearly tied; none may differ for real.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.data import build_requests, read_prompts
from paceline.draft import read_draft, resolve_draft
from paceline.endpoint import Sampling
from paceline.rules import read_rules
from paceline.serve import build_plan, start
from paceline.target import read_target
from paceline.train import replay_draft

pytestmark = pytest.mark.engine

NUM_TOKENS = 48
RULES = read_rules("demo").replay


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bundled_draft(dtype: str, tmp_path: Path) -> None:
    target, draft = read_target("smollm2"), read_draft(resolve_draft("smollm2-eagle3"))
    plan = build_plan(target, draft, num_speculative_tokens=3, dtype=dtype)
    prompts = read_prompts("demo-eval").prompts
    with start(plan, log_path=tmp_path / "engine.log") as endpoint:
        answers = endpoint.generate(
            build_requests(prompts, target, Sampling(max_tokens=NUM_TOKENS)), concurrency=4
        )
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in answers]
    replay = replay_draft(draft, target, texts, dtype=dtype)
    assert replay.num_steps >= 400
    assert replay.position_served[0] > 0.4  # a draft that holds nothing would agree easily
    if dtype == "float32":
        assert replay.num_agree >= replay.num_steps - 1
        assert replay.position_trained == pytest.approx(replay.position_served, abs=0.003)
        return
    near = sum(gap <= RULES.near_tie_logits for gap in replay.gaps)
    assert (replay.num_agree + near) / replay.num_steps >= RULES.minimum_share
    assert replay.share is not None
    assert replay.share >= 0.96
    difference = abs(replay.position_trained[0] - replay.position_served[0])
    assert difference <= RULES.max_position_1_difference
