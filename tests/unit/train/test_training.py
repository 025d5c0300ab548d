"""Whole runs on a tiny target: exact resume (U29), records, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_recipe

from paceline.draft import Draft, read_draft
from paceline.errors import DataError, RecipeError, StorageError
from paceline.records import sha256_file
from paceline.target import TargetFacts
from paceline.train import Recipe, train_draft
from paceline.train.families.eagle3_weights import load_draft_tensors
from paceline.train.loop import Progress
from paceline.train.setup import build_setup


class Stop(Exception):
    """Stands for a kill."""


def train(
    recipe: Recipe,
    target: TargetFacts,
    data_dir: Path,
    out: Path,
    *,
    resume: bool = False,
    die_after: int | None = None,
    kind: type[BaseException] = Stop,
) -> tuple[Draft | None, list[Progress]]:
    seen: list[Progress] = []

    def show(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == die_after:
            raise kind

    try:
        draft = train_draft(
            recipe,
            target=target,
            data_dir=data_dir,
            out_dir=out,
            device="cpu",
            resume=resume,
            on_progress=show,
        )
    except kind:
        return None, seen
    return draft, seen


@pytest.mark.parametrize(
    ("vocab", "dtype", "packing"),
    [(None, "float32", False), (40, "float32", True), (40, "bfloat16", False)],
)
def test_resume_is_bit_identical_u29(
    target: TargetFacts,
    data_dir: Path,
    tmp_path: Path,
    vocab: int | None,
    dtype: str,
    packing: bool,
) -> None:
    recipe = make_recipe(
        draft__draft_vocab_size=vocab,
        dtype=dtype,
        optim__packing=packing,
        optim__tokens_per_batch=64 if packing else 96,
    )
    straight, whole = train(recipe, target, data_dir, tmp_path / "a")
    none, before = train(recipe, target, data_dir, tmp_path / "b", die_after=13)
    assert none is None
    assert not (tmp_path / "b").exists()
    resumed, after = train(recipe, target, data_dir, tmp_path / "b", resume=True)
    assert straight is not None
    assert resumed is not None
    # killed at 13, checkpoint at 10: steps 11.. are done again, in mid-epoch, as they were
    assert after[0].step == 11
    num_batches = len({tuple(p.row_ids) for p in whole})
    assert 10 % num_batches != 0
    joined = before[:10] + after
    assert [p.row_ids for p in joined] == [p.row_ids for p in whole]
    assert [p.loss for p in joined] == [p.loss for p in whole]
    assert whole[9].learning_rate == pytest.approx(6.667e-4, abs=1e-7)
    one, other = load_draft_tensors(straight), load_draft_tensors(resumed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "b.checkpoint").exists()


def test_every_row_once_an_epoch(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    recipe = make_recipe(optim__num_steps=None, optim__num_epochs=2)
    _, seen = train(recipe, target, data_dir, tmp_path / "a")
    for epoch in (0, 1):
        ids = [name for p in seen if p.epoch == epoch for name in p.row_ids]
        assert len(ids) == len(set(ids)) == 20


def test_ctrl_c_keeps_the_steps_done(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    none, _ = train(
        make_recipe(),
        target,
        data_dir,
        tmp_path / "a",
        die_after=7,
        kind=KeyboardInterrupt,
    )
    assert none is None
    _, after = train(make_recipe(), target, data_dir, tmp_path / "a", resume=True)
    assert after[0].step == 8


def stopped(target: TargetFacts, data_dir: Path, out: Path) -> Path:
    train(make_recipe(), target, data_dir, out, die_after=12)
    return out.with_name(out.name + ".checkpoint")


@pytest.mark.parametrize("file", ["optimizer.safetensors", "weights.safetensors", "meta.json"])
def test_resume_without_a_part_asks_for_a_choice_u29(
    target: TargetFacts, data_dir: Path, tmp_path: Path, file: str
) -> None:
    (stopped(target, data_dir, tmp_path / "a") / file).unlink()
    with pytest.raises(RecipeError, match=file) as caught:
        train(make_recipe(), target, data_dir, tmp_path / "a", resume=True)
    assert "Remove the folder" in caught.value.fix


def test_resume_with_a_cut_file(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    path = stopped(target, data_dir, tmp_path / "a") / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RecipeError, match="optimizer"):
        train(make_recipe(), target, data_dir, tmp_path / "a", resume=True)


def test_resume_names_what_differs(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    stopped(target, data_dir, tmp_path / "a")
    with pytest.raises(RecipeError, match=r"recipe\.optim\.lr.*0\.001"):
        train(make_recipe(optim__lr=2e-3), target, data_dir, tmp_path / "a", resume=True)
    with pytest.raises(RecipeError, match=r"recipe\.seed"):
        train(make_recipe(seed=6), target, data_dir, tmp_path / "a", resume=True)
    other = tmp_path / "data"
    shutil.copytree(data_dir, other)
    lines = (other / "rows.jsonl").read_text().splitlines(keepends=True)
    (other / "rows.jsonl").write_text("".join(lines[:-1]))
    edit_record(other, lambda r: r.update(rows_sha256=sha256_file(other / "rows.jsonl")))
    with pytest.raises(RecipeError, match=r"data\.num_rows"):
        train(make_recipe(), target, other, tmp_path / "a", resume=True)
    with pytest.raises(RecipeError, match="unfinished training"):
        train(make_recipe(), target, data_dir, tmp_path / "a")
    with pytest.raises(RecipeError, match="no checkpoint"):
        train(make_recipe(), target, data_dir, tmp_path / "c", resume=True)


def test_existing_out_is_found_before_training(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError, match="already exists"):
        train(make_recipe(), target, data_dir, tmp_path / "a")


def test_nan_names_step_and_rows(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    recipe = make_recipe(optim__lr=1e30, optim__warmup_steps=0, optim__schedule="constant")
    with pytest.raises(RecipeError, match=r"broke at step \d+: .* on rows row-\d+"):
        train(recipe, target, data_dir, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_record_says_where_the_draft_came_from(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(optim__num_steps=3, optim__warmup_steps=0)
    draft, seen = train(recipe, target, data_dir, tmp_path / "first")
    assert draft is not None
    trained = draft.metadata["trained"]
    assert trained["weights_fingerprint"] == target.weights_fingerprint
    assert trained["recipe"] == recipe.as_dict()
    assert trained["seed"] == 5
    assert trained["thinking"] == "none"
    assert trained["trained_length"] <= 32
    assert trained["trained_rotary_dim"] == 8
    assert trained["started_from"]["from"] == "target"
    assert "midlayer.mlp.up_proj.weight" in trained["started_from"]["tensors"]
    assert trained["tokens_seen"] > 0
    assert len(seen) == 3
    again, _ = train(
        make_recipe(init__from=str(tmp_path / "first"), optim__num_steps=1),
        target,
        data_dir,
        tmp_path / "second",
    )
    assert again is not None
    assert again.metadata["trained"]["started_from"]["sha256"] == draft.sha256
    with pytest.raises(RecipeError, match=r"midlayer\.mlp"):
        train(
            make_recipe(init__from=str(tmp_path / "first"), draft__intermediate_size=16),
            target,
            data_dir,
            tmp_path / "third",
        )


def test_a_draft_with_heads_of_its_own(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    """Fewer and narrower key-value heads; what does not fit starts at random."""
    recipe = make_recipe(
        optim__num_steps=2,
        optim__num_epochs=None,
        draft__num_attention_heads=2,
        draft__num_key_value_heads=1,
        draft__head_dim=8,
    )
    draft, _ = train(recipe, target, data_dir, tmp_path / "narrow")
    assert draft is not None
    assert draft.tensors["midlayer.self_attn.k_proj.weight"].shape == (8, 2 * target.hidden_size)
    assert draft.tensors["midlayer.self_attn.o_proj.weight"].shape == (target.hidden_size, 16)
    assert read_draft(tmp_path / "narrow").config["head_dim"] == 8


@pytest.mark.parametrize(
    ("key", "value"), [("head_dim", 7), ("head_dim", 0), ("num_key_value_heads", 0)]
)
def test_sizes_that_cannot_be_are_named(key: str, value: int) -> None:
    with pytest.raises(RecipeError, match=rf"draft\.{key}"):
        make_recipe(**{f"draft__{key}": value})


def edit_record(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads((folder / "data.json").read_text())
    change(record)
    (folder / "data.json").write_text(json.dumps(record))


def test_data_of_another_target_is_refused(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "data"
    shutil.copytree(data_dir, other)
    edit_record(other, lambda r: r["target"].update(tokenizer_sha256="f" * 64))
    with pytest.raises(DataError, match="tokenizer_sha256"):
        train(make_recipe(), target, other, tmp_path / "a")


def test_tokens_beyond_the_target_are_refused(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "data"
    shutil.copytree(data_dir, other)
    text = (other / "rows.jsonl").read_text()
    (other / "rows.jsonl").write_text(text.replace('"input_ids": [', '"input_ids": [64, ', 1))
    edit_record(other, lambda r: r.update(rows_sha256=sha256_file(other / "rows.jsonl")))
    with pytest.raises(DataError, match="token 64"):
        train(make_recipe(), target, other, tmp_path / "a")


def test_tap_behind_the_final_norm_is_refused(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(draft__aux_layer_ids=[1, 2, 4])
    with pytest.raises(RecipeError, match="aux_layer_ids"):
        train(recipe, target, data_dir, tmp_path / "a")


def test_it_learns(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    """A random target's greedy choices are hard; a memorised set must still show falling loss."""
    recipe = make_recipe(
        optim__num_steps=150, optim__lr=5e-3, optim__schedule="constant", loss__hard=1.0
    )
    _, seen = train(recipe, target, data_dir, tmp_path / "a")
    first = sum(p.loss for p in seen[:10]) / 10
    last = sum(p.loss for p in seen[-10:]) / 10
    assert last < 0.5 * first
    assert (seen[-1].position_accuracy[0] or 0.0) > 0.5


