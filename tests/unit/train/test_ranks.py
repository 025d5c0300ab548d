"""Several processes, joined as `paceline train` joins them, train what one trains (gloo, CPU)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_data
from warm_processes import WarmProcess, open_door

from paceline.draft import read_draft
from paceline.records import sha256_file
from paceline.target import TargetFacts
from paceline.train.families.eagle3_weights import load_draft_tensors

SCRIPT = Path(__file__).with_name("rank_process.py")
LIMIT_S = 90.0
Steps = list[tuple[int, float, list[str]]]


@dataclass(frozen=True)
class Ended:
    code: int
    said: str
    steps: Steps


@dataclass(frozen=True)
class Started:
    process: WarmProcess
    said: Path
    log: Path

    def wait(self) -> Ended:
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError("the processes hang") from None
        return Ended(code, self.said.read_text(), read_steps(self.log))

    def kill(self, rank: int) -> None:
        pid = int(Path(f"{self.log}.{rank}").read_text())
        os.kill(pid, signal.SIGKILL)


def read_steps(log: Path) -> Steps:
    lines = log.read_text().splitlines() if log.exists() else []
    return [tuple(json.loads(line)) for line in lines]


Start = Callable[..., Started]


@pytest.fixture(scope="module")
def begin(
    target: TargetFacts, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """begin(out, n, **job): n processes writing to `out`; n = 0 is one without a launcher."""
    folder = tmp_path_factory.mktemp("jobs")
    keeper, env = open_door(folder)
    count = itertools.count()

    def begin(out: Path, n: int, *, words: tuple[str, ...] = (), **job: Any) -> Started:
        number = next(count)
        path, said, log = (folder / f"{number}.{kind}" for kind in ("json", "said", "log"))
        places = {"target": str(target.path), "data": str(data_dir), "out": str(out)}
        path.write_text(json.dumps({**places, "log": str(log), **job}))
        launch = ["--launch", str(n), *words] if n else []
        with said.open("w") as file:
            process = WarmProcess([str(SCRIPT), *launch, str(path)], env=env, stdout=file.fileno())
        return Started(process, said, log)

    yield begin
    keeper.kill()
    keeper.wait()


@pytest.fixture(scope="module")
def alone(begin: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """One process alone, 20 steps, its checkpoint at step 10 kept."""
    out = tmp_path_factory.mktemp("alone") / "draft"
    ended = begin(out, 0).wait()
    assert ended.code == 0, ended.said
    return out, ended


def require_same_curve(found: Steps, wanted: Steps, *, limit: float = 1e-5) -> None:
    assert [(s, rows) for s, _, rows in found] == [(s, rows) for s, _, rows in wanted]
    for (_, loss, _), (_, other, _) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(other, rel=limit)


def require_same_weights(one: Path, other: Path) -> None:
    first, second = (load_draft_tensors(read_draft(path)) for path in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():  # bfloat16 in the file: a last bit may fall the other way
        torch.testing.assert_close(tensor.float(), second[name].float(), rtol=1e-2, atol=2e-4)


@pytest.fixture(scope="module")
def pair(begin: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The same by two processes."""
    out = tmp_path_factory.mktemp("pair") / "draft"
    ended = begin(out, 2).wait()
    assert ended.code == 0, ended.said
    return out, ended


def test_two_processes_train_what_one_trains(
    alone: tuple[Path, Ended], pair: tuple[Path, Ended]
) -> None:
    out, ended = pair
    require_same_curve(ended.steps, alone[1].steps)
    require_same_weights(out, alone[0])
    assert not out.with_name("draft.checkpoint").exists()


