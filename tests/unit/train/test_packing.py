"""Several rows in one slot: loss and gradients of the same rows side by side, in float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_anchors import make_part
from tiny import make_data, make_recipe

from paceline.data import Row
from paceline.errors import RecipeError
from paceline.target import TargetFacts
from paceline.train import Recipe
from paceline.train.anchors import sample_anchors
from paceline.train.batches import build_batch
from paceline.train.features import FrozenTarget, load_frozen_target
from paceline.train.loop import run_training
from paceline.train.packing import pack_rows, padding_share, plan_slots
from paceline.train.prepare import BatchSource
from paceline.train.ranks import Ranks
from paceline.train.setup import Setup, build_setup
from paceline.train.step import train_step
from paceline.train.stored import StoredStates, store_states

MASK = 63  # stands in no row
ALL = {"optim__max_length": 64, "optim__tokens_per_batch": 1280}  # every row in one batch
HALVES = {"loss__position_weights": [1.0, 0.5, 0.25]}  # whose sums are exact
NO_TAPS: dict[str, Any] = {"draft__aux_layer_ids": None}
BLOCK = {"family": "dflash", "draft__mask_token_id": MASK}

KINDS: dict[str, dict[str, Any]] = {
    "eagle3": HALVES,
    "eagle3-vocab": {**HALVES, "draft__draft_vocab_size": 40, "draft__norm_output": True},
    "eagle3-anchors": {**HALVES, "optim__anchors_per_row": 4},
    "eagle3-pace": {"loss__pace_alpha": 0.5},
    "p-eagle": {**HALVES, "draft__parallel": True, "draft__mask_token_id": MASK},
    "mtp": {**HALVES, **NO_TAPS, "family": "mtp"},
    "medusa": {**HALVES, **NO_TAPS, "family": "medusa"},
    "draft_model": {**NO_TAPS, "family": "draft_model", "draft__num_layers": 2},
    "dflash": {**HALVES, **BLOCK},
    "dflash-window": {
        **HALVES,
        **BLOCK,
        "draft__causal": True,
        "draft__sliding_window": 6,
        "draft__num_layers": 2,
    },
}


def open_source(
    setup: Setup, frozen: FrozenTarget, recipe: Recipe, *, stored: StoredStates | None = None
) -> BatchSource:
    return BatchSource(
        setup.rows,
        frozen,
        recipe,
        aux_layer_ids=setup.aux_layer_ids,
        draft_tokens=setup.draft_tokens,
        greedy_rows=False,
        ranks=Ranks(),
        stored=stored,
    )


def with_packing(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, packing=True))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_rows_side_by_side(
    kind: str, target: TargetFacts, hybrid: TargetFacts, tmp_path: Path
) -> None:
    used = hybrid if kind == "mtp" else target
    recipe = make_recipe(**ALL, **KINDS[kind])
    setup = build_setup(recipe, target=used, data_dir=make_data(tmp_path / "d", used, top=MASK))
    frozen = load_frozen_target(used, device="cpu", dtype=torch.float64)
    module, _ = setup.build_module(frozen)
    module.double()
    found = []
    for each in (recipe, with_packing(recipe)):
        source = open_source(setup, frozen, each)
        assert len(source) == 1
        (part,) = source.get(0, epoch=1)
        result = train_step(module, part, frozen, source.teacher_head_VD, each)
        gradients = torch.autograd.grad(result.loss, list(module.parameters()))
        found.append((part, result, gradients))
    (apart, one, one_grads), (packed, two, two_grads) = found
    assert sorted(apart.row_ids) == sorted(packed.row_ids)
    assert apart.places_BT is None
    assert packed.places_BT is not None
    assert len(packed.tokens_BT) < len(packed.row_ids) / 2
    assert packed.tokens_BT.numel() < apart.tokens_BT.numel()
    assert two.loss.dtype == torch.float64
    assert two.loss.item() == pytest.approx(one.loss.item(), rel=1e-12)
    assert torch.equal(one.correct_KM.sum(-1), two.correct_KM.sum(-1))
    assert torch.equal(one.counted_KM.sum(-1), two.counted_KM.sum(-1))
    assert max(float(grad.abs().max()) for grad in one_grads) > 1e-3
    for grad, other in zip(one_grads, two_grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-12)


def test_what_a_row_is_given_does_not_depend_on_its_neighbours(
    target: TargetFacts, data_dir: Path
) -> None:
    """Another text before it, and another after it: the same steps, past its own end too."""
    setup = build_setup(make_recipe(), target=target, data_dir=data_dir)
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float64)
    module, _ = setup.build_module(frozen)
    module.double()
    rows, states = setup.rows, []
    for slot, number in (((rows[0],), 0), ((rows[0], rows[1]), 0), ((rows[2], rows[0]), 1)):
        batch = build_batch([slot], num_speculative_tokens=3)
        texts = [frozen.features(torch.tensor([row.input_ids]), (1, 2, 3)) for row in slot]
        outputs, _ = module.unroll(
            batch.tokens_BT,
            torch.cat([text.taps_BTF for text in texts], 1),
            batch.bases_BN,
            frozen.embedding_VD,
            num_steps=3,
            places_BT=batch.places_BT,
        )
        first = batch.first_base_R[number]
        num = sum(end - start - 1 for start, end in rows[0].loss_spans)
        states.append(torch.stack(outputs)[:, 0, first : first + num])
    for other in states[1:]:
        torch.testing.assert_close(states[0], other, rtol=1e-12, atol=1e-12)


def test_an_answer_at_a_row_s_first_token_has_no_base_in_the_row_before() -> None:
    row = Row(
        row_id="a",
        category="chat",
        input_ids=(3, 4, 5, 6, 7),
        loss_spans=((0, 5),),
        finish_reason="stop",
    )
    alone = build_batch([[row]], num_speculative_tokens=3)
    packed = build_batch([[row, row]], num_speculative_tokens=3)
    assert alone.places_BT is None
    assert packed.places_BT is not None
    assert packed.places_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
    assert packed.corners_R == ((0, 0), (0, 5))
    num = alone.valid_KM.shape[1]
    assert torch.equal(packed.valid_KM[:, :num], alone.valid_KM)
    assert torch.equal(packed.valid_KM[:, num:], alone.valid_KM)
    bases = packed.bases_BN.flatten()[packed.source_KM]
    assert bool((bases[:, num:] >= 5)[packed.valid_KM[:, num:]].all())


@given(lengths=st.lists(st.integers(2, 64), min_size=1, max_size=60), seed=st.integers(0, 3))
def test_every_row_once_within_the_slots(lengths: list[int], seed: int) -> None:
    slots = pack_rows(lengths, width=64, seed=seed)
    assert sorted(n for slot in slots for n in slot) == list(range(len(lengths)))
    held = [sum(lengths[n] for n in slot) for slot in slots]
    assert max(held) <= 64
    # no slot fits whole into another's room: best fit leaves at most one below half
    assert sum(size <= 32 for size in held) <= 1
    assert slots == pack_rows(lengths, width=64, seed=seed)


def test_batches_of_slots_hold_every_row_and_little_padding() -> None:
    lengths = [12 + 7 * n % 40 for n in range(200)]
    recipe = with_packing(make_recipe(optim__max_length=64, optim__tokens_per_batch=200))
    plan = plan_slots(lengths, recipe)
    assert sorted(n for batch in plan for slot in batch for n in slot) == list(range(200))
    assert {len(batch) for batch in plan[:-1]} == {3}  # of 64 tokens in 200
    assert padding_share(lengths, plan) < 0.08
    # each batch holds long rows and short ones
    assert all(max(lengths[n] for slot in b for n in slot) > 30 for b in plan)
    # 10 and 6 side by side are 20 tokens, 16 of them real
    assert padding_share([10, 6], [[(0,), (1,)]]) == pytest.approx(0.2)
    assert padding_share([10, 6], [[(0, 1)]]) == 0.0


def test_packing_without_effect_is_refused_before_the_target_is_loaded(
    target: TargetFacts, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.train.loop.load_frozen_target", None)
    recipe = make_recipe(optim__packing=True, optim__max_length=20)
    with pytest.raises(RecipeError, match=r"packing.*no two rows fit") as caught:
        run_training(recipe, target=target, data_dir=data_dir, out_dir=tmp_path / "out")
    assert "max_length" in str(caught.value)


def test_the_setting_is_named_only_where_it_is_set() -> None:
    """So records and checkpoints from before it stay what they were."""
    assert "packing" not in make_recipe().as_dict()["optim"]
    assert make_recipe(optim__packing=True).as_dict()["optim"]["packing"] is True
    with pytest.raises(RecipeError, match="true or false"):
        make_recipe(optim__packing=1)


def test_stored_states_stand_where_the_packed_rows_do(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    layers = (1, 2, 3)
    settings: dict[str, Any] = {"target": target, "aux_layer_ids": layers, "dtype": "float32"}
    store_states(data_dir, out_dir=tmp_path / "states", max_length=64, **settings)
    recipe = with_packing(make_recipe(**ALL))
    setup = build_setup(recipe, target=target, data_dir=data_dir, states_dir=tmp_path / "states")
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    asked, read = (
        open_source(setup, frozen, recipe, stored=stored).get(0)[0]
        for stored in (None, setup.states)
    )
    torch.testing.assert_close(asked.taps_BTF, read.taps_BTF)
    torch.testing.assert_close(asked.final_MD, read.final_MD)


def test_the_sample_of_a_packed_row_is_the_one_it_has_alone() -> None:
    lengths = (20, 31, 12)
    apart, packed = make_part(*lengths), make_part(*lengths, packed=True)
    assert torch.equal(apart.weights_KM, packed.weights_KM)
    one, two = (
        sample_anchors(part, anchors_per_row=4, seed=1, epoch=0) for part in (apart, packed)
    )
    assert two.bases_BN.shape == (1, 12)
    assert torch.equal(one.weights_KM, two.weights_KM)
    bases_one, bases_two = (
        part.bases_BN.flatten()[part.source_KM][part.weights_KM > 0] for part in (one, two)
    )
    rows_M = apart.source_KM[0] // apart.bases_BN.shape[1]
    starts = torch.tensor([0, 20, 51])[rows_M].expand_as(apart.source_KM)
    assert torch.equal(bases_two - starts[one.weights_KM > 0], bases_one)
