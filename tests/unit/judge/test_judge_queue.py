"""The queue alone, on both databases: who gets what, when, and what a late worker may change."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from paceline.errors import DraftError, ResultError, StorageError
from paceline.judge import open_queue, pin_setting
from paceline.judge.queue import (
    Claim,
    add_entry,
    claim_entry,
    finish_entry,
    list_entries,
    read_ledger,
    release_entry,
    renew_lease,
)
from paceline.judge.staging import Staged
from paceline.judge.tables import Queue


@pytest.fixture
def queue(tmp_path: Path, queue_url: str | None) -> Queue:
    return open_queue(tmp_path, queue_url)


def stage(number: int) -> Staged:
    return Staged(
        path=Path("drafts"),
        name=f"draft {number}",
        family="eagle3",
        content_sha256=f"{number:064d}",
        files_sha256=f"{number + 500:064d}",
    )


def add(queue: Queue, number: int, team: str = "a", **words: object) -> None:
    add_entry(queue, stage(number), team=team, source="here", **words)  # type: ignore[arg-type]


def take(queue: Queue, *, lease_s: float = 60.0, worker: str = "w") -> Claim | None:
    return claim_entry(queue, worker=worker, lease_s=lease_s, may_start=lambda _: True)


def end(queue: Queue, claim: Claim, *, state: str = "done") -> bool:
    return finish_entry(
        queue,
        claim,
        state=state,
        reason="",
        build_line=lambda seq, before: f"{seq} {claim.entry.name} after '{before}'",
    )


def test_first_come_first_served_and_each_once(queue: Queue) -> None:
    for number in range(3):
        add(queue, number)
    claims = [take(queue) for _ in range(4)]
    assert [claim and claim.entry.name for claim in claims] == [
        "draft 0",
        "draft 1",
        "draft 2",
        None,
    ]
    assert {entry.state for entry in list_entries(queue)} == {"running"}
    for claim in claims[:3]:
        assert claim is not None
        assert end(queue, claim)
    assert {entry.state for entry in list_entries(queue)} == {"done"}
    assert read_ledger(queue) == [
        "0 draft 0 after ''",
        "1 draft 1 after '0 draft 0 after '''",
        "2 draft 2 after '1 draft 1 after '0 draft 0 after ''''",
    ]


def test_a_silent_worker_loses_its_entry_and_can_no_longer_end_it(queue: Queue) -> None:
    add(queue, 1)
    late = take(queue, lease_s=0.05, worker="late")
    assert late is not None
    assert take(queue) is None
    time.sleep(0.1)
    heir = take(queue, worker="heir")
    assert heir is not None
    assert not renew_lease(queue, late, lease_s=60)
    assert not end(queue, late)
    release_entry(queue, late, failed_attempt=True)
    (entry,) = list_entries(queue)
    assert (entry.state, entry.worker, entry.takeovers, entry.attempts) == ("running", "heir", 1, 0)
    assert read_ledger(queue) == []
    assert end(queue, heir)
    assert not end(queue, heir)  # ended once
    assert len(read_ledger(queue)) == 1


def test_a_renewed_lease_holds(queue: Queue) -> None:
    add(queue, 1)
    claim = take(queue, lease_s=0.3)
    assert claim is not None
    for _ in range(4):
        time.sleep(0.12)
        assert renew_lease(queue, claim, lease_s=0.3)
        assert take(queue) is None


def test_workers_at_once_never_share_an_entry(queue: Queue) -> None:
    num_entries, num_workers = 24, 6
    for number in range(num_entries):
        add(queue, number)
    taken: list[str] = []
    start = threading.Barrier(num_workers)

    def work(name: str) -> None:
        start.wait()
        while (claim := take(queue, worker=name)) is not None or any(
            entry.state == "queued" for entry in list_entries(queue)
        ):
            if claim is not None:
                taken.append(claim.entry.content_sha256)
                assert end(queue, claim)

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(stage(number).content_sha256 for number in range(num_entries))
    lines = read_ledger(queue)
    assert [int(line.split()[0]) for line in lines] == list(range(num_entries))
    assert all(line.endswith(f"after '{before}'") for before, line in zip(["", *lines], lines))  # noqa: B905


def test_one_draft_under_two_names_is_refused(queue: Queue) -> None:
    add(queue, 7, team="first")
    entry, is_new = add_entry(queue, stage(7), team="first", source="again")
    assert (is_new, entry.state) == (False, "queued")
    with pytest.raises(DraftError, match="under another team's name") as caught:
        add(queue, 7, team="second")
    assert "first" not in str(caught.value)
    assert len(list_entries(queue)) == 1


def test_quota_and_one_final_submission(queue: Queue) -> None:
    def line(seq: int, before: str) -> str:
        return f"final {seq}"

    for number in (1, 2):
        add(queue, number, max_entries=2)
    with pytest.raises(DraftError, match="team 'a' has used its 2 submissions"):
        add(queue, 3, max_entries=2)
    add(queue, 1, max_entries=2)  # known already: no new submission
    add(queue, 4, team="b", max_entries=2)
    add(queue, 2, max_entries=2, build_final_line=line)
    add(queue, 2, max_entries=2, build_final_line=line)  # said twice is said once
    with pytest.raises(DraftError, match="has made its final submission: entry 2"):
        add(queue, 1, max_entries=2, build_final_line=line)
    assert [entry.is_final for entry in list_entries(queue)] == [False, True, False]
    assert read_ledger(queue) == ["final 0"]


def test_concurrent_adds_keep_the_quota(queue: Queue) -> None:
    refused = []
    start = threading.Barrier(8)

    def enter(number: int) -> None:
        start.wait()
        try:
            add(queue, number, max_entries=3)
        except DraftError:
            refused.append(number)

    threads = [threading.Thread(target=enter, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list_entries(queue)) == 3
    assert len(refused) == 5


def test_a_failed_entry_can_be_entered_again_and_gets_a_second_line(queue: Queue) -> None:
    add(queue, 1)
    claim = take(queue)
    assert claim is not None
    assert end(queue, claim, state="failed")
    add(queue, 1)
    again = take(queue)
    assert again is not None
    assert again.entry.round == 1
    assert end(queue, again)
    assert len(read_ledger(queue)) == 2
    add(queue, 1)  # done stays done
    assert take(queue) is None


def test_failed_attempts_go_to_the_back_and_stops_are_not_counted(queue: Queue) -> None:
    for number in (1, 2):
        add(queue, number)
    first = take(queue)
    assert first is not None
    release_entry(queue, first, failed_attempt=True)
    second = take(queue)
    assert second is not None
    assert second.entry.name == "draft 2"
    release_entry(queue, second, failed_attempt=False)
    assert [(e.state, e.attempts) for e in list_entries(queue)] == [("queued", 1), ("queued", 0)]


def test_settings_are_pinned(queue: Queue) -> None:
    pin_setting(queue, "prompts", "abc", what="hidden prompts")
    pin_setting(queue, "prompts", "abc", what="hidden prompts")
    with pytest.raises(ResultError, match="begun with other hidden prompts") as caught:
        pin_setting(queue, "prompts", "xyz", what="hidden prompts")
    assert "xyz" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_an_unreachable_queue_is_one_message_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError, match="the queue cannot be used") as caught:
        open_queue(tmp_path, "postgresql://me:secret-word@127.0.0.1:1/nothing")
    assert "secret-word" not in str(caught.value)
    with pytest.raises(StorageError, match="is not the address of a queue"):
        open_queue(tmp_path, "not an address")
    (tmp_path / "queue.sqlite").write_text("this is no database, and longer than its header" * 9)
    with pytest.raises(StorageError, match="the queue cannot be used"):
        open_queue(tmp_path)
