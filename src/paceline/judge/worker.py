"""A worker: takes entries one at a time, measures them, and writes down what came out.

Every step can be cut short by a kill and done again: a run goes on where it stopped, a sealed
result is a folder renamed into place, and an entry ends in one transaction with its ledger line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.errors import (
    DataError,
    DraftError,
    EngineError,
    MissingExtraError,
    RulesError,
    StorageError,
    TargetError,
)
from paceline.judge.home import Home, clear_old_copies, hold_device, try_lock
from paceline.judge.ledger import build_line, export_lines, read_key
from paceline.judge.publish import publish_entry, read_verdict
from paceline.judge.queue import (
    Claim,
    Entry,
    claim_entry,
    finish_entry,
    list_entries,
    read_ledger,
    release_entry,
    renew_lease,
)
from paceline.judge.screen import Screen, screen_error
from paceline.judge.staging import require_unchanged
from paceline.judge.tables import Queue
from paceline.records import sha256_file, write_json
from paceline.rules import Rules
from paceline.validate import Report, validate_draft

if TYPE_CHECKING:
    from paceline.target import TargetFacts

__all__ = ["PARTS", "Court", "Task", "run_worker", "tidy_up"]

PARTS = ("hidden", "shuffled", "twin")
_MAX_ATTEMPTS = 3
_MAX_FAILED_IN_A_ROW = 3  # different entries: then it is the machine
# not the draft's doing: the worker stops, the entry waits
_OURS = (DataError, MissingExtraError, RulesError, StorageError, TargetError)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run to make: writes run_dir/result.json and requests.jsonl, goes on where it stopped.

    part: "hidden" prompts; the same "shuffled"; or their public "twin" set.
    """

    draft_dir: Path
    run_dir: Path
    part: str


@dataclass(frozen=True, kw_only=True)
class Court:
    """What a worker works with. measure: makes one run, in a sandbox, on `devices`.

    boot: adds what a first start on public prompts shows to the report of a draft; None for none.
    parts: which runs an entry gets, "hidden" first. say: told which entry is where, never more.
    """

    home: Home
    queue: Queue
    rules: Rules
    target: TargetFacts | None
    screen: Screen
    measure: Callable[[Task], None]
    boot: Callable[[Report, Path], Report] | None = None
    parts: tuple[str, ...] = ("hidden",)
    devices: tuple[str, ...] = ("cpu",)
    lease_s: float = 60.0
    max_attempts: int = _MAX_ATTEMPTS
    say: Callable[[str], None] = field(default=lambda _: None)


class _Refused(Exception):
    """The draft is not acceptable; its text holds names of rules only."""


def run_worker(court: Court, *, max_entries: int | None = None, wait: bool = False) -> int:
    """Measures what waits, one entry after another; returns how many came to an end.

    wait: stay for entries that other workers hold or that come later. Raises PlanError when the
    device is taken, EngineError when three entries in a row could not be measured, and any error
    that is not the draft's (a full disk, a wrong prompt file).
    """
    num_done = 0
    failed: set[int] = set()
    worker = f"{socket.gethostname()}:{os.getpid()}:{'+'.join(court.devices)}"
    with contextlib.ExitStack() as stack:
        for device in court.devices:
            stack.enter_context(hold_device(court.home, device))
        tidy_up(court.home, court.queue)
        while max_entries is None or num_done < max_entries:
            locks: dict[int, IO[str]] = {}
            try:
                claim = claim_entry(
                    court.queue,
                    worker=worker,
                    lease_s=court.lease_s,
                    may_start=partial(_lock, court.home, locks),
                )
                if claim is not None:
                    has_ended, has_failed = _judge(court, claim)
                    num_done += has_ended
                    failed = failed | {claim.entry.entry_id} if has_failed else set()
                    if len(failed) >= _MAX_FAILED_IN_A_ROW:
                        raise EngineError(
                            f"entries {', '.join(map(str, sorted(failed)))} could not be measured,"
                            " one after the other",
                            where=worker,
                            fix="Look at this machine first; then run the same command again.",
                        )
                elif not wait and not _is_busy(court.queue):
                    break
                else:
                    time.sleep(min(1.0, court.lease_s / 4))
            finally:
                for lock in locks.values():
                    lock.close()
    return num_done


def _lock(home: Home, locks: dict[int, IO[str]], entry: Entry) -> bool:
    """Whether nobody on this storage works on the entry, not even somebody thought dead."""
    lock = try_lock(home, f"entry-{entry.content_sha256}")
    if lock is not None:
        locks[entry.entry_id] = lock
    return lock is not None


def _is_busy(queue: Queue) -> bool:
    return any(entry.state in ("queued", "running") for entry in list_entries(queue))


