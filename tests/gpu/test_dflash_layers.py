"""DFlash drafts of two layers on a CUDA machine: trained there, served there, and both agree.

What vLLM 0.31.0 gets wrong on a CPU and the plan refuses there. On the tests' own hybrid and, where
its weights are at hand, on smollm2 with a draft that has learnt the very answers; P-EAGLE on the V1
runner beside them.

make test-gpu, or `pytest -s -m gpu tests/gpu/test_dflash_layers.py` (about four minutes: an engine
a test, one after the other).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from block_drafts import Served, serve_and_replay, train_on_texts
from toy_hybrid import make_prompts, make_texts, make_toy_hybrid

from paceline.draft import Draft
from paceline.errors import TargetError
from paceline.serve import build_plan
from paceline.serve.checks import check_plan
from paceline.target import TargetFacts, read_target

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

K = 3
NEAR = 0.25  # of the draft's own logits: what bf16 rounds away
KV_BYTES = 2 * 2**30
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "two layers": ("dflash", {"num_layers": 2}),
    "two causal layers": ("dflash", {"num_layers": 2, "causal": True}),
    "two layers with a window": ("dflash", {"num_layers": 2, "sliding_window": 16}),
    "P-EAGLE": ("eagle3", {"parallel": True}),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return read_target(make_toy_hybrid(tmp_path_factory.mktemp("hybrid") / "toy"))


def train(
    folder: Path, target: TargetFacts, kind: str, mask: int, texts: Any, **shape: Any
) -> Draft:
    family, own = KINDS[kind]
    settings = {"num_speculative_tokens": K, "mask_token_id": mask, **own, **shape}
    return train_on_texts(
        folder, target, texts, family=family, shape=settings, num_steps=120, device="cuda"
    )


def serve(draft: Draft, target: TargetFacts, prompts: Any, folder: Path) -> Served:
    plan = build_plan(
        target,
        draft,
        device="cuda",
        max_model_len=512,
        kv_cache_bytes=KV_BYTES,
        enforce_eager=True,
    )
    assert plan.runner == ("v2" if draft.family == "dflash" else "v1")
    check_plan(plan)
    return serve_and_replay(
        plan, prompts, log_path=folder / "engine.log", max_tokens=64, device="cuda"
    )


def require_equal(found: Served) -> None:
    replay = found.replay
    near = sum(gap <= NEAR for gap in replay.gaps)
    print(replay.num_steps, replay.num_agree, near, replay.position_served, replay.position_trained)
    assert replay.num_agree + near >= 0.99 * replay.num_steps
    assert replay.num_agree >= 0.95 * replay.num_steps
    assert replay.position_trained == pytest.approx(replay.position_served, abs=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_hybrid(kind: str, toy: TargetFacts, tmp_path: Path) -> None:
    texts = [(text[:12], text[12:]) for text in make_texts(192, 80)]
    draft = train(tmp_path, toy, kind, 127, texts)
    found = serve(draft, toy, make_prompts(48), tmp_path)
    assert found.replay.num_steps >= 600  # the more are accepted, the fewer
    assert found.replay.position_served[0] > 0.5
    require_equal(found)


def test_two_layers_on_smollm2(tmp_path: Path) -> None:
    try:
        target = read_target("smollm2")
    except TargetError as problem:
        pytest.skip(f"smollm2 is not here: {problem}")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(target.path), dtype=torch.bfloat16).cuda()
    prompts = [[1, *range(400 + 40 * number, 420 + 40 * number)] for number in range(16)]
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        whole = model.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=None)[0]
        texts.append((prompt, whole[len(prompt) :].tolist()))
    del model
    draft = train(tmp_path, target, "two layers", 16, texts, aux_layer_ids=[2, 15, 27])
    found = serve(draft, target, prompts, tmp_path)
    assert found.replay.position_served[0] > 0.15
    require_equal(found)
    assert found.memory.kv_bytes == 2 * 16384 * 768
