"""A worker from the submission to the public folder, with scripted engines."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import build_draft
from judge_process import CANARY, PROMPTS, RULES, add_draft, build_court, measure

from paceline.errors import (
    DataError,
    DraftError,
    EngineError,
    PlanError,
    ResultError,
    StorageError,
)
from paceline.eval import score_run
from paceline.judge import (
    Court,
    Home,
    Task,
    list_entries,
    publish_results,
    read_ledger,
    run_worker,
    submit_draft,
    verify_results,
)
from paceline.judge.home import hold_device
from paceline.judge.queue import claim_entry
from paceline.judge.staging import hash_files


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def court(tmp_path: Path, said: list[str]) -> Court:
    return build_court(tmp_path / "judge", say=said.append)


def enter(court: Court, tmp_path: Path, number: int = 1, team: str = "one") -> Any:
    entry, _ = add_draft(
        court, tmp_path / f"draft-{number}", team=team, name=f"draft {number}", seed=number
    )
    return entry


def read_bodies(court: Court) -> list[dict[str, Any]]:
    return [json.loads(line)["body"] for line in read_ledger(court.queue)]


def require_nothing_hidden(folder: Path, *texts: str) -> None:
    """No file, file name or text holds the canary, as letters or as token ids."""
    ids = json.dumps(list(PROMPTS[0].encode()))
    for path in [folder, *folder.rglob("*")]:
        assert CANARY.lower() not in path.name.lower()
        if path.is_file():
            data = path.read_bytes()
            assert CANARY.lower().encode() not in data.lower(), path
            assert ids.encode() not in data, path
    for text in texts:
        assert CANARY.lower() not in text.lower()


def test_from_submission_to_the_public_folder(
    court: Court, tmp_path: Path, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    court = replace(court, parts=("hidden", "shuffled", "twin"))
    entry = enter(court, tmp_path)
    assert run_worker(court) == 1
    (body,) = read_bodies(court)
    assert (body["team"], body["state"], body["source"]) == ("one", "done", "draft-1")
    assert body["score"]["ranked"] is True
    assert body["withheld"] == []
    assert body["orders"]["same"] is True
    assert body["twin"]["gap"] == pytest.approx(1.0)
    assert all(record["kept"] for record in body["conduct"])
    own = court.home.result_dir(entry.content_sha256)
    assert score_run(own)["score"]["value"] == body["score"]["value"]  # by anybody, from the file
    assert not court.home.work_dir(entry.content_sha256).exists()
    private = court.home.private_dir(entry.content_sha256)
    assert {path.name for path in private.iterdir()} == {
        "hidden.jsonl",
        "shuffled.jsonl",
        "twin.jsonl",
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in private.iterdir())
    assert publish_results(court.home, read_ledger(court.queue), tmp_path / "public") == 1
    found = verify_results(tmp_path / "public", key_path=court.home.key_path)
    assert found == {"num_lines": 1, "num_results": 1, "signatures": "checked"}
    require_nothing_hidden(court.home.path, *said, *capfd.readouterr())
    require_nothing_hidden(tmp_path / "public")


def test_request_names_are_pseudonyms_of_this_judge(court: Court, tmp_path: Path) -> None:
    court = replace(court, parts=("hidden", "shuffled"))
    entry = enter(court, tmp_path)
    run_worker(court)
    result = json.loads((court.home.result_dir(entry.content_sha256) / "result.json").read_text())
    names = [request["id"] for request in result["arms"]["candidate"]["requests"]]
    assert len(set(names)) == len(PROMPTS)
    assert all(name.startswith("hidden-") and len(name) == 19 for name in names)
    assert result["samples"] == []
    assert result["fidelity"]["candidate"]["cases"] == []
    assert result["provenance"]["command"] == ["paceline", "judge", "run"]


def failing(kind: type[BaseException], *, in_log: bool = True) -> Any:
    def measure_badly(task: Task) -> None:
        task.run_dir.mkdir(parents=True, exist_ok=True)
        if in_log:
            (task.run_dir / "engine-candidate.log").write_text(f"died on {PROMPTS[0]}")
            (task.run_dir / "requests.jsonl").write_text(json.dumps({"error": PROMPTS[1]}))
        raise kind(f"the engine died while answering '{PROMPTS[0]}'; ids {[*PROMPTS[0].encode()]}")

    return measure_badly


@pytest.mark.parametrize("kind", [EngineError, ResultError, RuntimeError, KeyError, SystemExit])
def test_a_failing_draft_ends_failed_and_quotes_nothing(
    court: Court,
    tmp_path: Path,
    said: list[str],
    capfd: pytest.CaptureFixture[str],
    kind: type[BaseException],
) -> None:
    court = replace(court, measure=failing(kind), max_attempts=2)
    enter(court, tmp_path)
    assert run_worker(court) == 1
    (body,) = read_bodies(court)
    assert body["state"] == "failed"
    assert len([text for text in said if "attempt 1 failed" in text]) == 1
    if kind is EngineError:
        assert body["reason"].startswith("the engine died while answering '[withheld]'")
    require_nothing_hidden(court.home.path, *said, *capfd.readouterr(), body["reason"])
    publish_results(court.home, read_ledger(court.queue), tmp_path / "public")
    require_nothing_hidden(tmp_path / "public")


@pytest.mark.parametrize("kind", [DataError, StorageError])
def test_our_own_trouble_stops_the_worker_and_costs_the_entry_nothing(
    court: Court, tmp_path: Path, kind: type[Exception]
) -> None:
    enter(court, tmp_path)
    with pytest.raises(kind) as caught:
        run_worker(replace(court, measure=failing(kind)))
    assert CANARY not in str(caught.value)
    assert caught.value.__suppress_context__  # a kept trace prints no cause either
    (entry,) = list_entries(court.queue)
    assert (entry.state, entry.attempts) == ("queued", 0)
    run_worker(replace(court, measure=clearing_measure))
    assert read_bodies(court)[0]["state"] == "done"


def clearing_measure(task: Task) -> None:
    shutil.rmtree(task.run_dir, ignore_errors=True)
    measure(task)


def test_ctrl_c_puts_the_entry_back(court: Court, tmp_path: Path) -> None:
    enter(court, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_worker(replace(court, measure=failing(KeyboardInterrupt, in_log=False)))
    (entry,) = list_entries(court.queue)
    assert (entry.state, entry.attempts) == ("queued", 0)


def test_a_changed_draft_is_not_run(court: Court, tmp_path: Path) -> None:
    entry = enter(court, tmp_path)
    staged = court.home.drafts_dir / entry.files_sha256
    record = json.loads((staged / "metadata.json").read_text())
    (staged / "metadata.json").write_text(json.dumps({**record, "note": "swapped"}))

    def never(task: Task) -> None:
        raise AssertionError("a changed draft was measured")

    run_worker(replace(court, measure=never))
    (body,) = read_bodies(court)
    assert body["state"] == "refused"
    assert "changed after it was entered" in body["reason"]


def test_a_draft_changed_during_its_run_is_refused(court: Court, tmp_path: Path) -> None:
    entry = enter(court, tmp_path)
    weights = court.home.drafts_dir / entry.files_sha256 / "model.safetensors"

    def swap(task: Task) -> None:
        measure(task)
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(bytes(data))

    run_worker(replace(court, measure=swap))
    (body,) = read_bodies(court)
    assert (body["state"], "score" in body) == ("refused", False)


def test_a_draft_for_another_target_is_refused_with_rule_names(
    court: Court, tmp_path: Path
) -> None:
    folder = build_draft(tmp_path / "other", config={"hidden_size": 32, "head_dim": 8})
    submit_draft(str(folder), team="x", home=court.home, queue=court.queue, rules=RULES, fetch=Path)
    run_worker(court)
    (body,) = read_bodies(court)
    assert body["state"] == "refused"
    assert "cfg.hidden" in body["reason"]


def test_a_draft_that_does_not_boot_is_refused_before_it_is_measured(
    court: Court, tmp_path: Path
) -> None:
    from paceline.validate.report import Finding, Report, build_report

    def boot(report: Report, folder: Path) -> Report:
        assert (folder / "spec.json").exists()
        words = dict.fromkeys(("file", "where", "found", "expected", "fix"), "")
        found = Finding(rule="run.boot", severity="error", message="died", **words)
        return build_report([*report.findings, found])

    def never(task: Task) -> None:
        raise AssertionError("a draft that does not boot was measured")

    enter(court, tmp_path)
    run_worker(replace(court, boot=boot, measure=never))
    (body,) = read_bodies(court)
    assert (body["state"], body["reason"]) == ("refused", "not acceptable: run.boot")


def test_what_cannot_be_accepted_never_enters_the_queue(court: Court, tmp_path: Path) -> None:
    folder = build_draft(tmp_path / "bad")
    (folder / "run_me.py").write_text("print('hello')")
    with pytest.raises(DraftError, match="paceline validate"):
        enter_folder(court, folder)
    big = build_draft(tmp_path / "big")
    with open(big / "model.safetensors", "ab") as file:
        file.truncate(RULES.limits.max_files_bytes + 1)
    with pytest.raises(DraftError, match="too large"):
        enter_folder(court, big)
    linked = build_draft(tmp_path / "linked")
    (linked / "metadata.json").unlink()
    (linked / "metadata.json").symlink_to("/etc/passwd")
    with pytest.raises(DraftError, match="is a link"):
        enter_folder(court, linked)
    for name in ("fifo", "folder"):
        odd = build_draft(tmp_path / f"odd-{name}")
        if name == "fifo":
            os.mkfifo(odd / "extra.json")
        else:
            (odd / "inner").mkdir()
        with pytest.raises(DraftError, match="is not a regular file"):
            enter_folder(court, odd)
    for team in ("", " x", "../up", "a" * 65, "tab\t"):
        with pytest.raises(DraftError, match="is not a team name"):
            enter_folder(court, build_draft(tmp_path / f"t{len(team)}"), team=team)
        shutil.rmtree(tmp_path / f"t{len(team)}")
    assert list_entries(court.queue) == []
    assert not [path for path in court.home.drafts_dir.iterdir() if path.name.startswith(".")]


def enter_folder(court: Court, folder: Path, team: str = "one") -> Any:
    return submit_draft(
        str(folder), team=team, home=court.home, queue=court.queue, rules=RULES, fetch=Path
    )


def test_another_name_layout_or_split_is_the_same_draft(court: Court, tmp_path: Path) -> None:
    first, _ = enter_folder(court, build_draft(tmp_path / "a", metadata={"name": "a"}))
    again = build_draft(tmp_path / "b", metadata={"name": "b", "team": "other"})
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert hash_files(again) != first.files_sha256
    entry, is_new = enter_folder(court, again)
    assert (entry.entry_id, is_new) == (first.entry_id, False)
    with pytest.raises(DraftError, match="under another team's name"):
        enter_folder(court, again, team="two")
    other = build_draft(tmp_path / "c", config={"rms_norm_eps": 2e-5}, metadata={"name": "a"})
    assert enter_folder(court, other)[1]


def test_one_worker_a_device(court: Court, tmp_path: Path) -> None:
    enter(court, tmp_path)
    with hold_device(court.home, "cpu"):
        with pytest.raises(PlanError, match="another worker of this judge measures on device"):
            run_worker(court)
        assert run_worker(replace(court, devices=("cuda:1", "cuda:2"))) == 1


def test_an_entry_in_somebodys_hands_is_left_alone(court: Court, tmp_path: Path) -> None:
    """A stopped worker whose lease ran out still holds the entry's lock: nobody runs beside it."""
    from paceline.judge.home import try_lock

    entry = enter(court, tmp_path)
    claim = claim_entry(court.queue, worker="stopped", lease_s=0.0, may_start=lambda _: True)
    assert claim is not None
    lock = try_lock(court.home, f"entry-{entry.content_sha256}")
    assert lock is not None
    threading.Timer(0.5, lock.close).start()

    def alone(task: Task) -> None:
        assert lock.closed, "measured beside the worker that holds the entry"
        measure(task)

    assert run_worker(replace(court, measure=alone, lease_s=0.4)) == 1
    assert read_bodies(court)[0]["state"] == "done"