def test_a_draft_trained_on_keeps_its_vocabulary_on_other_data(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """Its output matrix stands in the order of its own map; other rows would choose another one."""
    from tiny import make_data

    recipe = make_recipe(draft__draft_vocab_size=24, optim__num_steps=3, optim__warmup_steps=0)
    first, _ = train(recipe, target, data_dir, tmp_path / "first")
    other = make_data(tmp_path / "data", target, num_rows=6)
    further = make_recipe(
        draft__draft_vocab_size=24, optim__num_steps=1, init__from=str(tmp_path / "first")
    )
    second, _ = train(further, target, other, tmp_path / "second")
    fresh, _ = train(recipe, target, other, tmp_path / "fresh")
    assert first is not None
    assert second is not None
    assert fresh is not None
    maps = [load_draft_tensors(draft)["d2t"] for draft in (first, second, fresh)]
    assert torch.equal(maps[0], maps[1])
    assert not torch.equal(maps[0], maps[2])  # so the rows do choose another
    setup = build_setup(further, target=target, data_dir=other)
    assert list(setup.draft_tokens or ()) == (torch.arange(24) + maps[0]).tolist()


def test_parts_change_memory_and_nothing_else(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"draft__draft_vocab_size": 40, "optim__num_steps": 12}
    whole, one = train(make_recipe(**changes), target, data_dir, tmp_path / "whole")
    parts, many = train(
        make_recipe(**changes, optim__tokens_per_part=40), target, data_dir, tmp_path / "parts"
    )
    assert [p.row_ids for p in one] == [p.row_ids for p in many]
    for a, b in zip(one, many, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert b.position_accuracy == a.position_accuracy
    assert whole is not None
    assert parts is not None
    trained = [draft.metadata["trained"] for draft in (whole, parts)]
    assert trained[0]["tokens_seen"] == trained[1]["tokens_seen"]
    coverage = [record["draft_vocab_coverage"] for record in trained]
    assert coverage[0] == pytest.approx(coverage[1], rel=1e-6)


@pytest.mark.parametrize("size", [31, 96, 0])
def test_a_part_that_has_no_effect_or_no_room_is_refused(size: int) -> None:
    with pytest.raises(RecipeError, match=r"optim\.tokens_per_part"):
        make_recipe(optim__tokens_per_part=size)


def test_one_process_spreads_no_target(target: TargetFacts, data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be spread over one process"):
        train_draft(
            make_recipe(),
            target=target,
            data_dir=data_dir,
            out_dir=tmp_path / "a",
            sharded_target=True,
        )
