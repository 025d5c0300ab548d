"""Rows that would waste a run are refused before the target is loaded, by row, file and reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import fill_disk, mounted_disk
from safetensors.torch import load_file, save_file
from tiny import make_recipe

from paceline.data import read_rows, rows_from_conversations
from paceline.data.prompt_set import read_prompts
from paceline.errors import DataError, PacelineError, RecipeError, StorageError
from paceline.records import sha256_file
from paceline.target import TargetFacts, read_target
from paceline.train import train_draft
from paceline.train.loop import Progress
from paceline.train.setup import build_setup
from paceline.train.vocabulary import count_supervised

Change = Callable[[list[dict[str, Any]]], None]


@pytest.fixture
def spoilt(data_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """The data folder with changed rows; `sealed` makes data.json describe them again."""

    def spoil(change: Change, *, sealed: bool = True) -> Path:
        folder = tmp_path / "data"
        shutil.copytree(data_dir, folder)
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        change(rows)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if sealed:
            record = json.loads((folder / "data.json").read_text())
            record["rows_sha256"] = sha256_file(folder / "rows.jsonl")
            record["counts"]["rows"] = len(rows)
            (folder / "data.json").write_text(json.dumps(record))
        return folder

    return spoil


def refuse(folder: Path, target: TargetFacts, **recipe: Any) -> PacelineError:
    """The refusal, which comes from the setup: nothing was loaded yet."""
    with pytest.raises(PacelineError) as caught:
        build_setup(make_recipe(**recipe), target=target, data_dir=folder)
    return caught.value


def test_what_is_not_spoilt_passes(target: TargetFacts, spoilt: Callable[..., Path]) -> None:
    folder = spoilt(lambda rows: None)
    assert len(build_setup(make_recipe(), target=target, data_dir=folder).rows) == 20


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_nan_in_a_row(target: TargetFacts, spoilt: Callable[..., Path], number: str) -> None:
    folder = spoilt(lambda rows: None)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    lines[3] = lines[3].replace('"input_ids": [', f'"input_ids": [{number}, ')
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    error = refuse(folder, target)
    assert isinstance(error, DataError)
    assert error.where.endswith("rows.jsonl:4")


def test_rows_without_anything_to_learn(target: TargetFacts, spoilt: Callable[..., Path]) -> None:
    def mask(rows: list[dict[str, Any]]) -> None:
        rows[5]["loss_spans"] = []

    error = refuse(spoilt(mask), target)
    assert "nothing to learn from this row" in str(error)
    assert error.where.endswith("rows.jsonl:6")


def test_all_rows_masked_by_the_length(target: TargetFacts, spoilt: Callable[..., Path]) -> None:
    def mask(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["loss_spans"] = [[len(row["input_ids"]) - 1, len(row["input_ids"])]]

    assert "none of 20 rows has a supervised token" in str(refuse(spoilt(mask), target))


def test_an_answer_cut_short(target: TargetFacts, spoilt: Callable[..., Path]) -> None:
    def cut(rows: list[dict[str, Any]]) -> None:
        rows[2]["finish_reason"] = "stop"

    error = refuse(spoilt(cut), target)
    assert "row 'row-2' was cut" in str(error)
    assert error.where.endswith("rows.jsonl:3")

    def end(rows: list[dict[str, Any]]) -> None:
        cut(rows)
        rows[2]["input_ids"][-1] = target.eos_token_ids[0]

    shutil.rmtree(Path(error.where).parent)
    build_setup(make_recipe(), target=target, data_dir=spoilt(end))


@pytest.mark.parametrize("how", ["a line cut in two", "a row less", "a row of another folder"])
def test_a_file_that_its_record_does_not_describe(
    target: TargetFacts, spoilt: Callable[..., Path], how: str
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        if how == "a row less":
            rows.pop()
        elif how == "a row of another folder":
            rows.append({**rows[0], "id": "from-elsewhere"})

    folder = spoilt(change, sealed=False)
    path = folder / "rows.jsonl"
    if how == "a line cut in two":
        path.write_bytes(path.read_bytes()[:-20])
    error = refuse(folder, target)
    counted = {"a row of another folder": 21}.get(how, 19)
    assert f"it holds {counted} rows and data.json counts 20" in str(error)
    assert error.where == str(path)


def test_mixed_templates(tmp_path: Path) -> None:
    """Half the rows in thinking mode on, half off, in one file that data.json calls off."""
    pocket = read_target("pocket")
    lines = [
        {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "Yes."}]}
        for words in ("Is it so?", "Are you sure of that?")
    ]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = read_prompts(str(texts))
    for mode in ("off", "on"):
        rows_from_conversations(prompts, pocket, tmp_path / mode, thinking=mode)
    off = tmp_path / "off"
    recipe = make_recipe(family="mtp", draft__aux_layer_ids=None)
    assert len(build_setup(recipe, target=pocket, data_dir=off).rows) == 2
    mixed = (off / "rows.jsonl").read_text().splitlines()[:1]
    mixed += (tmp_path / "on" / "rows.jsonl").read_text().splitlines()[1:]
    (off / "rows.jsonl").write_text("".join(line + "\n" for line in mixed))
    record = json.loads((off / "data.json").read_text())
    record["rows_sha256"] = sha256_file(off / "rows.jsonl")
    (off / "data.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="in another template than the others") as caught:
        build_setup(recipe, target=pocket, data_dir=off)
    assert caught.value.where.endswith("rows.jsonl:2")


@pytest.fixture(scope="module")
def small_vocabulary(
    target: TargetFacts, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("small") / "draft"
    recipe = make_recipe(draft__draft_vocab_size=20, optim__num_steps=1, optim__warmup_steps=0)
    train_draft(recipe, target=target, data_dir=data_dir, out_dir=out, device="cpu")
    return out


def with_map(draft: Path, out: Path, d2t: list[int]) -> Path:
    shutil.copytree(draft, out)
    tensors = load_file(str(out / "model.safetensors"))
    tensors["d2t"] = torch.tensor(d2t)
    save_file(tensors, str(out / "model.safetensors"))
    return out


def test_a_stale_vocabulary_map(
    target: TargetFacts, data_dir: Path, small_vocabulary: Path, tmp_path: Path
) -> None:
    start = {"draft__draft_vocab_size": 20}
    path = with_map(small_vocabulary, tmp_path / "beyond", [0] * 19 + [50])
    error = refuse(data_dir, target, init__from=str(path), **start)
    assert "no map into this target's vocabulary" in str(error)
    assert error.where == str(path)
    counts = count_supervised(read_rows(data_dir))
    rare = sorted(sorted(range(target.vocab_size), key=lambda token: counts[token])[:20])
    path = with_map(small_vocabulary, tmp_path / "other", [t - i for i, t in enumerate(rare)])
    error = refuse(data_dir, target, init__from=str(path), **start)
    assert isinstance(error, RecipeError)
    assert "% of the tokens of these rows" in str(error)


@pytest.mark.parametrize("packing", [False, True])
def test_states_that_are_not_numbers_name_their_row(
    target: TargetFacts, spoilt: Callable[..., Path], tmp_path: Path, packing: bool
) -> None:
    """A NaN in the embedding of a token that one row holds: that row is named, not its batch."""

    def use(rows: list[dict[str, Any]]) -> None:
        rows[7]["input_ids"][6] = 1

    broken = tmp_path / "target"
    shutil.copytree(target.path, broken)
    weights = load_file(str(broken / "model.safetensors"))
    weights["model.embed_tokens.weight"][1] = float("nan")
    save_file(weights, str(broken / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(DataError, match="states of row 'row-7' are not finite"):
        train_draft(
            # all rows in one batch
            make_recipe(optim__tokens_per_batch=1024, optim__packing=packing),
            target=read_target(broken),
            data_dir=spoilt(use),
            out_dir=tmp_path / "draft",
            device="cpu",
        )


def test_a_disk_that_cannot_hold_a_checkpoint(
    target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    """Refused at the start; and where others fill it in between, the old checkpoint stays."""
    settings: dict[str, Any] = {"target": target, "data_dir": data_dir, "device": "cpu"}
    with (
        mounted_disk(tmp_path / "small", size="200k") as disk,
        pytest.raises(StorageError, match=r"has no room for checkpoints: 20\d kB are free"),
    ):
        train_draft(make_recipe(), out_dir=disk / "draft", **settings)
    with mounted_disk(tmp_path / "large", size="8m") as disk:

        def fill(progress: Progress) -> None:
            if progress.step == 15:
                fill_disk(disk)

        recipe = make_recipe(optim__checkpoint_steps=5)
        with pytest.raises(StorageError, match="the disk is full"):
            train_draft(recipe, out_dir=disk / "draft", on_progress=fill, **settings)
        (disk / "filler").unlink()
        assert sorted(path.name for path in disk.iterdir()) == ["draft.checkpoint"]
        assert json.loads((disk / "draft.checkpoint" / "meta.json").read_text())["step"] == 15
        draft = train_draft(recipe, out_dir=disk / "draft", resume=True, **settings)
        assert draft.metadata["trained"]["num_steps"] == 20