def test_a_run_cut_anywhere_goes_on_and_measures_nothing_twice(
    court: Court, tmp_path: Path
) -> None:
    """The worker ends after each step in turn, as a kill would leave it; the next one goes on."""
    entry = enter(court, tmp_path)
    asked: list[str] = []

    class Killed(BaseException):
        pass

    import paceline.judge.worker as module

    steps = ["publish_entry", "finish_entry", "export_lines"]
    originals = {name: getattr(module, name) for name in steps}

    def counted(task: Task) -> None:
        asked.append(task.part)
        measure(task)

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    court = replace(court, measure=counted, lease_s=0.2)
    try:
        for name in steps:
            if name != "export_lines":  # of a finished entry: the next worker's first act
                setattr(module, name, killed)
                with pytest.raises(Killed):
                    run_worker(court)
                setattr(module, name, originals[name])
    finally:
        for name, function in originals.items():
            setattr(module, name, function)
    assert run_worker(court) == 1
    assert asked == ["hidden"]
    assert len(read_bodies(court)) == 1
    assert list_entries(court.queue)[0].takeovers == 2
    assert not court.home.work_dir(entry.content_sha256).exists()


def test_a_published_result_that_was_changed_is_found(court: Court, tmp_path: Path) -> None:
    entry = enter(court, tmp_path)
    run_worker(court)
    lines = read_ledger(court.queue)
    publish_results(court.home, lines, tmp_path / "public")
    path = tmp_path / "public" / "entries" / entry.content_sha256[:16] / "result.json"
    path.write_text(path.read_text().replace('"ranked": true', '"ranked": false'))
    with pytest.raises(ResultError, match="is not the result that was signed"):
        verify_results(tmp_path / "public")
    own = court.home.result_dir(entry.content_sha256) / "result.json"
    own.write_text(own.read_text() + " ")
    with pytest.raises(ResultError, match="is not the result that was signed"):
        publish_results(court.home, lines, tmp_path / "public")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(ResultError, match="holds something else"):
        publish_results(court.home, lines, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_leftover_of_a_killed_worker_is_tidied(court: Court, tmp_path: Path) -> None:
    entry = enter(court, tmp_path)
    run_worker(court)
    raw = court.home.make_work_dir(entry.content_sha256)
    (raw / "engine.log").write_text(CANARY)
    ledger = court.home.ledger_path
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[:-30])  # the append was cut
    run_worker(court)
    assert not raw.exists()
    assert ledger.read_bytes() == whole
    assert Home(path=court.home.path).ledger_path == ledger