def tidy_up(home: Home, queue: Queue) -> None:
    """What a killed worker may have left: lines not yet in the ledger's file, raw runs."""
    export_lines(home.ledger_path, read_ledger(queue))
    clear_old_copies(home)
    for entry in list_entries(queue):
        if entry.state in ("done", "refused", "failed"):
            home.clear_work_dir(entry.content_sha256)


@contextlib.contextmanager
def _keep_lease(court: Court, claim: Claim) -> Iterator[None]:
    """Renews the lease beside the work; a database that is away for a moment is asked again."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(court.lease_s / 4):
            with contextlib.suppress(StorageError):
                if not renew_lease(court.queue, claim, lease_s=court.lease_s):
                    return

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _judge(court: Court, claim: Claim) -> tuple[bool, bool]:
    """(the entry came to an end here, its measuring failed). All errors leave here screened."""
    entry = claim.entry
    label = f"entry {entry.entry_id}"
    state, reason = "done", ""
    with _keep_lease(court, claim):
        try:
            _measure(court, entry)
        except KeyboardInterrupt:
            release_entry(court.queue, claim, failed_attempt=False)
            raise
        except _Refused as problem:
            state, reason = "refused", str(problem)
        except _OURS as problem:
            release_entry(court.queue, claim, failed_attempt=False)
            raise type(problem)(screen_error(court.screen, problem)) from None
        except (Exception, SystemExit) as problem:
            reason = screen_error(court.screen, problem)
            if entry.attempts + 1 < court.max_attempts:
                release_entry(court.queue, claim, failed_attempt=True)
                court.say(f"{label}: attempt {entry.attempts + 1} failed: {reason}")
                return False, True
            state = "failed"
        key = read_key(court.home.key_path, create=True)
        body = _build_body(court, entry, state, reason)
        ended = finish_entry(
            court.queue,
            claim,
            state=state,
            reason=reason,
            build_line=lambda seq, before: build_line(key, body, seq=seq, before=before),
        )
    if not ended:
        court.say(f"{label}: its lease was lost; another worker ends it")
        return False, False
    export_lines(court.home.ledger_path, read_ledger(court.queue))
    court.home.clear_work_dir(entry.content_sha256)
    court.say(f"{label}: {state}" + (f": {reason}" if reason else ""))
    return True, state == "failed"


def _measure(court: Court, entry: Entry) -> None:
    """Everything from the staged draft to the sealed result folder; what is there is kept."""
    home = court.home
    if (home.result_dir(entry.content_sha256) / "result.json").exists():
        return  # measured and sealed before a kill
    draft_dir = home.drafts_dir / entry.files_sha256
    court.say(f"entry {entry.entry_id}: checking")
    _check(court, entry, draft_dir)
    work = home.make_work_dir(entry.content_sha256)
    for part in court.parts:
        done = work / f"{part}.done.json"
        if done.exists():
            continue
        court.say(f"entry {entry.entry_id}: measuring on the {part} prompts")
        court.measure(Task(draft_dir=draft_dir, run_dir=work / part, part=part))
        _check_hashes(entry, draft_dir)  # what was measured is what was entered
        write_json(done, {"result_sha256": sha256_file(work / part / "result.json")})
    key = read_key(home.key_path, create=True)
    publish_entry(
        home,
        entry.content_sha256,
        parts=court.parts,
        rules=court.rules,
        screen=court.screen,
        key=key,
    )


def _check(court: Court, entry: Entry, draft_dir: Path) -> None:
    _check_hashes(entry, draft_dir)
    report = validate_draft(draft_dir, target=court.target, limits=court.rules.limits, deep=True)
    if court.boot is not None and report.verdict != "fail":
        court.say(f"entry {entry.entry_id}: booting")
        report = court.boot(report, draft_dir)
    if report.verdict == "fail":
        broken = sorted({item.rule for item in report.findings if item.severity == "error"})
        raise _Refused(f"not acceptable: {', '.join(broken)}")


def _check_hashes(entry: Entry, draft_dir: Path) -> None:
    try:
        require_unchanged(
            draft_dir, files_sha256=entry.files_sha256, content_sha256=entry.content_sha256
        )
    except DraftError as problem:
        raise _Refused(problem.what) from None


def _build_body(court: Court, entry: Entry, state: str, reason: str) -> dict[str, Any]:
    """What the ledger says of an entry's end."""
    body: dict[str, Any] = {
        "kind": "result",
        "team": entry.team,
        "name": entry.name,
        "family": entry.family,
        "source": entry.source,
        "content_sha256": entry.content_sha256,
        "files_sha256": entry.files_sha256,
        "round": entry.round,
        "state": state,
        "reason": reason,
        "rules": {"name": court.rules.name, "sha256": court.rules.sha256},
        "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return body | (read_verdict(court.home, entry.content_sha256) if state == "done" else {})