def test_a_target_in_pieces_changes_nothing(
    begin: Start, alone: tuple[Path, Ended], tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    ended = begin(out, 2, sharded_target=True).wait()
    assert ended.code == 0, ended.said
    require_same_curve(ended.steps, alone[1].steps)
    require_same_weights(out, alone[0])


def test_a_process_without_a_row_waits_for_nobody(begin: Start, tmp_path: Path) -> None:
    """Batches of one row or two for three processes, and a draft vocabulary of its own."""
    recipe = {
        "optim__tokens_per_batch": 40,
        "optim__num_steps": 8,
        "draft__draft_vocab_size": 40,
    }
    runs = [begin(tmp_path / f"draft-{n}", n, recipe=recipe) for n in (0, 3)]
    one, three = (run.wait() for run in runs)
    assert one.code == three.code == 0, one.said + three.said
    assert {len(rows) for _, _, rows in one.steps} == {1, 2}
    require_same_curve(three.steps, one.steps)
    require_same_weights(tmp_path / "draft-3", tmp_path / "draft-0")


def test_packed_rows_train_the_same_on_several_processes(begin: Start, tmp_path: Path) -> None:
    """Slots for one process or two of three, under a target that all of them must ask."""
    recipe = {"optim__packing": True, "optim__tokens_per_batch": 64, "optim__num_steps": 8}
    runs = [begin(tmp_path / "draft-0", 0, recipe=recipe)]
    runs += [begin(tmp_path / "draft-3", 3, recipe=recipe, sharded_target=True)]
    one, three = (run.wait() for run in runs)
    assert one.code == three.code == 0, one.said + three.said
    assert max(len(rows) for _, _, rows in one.steps) > 2
    require_same_curve(three.steps, one.steps)
    require_same_weights(tmp_path / "draft-3", tmp_path / "draft-0")


def test_every_family_one_after_the_other(
    begin: Start, target: TargetFacts, tmp_path: Path
) -> None:
    """Also: a process may train again and again."""
    data = make_data(tmp_path / "data", target)
    rows = (data / "rows.jsonl").read_text().replace(" 63,", " 62,").replace(" 63]", " 62]")
    (data / "rows.jsonl").write_text(rows.replace("[63,", "[62,"))  # 63 is the mask
    record = json.loads((data / "data.json").read_text())
    record["rows_sha256"] = sha256_file(data / "rows.jsonl")
    (data / "data.json").write_text(json.dumps(record))
    recipes: list[dict[str, Any]] = [
        {"family": "medusa", "draft__aux_layer_ids": None},
        {"family": "draft_model", "draft__aux_layer_ids": None, "draft__num_layers": 2},
        {"family": "dflash", "draft__mask_token_id": 63},
        {"draft__mask_token_id": 63, "draft__parallel": True},
    ]
    recipes = [{**recipe, "optim__num_steps": 4} for recipe in recipes]
    runs = [begin(tmp_path / f"d{n}", n, data=str(data), recipes=recipes) for n in (0, 2)]
    one, two = (run.wait() for run in runs)
    assert one.code == two.code == 0, one.said + two.said
    assert len(one.steps) == 4 * len(recipes)
    require_same_curve(two.steps, one.steps)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_a_run_goes_on_with_another_number_of_processes(
    begin: Start, alone: tuple[Path, Ended], tmp_path: Path, before: int, after: int
) -> None:
    """Killed after step 10 in mid-epoch; the rest is as if nothing had happened."""
    out = tmp_path / "draft"
    stopped = begin(out, before, pause_s=0.1)
    wait_for(lambda: len(read_steps(stopped.log)) >= 12)
    stopped.kill(rank=1 if before else 0)
    ended = stopped.wait()
    assert ended.code != 0
    if before:
        assert "was killed (SIGKILL)" in ended.said
        assert_one_message(ended.said)
    assert out.with_name("draft.checkpoint").is_dir()
    assert not out.exists()
    went_on = begin(out, after, resume=True).wait()
    assert went_on.code == 0, went_on.said
    assert went_on.steps[0][0] == 11
    require_same_curve(went_on.steps, alone[1].steps[10:])
    require_same_weights(out, alone[0])


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.05)


def assert_one_message(said: str) -> None:
    assert "Traceback" not in said
    assert said.count("paceline: ") == 1, said
    assert "internal fault" not in said


def test_resumed_on_as_many_processes_it_is_bit_equal(
    begin: Start, pair: tuple[Path, Ended], tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    cut = begin(out, 2, pause_s=0.1)
    wait_for(lambda: len(read_steps(cut.log)) >= 11)
    cut.kill(rank=1)
    assert cut.wait().code != 0
    went_on = begin(out, 2, resume=True).wait()
    assert went_on.code == 0, went_on.said
    assert went_on.steps == pair[1].steps[10:]
    one, other = (load_draft_tensors(read_draft(path)) for path in (pair[0], out))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_process_ends_all_with_its_message(
    begin: Start, tmp_path: Path, rank: int
) -> None:
    ended = begin(tmp_path / "draft", 2, rank=rank, at=2, fault="error").wait()
    assert ended.code == 2
    assert "rows.jsonl:7:" in ended.said
    assert "the disk gave other rows. Look at it." in ended.said
    assert ("process 1 of 2: " in ended.said) == (rank == 1)
    assert_one_message(ended.said)
    assert not (tmp_path / "draft").exists()


def test_an_error_that_all_meet_is_told_once(begin: Start, tmp_path: Path) -> None:
    recipe = {"optim__lr": 1e30, "optim__warmup_steps": 0, "optim__schedule": "constant"}
    ended = begin(tmp_path / "draft", 2, recipe=recipe).wait()
    assert ended.code == 2
    assert "training broke at step" in ended.said
    assert "process" not in ended.said
    assert_one_message(ended.said)


def test_ctrl_c_keeps_the_step_that_all_finished(
    begin: Start, alone: tuple[Path, Ended], tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    run = begin(out, 2, pause_s=0.1)
    wait_for(lambda: len(read_steps(run.log)) >= 3)
    run.process.send_signal(signal.SIGINT)
    ended = run.wait()
    assert ended.code == 130
    assert "Traceback" not in ended.said
    meta = json.loads((out.with_name("draft.checkpoint") / "meta.json").read_text())
    assert meta["step"] == ended.steps[-1][0]
    went_on = begin(out, 0, resume=True).wait()
    require_same_curve(ended.steps + went_on.steps, alone[1].steps)


def test_two_machines_meet(
    begin: Start, target: TargetFacts, alone: tuple[Path, Ended], tmp_path: Path
) -> None:
    """Two launchers with one process each; then the second has other rows."""
    meet = free_port()
    words = ("--machines", "2", "--meet-at", meet)
    runs = [begin(tmp_path / "draft", 1, words=words) for _ in range(2)]
    both = [run.wait() for run in runs]
    assert [ended.code for ended in both] == [0, 0], both
    require_same_curve(max((e.steps for e in both), key=len), alone[1].steps)
    other = tmp_path / "data"
    shutil.copytree(make_data(tmp_path / "more", target, num_rows=21), other)
    words = ("--machines", "2", "--meet-at", free_port())
    runs = [
        begin(tmp_path / "two", 1, words=words),
        begin(tmp_path / "two", 1, words=words, data=str(other)),
    ]
    both = [run.wait() for run in runs]
    assert [ended.code for ended in both] == [2, 2], both
    said = both[0].said + both[1].said
    assert "process 1 has another data than process 0" in said
    assert_one_message(said)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
