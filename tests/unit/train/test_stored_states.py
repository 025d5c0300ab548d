"""Training from stored states is training beside the target; a folder that is not right is refused
by file, row and reason before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import fill_disk, mounted_disk
from safetensors.torch import load_file, save_file
from tiny import make_data, make_recipe

from paceline.data import Row, plan_states, read_rows
from paceline.data.states import require_states_room
from paceline.draft import read_draft
from paceline.errors import DataError, PacelineError, RecipeError, StorageError
from paceline.target import TargetFacts
from paceline.train import store_states, stored, train_draft
from paceline.train.families.eagle3_weights import load_draft_tensors
from paceline.train.features import load_frozen_target
from paceline.train.setup import build_setup
from paceline.train.stored import StatesRun
from paceline.train.stored import store_states as store

LAYERS = (1, 2, 3)
SETTINGS: dict[str, Any] = {
    "aux_layer_ids": LAYERS,
    "dtype": "float32",
    "max_length": 32,
    "device": "cpu",
}
FAMILIES: list[dict[str, Any]] = [
    {},
    {"draft__draft_vocab_size": 40, "optim__anchors_per_row": 4},
    {"family": "medusa", "draft__aux_layer_ids": None},
    {"optim__max_length": 16},
]


@pytest.fixture(scope="module")
def states(target: TargetFacts, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float32, in files of at most 20 kB."""
    out = tmp_path_factory.mktemp("stored") / "states"
    store(
        data_dir,
        target=target,
        out_dir=out,
        file_bytes=20_000,
        **SETTINGS,
    )
    return out


@pytest.fixture
def copied(states: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(states, tmp_path / "states"))


@pytest.mark.parametrize("changes", FAMILIES, ids=["eagle3", "anchors", "medusa", "cut"])
def test_trained_from_states_as_beside_the_target(
    changes: dict[str, Any], target: TargetFacts, data_dir: Path, states: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(optim__num_steps=8, **changes)
    losses: dict[str, list[float]] = {"online": [], "stored": []}
    for name, folder in (("online", None), ("stored", states)):
        train_draft(
            recipe,
            target=target,
            data_dir=data_dir,
            out_dir=tmp_path / name,
            device="cpu",
            states_dir=folder,
            on_progress=lambda p, own=losses[name]: own.append(p.loss),  # type: ignore[misc]
        )
    assert losses["stored"] == pytest.approx(losses["online"], rel=1e-5)
    one, other = (load_draft_tensors(read_draft(tmp_path / name)) for name in losses)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor.float(), other[name].float(), rtol=1e-2, atol=2e-4)


def test_the_target_is_not_run(
    target: TargetFacts,
    data_dir: Path,
    states: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object) -> None:
        raise AssertionError("the target was run")

    monkeypatch.setattr("paceline.train.features.FrozenTarget.features", run)
    recipe = make_recipe(optim__num_steps=2)
    train_draft(
        recipe,
        target=target,
        data_dir=data_dir,
        out_dir=tmp_path / "draft",
        device="cpu",
        states_dir=states,
    )


def test_an_unfinished_folder_goes_on_with_the_same_values(
    target: TargetFacts, data_dir: Path, states: Path, copied: Path
) -> None:
    whole = {path.name: path.read_bytes() for path in states.glob("*.safetensors")}
    assert len(whole) > 3
    names = sorted(whole)
    for name in names[2:]:
        (copied / name).unlink()
    record = json.loads((copied / "states.json").read_text())
    (copied / "states.json").write_text(json.dumps({**record, "complete": False}))
    with pytest.raises(DataError, match="unfinished"):
        refuse(copied, target, data_dir)
    asked: list[int] = []
    store(
        data_dir,
        target=target,
        out_dir=copied,
        file_bytes=20_000,
        **SETTINGS,
        on_progress=lambda done, total: asked.append(done),
    )
    assert asked[0] > 1
    assert {path.name: path.read_bytes() for path in copied.glob("*.safetensors")} == whole