def test_three_entries_that_fail_in_a_row_stop_the_worker(court: Court, tmp_path: Path) -> None:
    for number in range(4):
        enter(court, tmp_path, number)
    with pytest.raises(EngineError, match="entries 1, 2, 3 could not be measured") as caught:
        run_worker(replace(court, measure=failing(EngineError)))
    assert CANARY not in str(caught.value)
    assert [(e.state, e.attempts) for e in list_entries(court.queue)] == [
        ("queued", 1),
        ("queued", 1),
        ("queued", 1),
        ("queued", 0),
    ]
    assert run_worker(replace(court, measure=clearing_measure)) == 4


def test_ids_that_look_like_code_are_no_keys_of_a_sealed_result(tmp_path: Path) -> None:
    from paceline.judge.screen import build_screen
    from paceline.judge.seal import seal_result

    secret = "CANARY7f3a"  # as an id it could be a name in a program
    result = {
        "arms": {"candidate": {"requests": [{"id": secret, "failure": f"on {secret}"}]}},
        "by_prompt": {secret: {"slow": True}, "two words": 1},
        "notes": [f"prompt {secret} was slow", secret],
        "new_field": {"token_ids": [1, 2], "plain_token": "x", "deep": [{"text": secret}]},
        "provenance": {"command": ["paceline", secret], "python": "3.11"},
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    sealed = seal_result(tmp_path, screen=build_screen([secret]), key=bytes(32))
    assert secret.lower() not in json.dumps(sealed).lower()
    (name,) = {e["id"] for e in sealed["arms"]["candidate"]["requests"]}
    assert sealed["arms"]["candidate"]["requests"][0]["failure"] == "the engine gave no answer"
    assert sealed["by_prompt"][name] == {"slow": True}
    assert sealed["new_field"] == {"token_ids": [], "plain_token": None, "deep": [{"text": None}]}
    assert sealed["provenance"] == {
        "python": "3.11",
        "command": ["paceline", "judge", "run"],
        "inputs": {},
    }


def test_copies_on_their_way_in_are_left_until_they_are_old(court: Court, tmp_path: Path) -> None:
    enter(court, tmp_path)
    fresh, old = (court.home.drafts_dir / f".incoming-{name}" for name in ("fresh", "old"))
    for folder in (fresh, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    # one that ends while it is looked at: found by its name, gone when its age is asked for
    (court.home.drafts_dir / ".incoming-gone").symlink_to(tmp_path / "nowhere")
    assert run_worker(court) == 1
    assert fresh.exists()
    assert not old.exists()
