"""Families trained in seconds, served by vLLM and replayed: the same steps, and the bytes foreseen.

In float32 the trainer's forward must take the very steps that the server took; in bfloat16 some
fall either way where the draft's own logits are nearly tied.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_hybrid import make_prompts, make_toy_hybrid, write_rows

from paceline.draft import Draft
from paceline.endpoint import Request, Sampling
from paceline.forecast import CachePlan, measure_memory, parse_design, read_shape
from paceline.rules import read_rules
from paceline.serve import build_plan, start
from paceline.target import TargetFacts, read_target
from paceline.train import build_recipe, replay_draft, train_draft

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

CONTEXT = 16384
RULES = read_rules("demo").replay
MEDUSA = {"num_speculative_tokens": 3}
DESIGNS = {
    "medusa": 'family = "medusa"\nnum_speculative_tokens = 3\n',
}


def _train(family: str, sizes: dict[str, Any], target: TargetFacts, folder: Path) -> Draft:
    recipe = build_recipe(
        {
            "family": family,
            "seed": 1,
            "dtype": "float32",
            "draft": sizes,
            "optim": {"lr": 5e-3, "num_steps": 60, "tokens_per_batch": 1024, "max_length": 64},
            "loss": {"soft": 1.0, "hard": 0.2},
        }
    )
    return train_draft(
        recipe,
        target=target,
        data_dir=write_rows(folder / "data", target),
        out_dir=folder / "draft",
        device="cpu",
    )


@pytest.mark.parametrize(
    ("make_target", "family", "sizes", "dtype"),
    [(make_toy_hybrid, "medusa", MEDUSA, "bfloat16")],
    ids=["medusa on a hybrid"],
)
def test_trained_is_served_and_weighs_what_was_foreseen(
    make_target: Callable[[Path], Path],
    family: str,
    sizes: dict[str, Any],
    dtype: str,
    tmp_path: Path,
) -> None:
    target = read_target(make_target(tmp_path / "target"))
    draft = _train(family, sizes, target, tmp_path)
    requests = [
        Request(
            request_id=str(number),
            prompt_ids=prompt,
            sampling=Sampling(max_tokens=64, ignore_eos=True),
        )
        for number, prompt in enumerate(make_prompts(12))
    ]
    plan = build_plan(target, draft, device="cpu", dtype=dtype)
    with start(plan, log_path=tmp_path / "engine.log") as endpoint:
        answers = endpoint.generate(requests, concurrency=4)
        memory = endpoint.memory(context_tokens=CONTEXT)
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in answers]
    replay = replay_draft(draft, target, texts, dtype=dtype)
    assert replay.num_steps >= 200
    assert 0.3 < replay.position_served[0] < 0.99  # some of each, or they would agree easily
    near = sum(gap <= RULES.near_tie_logits for gap in replay.gaps) if dtype == "bfloat16" else 1
    assert replay.num_agree + near >= replay.num_steps
    assert replay.position_trained == pytest.approx(replay.position_served, abs=0.01)
    assert memory is not None
    shape = read_shape(str(target.path))
    foreseen = measure_memory(
        parse_design(DESIGNS[family], shape),
        shape,
        context_tokens=CONTEXT,
        plan=CachePlan(device="cpu"),
    )
    size = 2 if dtype == "float32" else 1  # foreseen for bf16
    assert memory.total_bytes == pytest.approx(size * foreseen.total_bytes, rel=0.01)