def refuse(folder: Path, target: TargetFacts, data_dir: Path, **recipe: Any) -> None:
    build_setup(make_recipe(**recipe), target=target, data_dir=data_dir, states_dir=folder)


def cut_file(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def drop_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def change_row(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = sorted(folder.glob("*.safetensors"))[1]
        tensors = load_file(str(path))
        name = min(tensors, key=int)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, str(path))

    return spoil


def change_record(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        record = json.loads((folder / "states.json").read_text())
        (folder / "states.json").write_text(json.dumps({**record, **changes}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words", "where"),
    [
        (cut_file, "states-00001", "states-00001.safetensors"),
        (drop_file, "the file of row 'row-", "states-00001.safetensors"),
        (change_row(lambda t: t[:-1]), "has states of shape", "states-00001.safetensors: tensor '"),
        (change_row(lambda t: t[:, :-32]), "has states of shape", "00001.safetensors: tensor '"),
        (change_row(lambda t: t.bfloat16()), "has states in BF16", "00001.safetensors: tensor '"),
        (change_record(rows_sha256="0" * 64), "made of another rows", "states.json"),
        (change_record(weights_fingerprint="0"), "made of another target", "states.json"),
        (change_record(aux_layer_ids=[1, 2]), r"and not \[3\]", "states.json"),
        (change_record(max_length=16), "end at 16 tokens", "states.json"),
        (change_record(hidden_size=None), "is missing or of the wrong kind", "states.json"),
        (change_record(format="other/1"), "format is 'other/1'", "states.json"),
    ],
)
def test_a_folder_that_is_not_right(
    spoil: Callable[[Path], None],
    words: str,
    where: str,
    copied: Path,
    target: TargetFacts,
    data_dir: Path,
) -> None:
    """By headers alone: build_setup loads no model."""
    spoil(copied)
    with pytest.raises(DataError, match=words) as caught:
        refuse(copied, target, data_dir)
    assert where in caught.value.where


def test_states_of_other_rows(states: Path, target: TargetFacts, tmp_path: Path) -> None:
    other = make_data(tmp_path / "data", target, num_rows=21)
    with pytest.raises(DataError, match="made of another rows"):
        refuse(states, target, other)


def test_another_dtype_or_a_spread_target_is_refused(
    states: Path, target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="is bfloat16 and the states are float32"):
        refuse(states, target, data_dir, dtype="bfloat16")
    with pytest.raises(RecipeError, match="read from stored states"):
        train_draft(
            make_recipe(),
            target=target,
            data_dir=data_dir,
            out_dir=tmp_path / "draft",
            device="cpu",
            sharded_target=True,
            states_dir=states,
        )


@pytest.mark.parametrize("layers", [(2, 1), (1, 1), (4,)])
def test_layers_that_cannot_be_stored(
    layers: tuple[int, ...], target: TargetFacts, data_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="cannot be stored"):
        store_states(
            data_dir,
            target=target,
            out_dir=tmp_path / "states",
            aux_layer_ids=layers,
            max_length=32,
        )


def test_the_price_is_known_and_what_does_not_fit_is_refused_before_the_first_token(
    target: TargetFacts,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = read_rows(data_dir)
    plan = plan_states(
        data_dir, rows, target, aux_layer_ids=LAYERS, dtype="bfloat16", max_length=16
    )
    tokens = sum(min(16, len(row.input_ids)) for row in rows)
    assert plan.num_bytes == tokens * 4 * 32 * 2  # three layers and the last state, of 32 bf16
    assert [n for _, numbers in plan.files for n in numbers] == list(range(len(rows)))

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("paceline.train.stored.load_frozen_target", load)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
    told: list[PacelineError] = []
    for ask in (
        lambda: require_states_room(plan, tmp_path / "states"),
        lambda: store_states(
            data_dir,
            target=target,
            out_dir=tmp_path / "states",
            aux_layer_ids=LAYERS,
            max_length=16,
        ),
    ):
        with pytest.raises(StorageError, match="no room for the states") as caught:
            ask()
        told.append(caught.value)
    assert f"{tokens:,} tokens of 256 bytes" in told[0].expected
    assert not list((tmp_path / "states").glob("*.safetensors"))


def test_states_that_are_not_numbers_or_too_few_name_their_row(
    target: TargetFacts, data_dir: Path, copied: Path, tmp_path: Path
) -> None:
    """From what writes them, and from a file that was spoilt afterwards."""

    def give(spoil: Callable[[torch.Tensor], torch.Tensor]) -> StatesRun:
        def run(rows: Sequence[Row]) -> Iterator[torch.Tensor]:
            for row in rows:
                states = torch.zeros(len(row.input_ids), 4 * 32)
                yield spoil(states) if row.row_id == "row-2" else states

        return run

    settings: dict[str, Any] = {"target": target, "aux_layer_ids": LAYERS, "dtype": "float32"}
    for spoil, words in (
        (lambda t: t * float("nan"), "states of row 'row-2' are not finite"),
        (lambda t: t[1:], "row 'row-2' was given states of shape"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            store(
                data_dir, out_dir=tmp_path / words[-6:], max_length=32, run=give(spoil), **settings
            )
        assert caught.value.where.endswith("rows.jsonl:3")
    change_row(lambda t: t * float("inf"))(copied)
    number = min(load_file(str(sorted(copied.glob("*.safetensors"))[1])), key=int)
    with pytest.raises(DataError, match=f"states of row 'row-{number}' are not finite"):
        train_draft(
            make_recipe(),
            target=target,
            data_dir=data_dir,
            out_dir=tmp_path / "draft",
            device="cpu",
            states_dir=copied,
        )


def test_a_disk_that_others_fill(
    target: TargetFacts, data_dir: Path, states: Path, tmp_path: Path
) -> None:
    """What is finished stays, and the same call goes on."""
    settings: dict[str, Any] = {"target": target, "aux_layer_ids": LAYERS, "dtype": "float32"}
    settings |= {"max_length": 32, "device": "cpu", "file_bytes": 20_000}
    with mounted_disk(tmp_path / "disk", size="4m") as disk:

        def fill(done: int, total: int) -> None:
            if done == 6:
                fill_disk(disk)

        with pytest.raises(StorageError, match="the disk is full"):
            store(data_dir, out_dir=disk / "states", on_progress=fill, **settings)
        (disk / "filler").unlink()
        kept = sorted(path.name for path in (disk / "states").iterdir())
        assert 1 < len(kept) < 5
        store(data_dir, out_dir=disk / "states", **settings)
        for path in states.glob("*.safetensors"):
            assert (disk / "states" / path.name).read_bytes() == path.read_bytes()


def test_other_settings_do_not_go_on(copied: Path, target: TargetFacts, data_dir: Path) -> None:
    with pytest.raises(DataError, match="made with another aux_layer_ids"):
        store_states(
            data_dir,
            target=target,
            out_dir=copied,
            aux_layer_ids=(1,),
            dtype="float32",
            max_length=32,
        )


def test_rows_read_together_are_as_each_alone(
    target: TargetFacts, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their own order, whatever was put beside them: windows of 7 rows, 70 padded tokens."""
    monkeypatch.setattr(stored, "_ROWS_TOGETHER", 7)
    monkeypatch.setattr(stored, "_TOKENS_TOGETHER", 70)
    out = tmp_path / "states"
    store(data_dir, target=target, out_dir=out, **SETTINGS)
    frozen = load_frozen_target(target, device="cpu", dtype=torch.float32)
    written = {}
    for path in out.glob("*.safetensors"):
        written |= load_file(path)
    rows = read_rows(data_dir)
    assert len(written) == len(rows)
    for number, row in enumerate(rows):
        alone = frozen.features(torch.tensor([row.input_ids[:32]]), LAYERS)
        wanted = torch.cat([alone.taps_BTF, alone.final_BTD], -1)[0]
        torch.testing.assert_close(written[str(number)], wanted, rtol=1e-4, atol=1e-4)
