"""Quantised folders on real vLLM: the kernel that was meant, and the very weights that were meant.

A draft's served steps are replayed by the trainer's forward on its dequantised weights; a target's
matrices are read back out of the engine, and its served likelihoods held against transformers on
its dequantised weights.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.data import Row, build_requests, read_prompts
from paceline.draft import dequantize_tensors, read_draft, resolve_draft
from paceline.endpoint import Request, Sampling
from paceline.errors import PlanError
from paceline.quantize import (
    Distillation,
    choose_scheme,
    distill_target,
    plan_draft,
    plan_target,
    quantize_draft,
    round_target,
    write_target,
)
from paceline.rules import read_rules
from paceline.serve import (
    VllmEndpoint,
    build_plan,
    check_plan,
    find_altered_weights,
    start,
    with_applied_weights,
)
from paceline.target import TargetFacts, read_target
from paceline.train import open_draft_run, replay_draft

pytestmark = pytest.mark.engine

RULES = read_rules("demo").replay
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short note to a neighbour about a parcel.",
    "What is 12 times 9?",
    "Name three uses of a paper clip.",
)


def test_draft(
    smollm2: TargetFacts,
    plain_endpoint: VllmEndpoint,
    ask: Callable[..., Request],
    tmp_path: Path,
) -> None:
    draft = read_draft(resolve_draft("smollm2-eagle3"))
    answers = plain_endpoint.generate([ask(q, max_tokens=32) for q in QUESTIONS], concurrency=4)
    rows = [
        Row(
            row_id=str(number),
            category="chat",
            input_ids=(*answer.prompt_ids, *answer.output_ids),
            loss_spans=((len(answer.prompt_ids), len(answer.prompt_ids) + len(answer.output_ids)),),
            finish_reason=answer.finish_reason,
        )
        for number, answer in enumerate(answers)
    ]
    run = open_draft_run(draft, smollm2, rows, where="rows")
    plan = plan_draft(draft, choose_scheme("w4a16"))
    small = quantize_draft(plan, tmp_path / "w4a16", calibration=run, where="rows")
    assert small.files_bytes < 0.3 * draft.files_bytes

    engine = build_plan(smollm2, small, num_speculative_tokens=3)
    prompts = read_prompts("demo-eval").prompts[:12]
    with start(engine, log_path=tmp_path / "engine.log") as endpoint:
        served = endpoint.generate(
            build_requests(prompts, smollm2, Sampling(max_tokens=32)), concurrency=4
        )
        kernels = endpoint.kernels()
        memory = endpoint.memory(context_tokens=1024)
    assert kernels["draft"] == {"CPUWNA16LinearKernel": 5}
    assert set(kernels["target"]) == {"plain"}
    assert memory is not None
    assert memory.weights_bytes == pytest.approx(small.files_bytes, rel=0.03)
    texts = [(a.prompt_ids, a.output_ids, a.per_step_accepted or ()) for a in served]
    replay = replay_draft(small, smollm2, texts)
    assert replay.num_steps >= 100
    assert replay.position_served[0] > 0.4
    near = sum(gap <= RULES.near_tie_logits for gap in replay.gaps)
    assert (replay.num_agree + near) / replay.num_steps >= RULES.minimum_share

    without = dataclasses.replace(choose_scheme("w8a16"), has_head=False)
    wide = quantize_draft(plan_draft(draft, without, method="rtn"), tmp_path / "w8a16")
    with pytest.raises(PlanError, match="no kernel for 8-bit weights with 16-bit inputs"):
        check_plan(build_plan(smollm2, wide, device="cpu"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    from toy_hybrid import make_toy_hybrid

    return read_target(str(make_toy_hybrid(tmp_path_factory.mktemp("target") / "toy")))


@pytest.mark.parametrize(("method", "distills"), [("gptq", False), ("awq", True)])
def test_hybrid_target(method: str, distills: bool, toy: TargetFacts, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from toy_hybrid import make_prompts
    from transformers import AutoModelForCausalLM

    prompts = make_prompts(24)
    rows = [
        Row(
            row_id=str(number),
            category="",
            input_ids=prompt,
            loss_spans=((1, len(prompt)),),
            finish_reason="length",
        )
        for number, prompt in enumerate(prompts)
    ]
    plan = plan_target(
        toy,
        choose_scheme("w4a16"),
        method=method,
        recurrent=choose_scheme("w8a8"),
        head=choose_scheme("w8a8"),
        num_edge_layers=0,
    )
    made = round_target(plan, tmp_path / "small", rows=rows, where="rows")
    if distills:
        how = Distillation(rows=rows[:16], held_out=rows[16:], num_steps=60)
        made, told = distill_target(plan, made, how, where="rows")
        assert told["kept"], told
    small = write_target(plan, made, tmp_path / "small")
    other = _alter_one_code(small.path, tmp_path / "other")
    texts = [(prompt[:4], prompt[4:]) for prompt in prompts]
    engine = with_applied_weights(build_plan(small, device="cpu"))
    with start(engine, log_path=tmp_path / "engine.log") as endpoint:
        served = endpoint.text_logprobs(texts)
        kernels = endpoint.kernels()["target"]
        assert find_altered_weights(endpoint, small.path) == (17, [])
        assert find_altered_weights(endpoint, other) == (16, ["3.qkv_proj"])
    assert kernels["CPUWNA16LinearKernel"] == 2 + 4 * 2  # qkv, o; gate-up, down of each layer
    assert kernels["CPUInt8ScaledMMLinearKernel"] == 3 * 2 + 1  # qkvz, out; the head
    assert kernels["plain"] == 3 * 2  # gates and convolutions

    model = AutoModelForCausalLM.from_pretrained(str(toy.path), dtype=torch.float32).eval()
    tensors = dequantize_tensors(load_file(small.path / "model.safetensors"))
    head = tensors.pop("lm_head.weight").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in tensors:
                parameter.copy_(tensors[name].float())
        model.lm_head.weight = torch.nn.Parameter(head)
        gaps = []
        for (prompt, output), found in zip(texts, served, strict=True):
            ids = torch.tensor([[*prompt, *output]])
            logits = model(ids).logits[0].log_softmax(-1)
            at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
            wanted = logits[at, ids[0, at + 1]]
            gaps.append((torch.tensor(found) - wanted).abs())
    gap = torch.cat(gaps)
    # inputs of int8 layers are rounded to 8 bits when served, and bf16 is not float32
    assert float(gap.median()) < 0.02
    assert float(gap.mean()) < 0.1


def _alter_one_code(folder: Path, other: Path) -> Path:
    """A copy in which one 4-bit code of the attention layer is another by one."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.3.self_attn.k_proj.weight_packed"][1, 0] ^= 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return other
