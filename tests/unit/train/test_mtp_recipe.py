"""Parts of recipes/pocket: the sampler, the joint model, the packed rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

RECIPE = Path(__file__).parents[3] / "recipes" / "pocket"


@pytest.fixture(scope="module", autouse=True)
def recipe_path() -> Any:
    sys.path.insert(0, str(RECIPE))
    yield
    sys.path.remove(str(RECIPE))


def test_greedy_answers_are_transformers_own(tmp_path: Path) -> None:
    """Prompts of three lengths in one wave, prefilled two rows at a time, one ending early."""
    from sample import answer_wave, load_teacher

    teacher = load_teacher(str(tiny.make_target(tmp_path / "t")), device="cpu", dtype=torch.float32)
    prompts = [[5, 9, 17, 30, 8], [3, 44], [11, 12, 13], [60]]
    wanted = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 40 and (ids[-1] not in (2, 7) or len(ids) == len(prompt)):
            logits = teacher.model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        wanted.append(ids[len(prompt) :])
    found = answer_wave(
        teacher, prompts, [0.0] * 4, max_tokens=40, end_ids=[2, 7], seed=0, prefill_rows=2
    )
    assert found == wanted


def test_samples_have_the_models_distribution(tmp_path: Path) -> None:
    from sample import answer_wave, load_teacher

    teacher = load_teacher(str(tiny.make_target(tmp_path / "t")), device="cpu", dtype=torch.float32)
    num, temperature = 20_000, 2.0
    found = answer_wave(
        teacher,
        [[5, 9]] * num,
        [temperature] * num,
        max_tokens=1,
        end_ids=[2],
        seed=1,
        prefill_rows=20_000,
    )
    counts = torch.bincount(torch.tensor([row[0] for row in found]), minlength=tiny.VOCAB)
    logits = teacher.model(input_ids=torch.tensor([[5, 9]])).logits[0, -1]
    wanted = torch.softmax(logits / temperature, dim=-1)
    error = (wanted * (1 - wanted) / num).sqrt()
    assert bool(((counts / num - wanted).abs() <= 5 * error + 1e-4).all())


def test_no_step_sees_a_token_that_it_predicts() -> None:
    from pocket import Pocket, build_config

    model = Pocket(build_config(vocab_size=64, tiny=True), seed=0).eval()
    tokens = torch.randint(0, 64, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 64
    with torch.no_grad():
        before, after = model(tokens, num_steps=3), model(changed, num_steps=3)
    for step, (a, b) in enumerate(zip(before, after, strict=True)):
        first = 8 - step  # step j at t reads x[t+j]
        torch.testing.assert_close(a[:, :first], b[:, :first], rtol=0, atol=1e-6)
        assert not torch.allclose(a[:, first], b[:, first])


def test_the_exported_head_is_the_contracts_and_is_read_as_trained(tmp_path: Path) -> None:
    """Step 1 of the recipe's head equals the family's unroll on the exported weights."""
    from pocket import Pocket, build_config, export_weights

    from paceline.target import read_target
    from paceline.train.families.mtp import build_module
    from paceline.train.families.mtp_weights import start_from_native
    from paceline.train.features import load_frozen_target

    model = Pocket(build_config(vocab_size=64, tiny=True), seed=0)
    with torch.no_grad():  # what is written in bfloat16; buffers stay as they are
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    export_weights(model, tmp_path)
    target = read_target(tmp_path)
    assert target.is_hybrid
    assert target.num_mtp_layers == 1
    head = build_module(target.config)
    assert len(start_from_native(head, target)) == len(list(head.parameters()))
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(3))
    final = frozen.features(tokens, ()).final_BTD
    with torch.no_grad():
        wanted = model(tokens, num_steps=1)
        found, _ = head.unroll(
            tokens, final, torch.arange(18)[None], frozen.embedding_VD, num_steps=1
        )
    torch.testing.assert_close(final, wanted[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0], wanted[1][:, :18], rtol=0, atol=1e-5)


def test_packed_rows_hold_whole_documents_and_resume_exactly() -> None:
    from corpus import Corpus, Rows

    draw = np.random.default_rng(0)
    ids, spans, at = [], [], 0
    for number in range(40):
        size = int(draw.integers(5, 30))
        ids.append(np.full(size, number + 1, dtype=np.uint16))
        spans.append((at + size, at + 2, at + size - 1))
        at += size
    corpus = Corpus(ids=np.concatenate(ids), spans=np.array(spans))
    rows = Rows(corpus, seed=1)
    seen: list[int] = []
    while rows.epoch == 0:
        before = (rows.epoch, rows.place)
        tokens, learnt = rows.batch(2, 64)
        again = Rows(corpus, seed=1, epoch=before[0], place=before[1]).batch(2, 64)
        assert np.array_equal(tokens, again[0])
        assert np.array_equal(learnt, again[1])
        for row, mask in zip(tokens, learnt, strict=True):
            for number in sorted({int(token) for token in row} - {0}):
                seen.append(number)
                assert (row == number).sum() == len(ids[number - 1])  # whole, never cut
                assert mask[row == number].sum() == len(ids[number - 1]) - 3
            assert not mask[row == 0].any()
    assert set(seen) == set(range(1, 41))


def test_training_kernels_are_transformers_own() -> None:
    """Values and gradients in float64 arithmetic would be theirs too; float32 to rounding."""
    from delta import causal_convolution, delta_rule, invert_unit_lower
    from transformers.models.qwen3_5 import modeling_qwen3_5 as source

    for theirs in (source.torch_chunk_gated_delta_rule, source.causal_conv1d_fn):
        assert theirs.__module__.startswith("transformers")  # not ours under their name
    torch.manual_seed(0)
    # correlated keys and strong writes: where an inverse by powers would lose every digit
    common = torch.randn(1, 1, 3, 16)
    given = [
        torch.randn(2, 150, 3, 16),
        common + 0.1 * torch.randn(2, 150, 3, 16),
        torch.randn(2, 150, 3, 8),
        -0.05 * torch.rand(2, 150, 3),
        torch.rand(2, 150, 3),
    ]
    found = [x.clone().requires_grad_() for x in given]
    wanted = [x.clone().requires_grad_() for x in given]
    out, _ = delta_rule(*found, use_qk_l2norm_in_kernel=True)
    theirs, _ = source.torch_chunk_gated_delta_rule(*wanted, use_qk_l2norm_in_kernel=True)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (theirs * weights).sum().backward()
    assert torch.allclose(out, theirs, atol=1e-5, rtol=1e-4)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine.grad - other.grad).abs().max() < 1e-4 * other.grad.abs().max()
    lower = torch.rand(5, 64, 64, dtype=torch.float64).tril(-1)
    whole = torch.eye(64, dtype=torch.float64) + lower
    assert torch.allclose(invert_unit_lower(lower), torch.linalg.inv(whole), atol=1e-9)
    x, taps = torch.randn(2, 6, 11), torch.randn(6, 4)
    theirs = source.causal_conv1d_fn(x, taps, None, activation="silu")
    assert torch.allclose(causal_convolution(x, taps, None, activation="silu"), theirs, atol=1e-6)
