"""The queue: one row an entry, changed only inside transactions that a kill leaves undone.

States: queued -> running (leased) -> done, or refused (not acceptable), or failed (could not be
measured). A lease that is not renewed runs out, and the entry goes to another worker. Every change
of a running entry names its lease's token, so a worker that was thought dead changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.errors import DraftError, ResultError
from paceline.judge.staging import Staged
from paceline.judge.tables import Queue, begin, entries, ledger, now, settings, teams

__all__ = [
    "STATES",
    "Claim",
    "Entry",
    "add_entry",
    "claim_entry",
    "finish_entry",
    "list_entries",
    "pin_setting",
    "read_ledger",
    "release_entry",
    "renew_lease",
]

BuildLine = Callable[[int, str], str]
STATES = ("queued", "running", "done", "refused", "failed")
_LEDGER_LOCK = "ledger"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One draft of one team. round: how often it was queued again after it had failed."""

    entry_id: int
    team: str
    name: str
    family: str
    source: str
    content_sha256: str
    files_sha256: str
    state: str
    reason: str
    round: int
    attempts: int
    takeovers: int
    worker: str
    is_final: bool
    added_at: float
    finished_at: float | None
    lease_until: float | None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An entry that is this worker's while its lease lasts."""

    entry: Entry
    token: str


def pin_setting(queue: Queue, name: str, value: str, *, what: str) -> None:
    """Records a setting once; every later worker must have the same. Raises ResultError."""
    with begin(queue) as connection:
        _insert_if_absent(connection, settings, {"name": name, "value": value})
        found = connection.scalar(sa.select(settings.c.value).where(settings.c.name == name))
    if found != value:
        raise ResultError(
            f"this queue was begun with other {what}",
            where=queue.shown,
            fix=f"Use the {what} it began with, or begin a new queue.",
        )


def add_entry(
    queue: Queue,
    staged: Staged,
    *,
    team: str,
    source: str,
    max_entries: int | None = None,
    build_final_line: BuildLine | None = None,
) -> tuple[Entry, bool]:
    """(entry, whether it is new). The same draft again by the same team changes nothing.

    max_entries: quota of a team, None for none; refused drafts count. build_final_line: makes the
    ledger's line for a final submission, None when it is not the final one. Raises DraftError for
    a draft that another team entered, a team over its quota, or a second final submission.
    """
    with begin(queue) as connection:
        _insert_if_absent(connection, teams, {"team": team, "final_entry_id": None})
        # one add a team at a time: the count below stays true until the row is in
        final_id = connection.scalar(
            sa.select(teams.c.final_entry_id).where(teams.c.team == team).with_for_update()
        )
        row = {
            "team": team,
            "name": staged.name,
            "family": staged.family,
            "source": source,
            "content_sha256": staged.content_sha256,
            "files_sha256": staged.files_sha256,
            "state": "queued",
            "added_at": now(connection),
        }
        own = sa.select(sa.func.count()).select_from(entries).where(entries.c.team == team)
        known = _find(connection, staged.content_sha256)
        if known is None and max_entries is not None:
            num_own = connection.scalar(own) or 0
            if num_own >= max_entries:
                raise DraftError(
                    f"team '{team}' has used its {max_entries} submissions",
                    expected=f"at most {max_entries} a team, as the rules say",
                )
        is_new = known is None and _insert_if_absent(connection, entries, row)
        entry = _find(connection, staged.content_sha256)
        assert entry is not None
        if entry.team != team:
            raise DraftError(
                "the same weights and settings are in the queue under another team's name",
                where=f"content {staged.content_sha256[:12]}",
                expected="each draft once; a new name in metadata.json does not make a new draft",
            )
        if build_final_line is not None:
            _make_final(connection, entry, final_id, build_final_line)
        if entry.state == "failed":  # our fault or the machine's, not the draft's: once more
            connection.execute(
                sa.update(entries)
                .where(entries.c.id == entry.entry_id, entries.c.state == "failed")
                .values(state="queued", reason="", attempts=0, round=entry.round + 1)
            )
        found = _find(connection, staged.content_sha256)
        assert found is not None
        return found, is_new


def _make_final(
    connection: sa.Connection, entry: Entry, final_id: int | None, build: BuildLine
) -> None:
    if final_id == entry.entry_id:
        return
    if final_id is not None:
        raise DraftError(
            f"team '{entry.team}' has made its final submission: entry {final_id}",
            expected="one final submission a team",
        )
    connection.execute(
        sa.update(teams).where(teams.c.team == entry.team).values(final_entry_id=entry.entry_id)
    )
    _append_line(connection, entry, kind="final", build=build)


def _insert_if_absent(connection: sa.Connection, table: sa.Table, row: dict[str, Any]) -> bool:
    insert: Any
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as insert
    else:
        from sqlalchemy.dialects.sqlite import insert as insert
    done = connection.execute(insert(table).values(row).on_conflict_do_nothing())
    return bool(done.rowcount == 1)


def _select() -> sa.Select[Any]:
    return sa.select(entries, teams.c.final_entry_id).join(
        teams, teams.c.team == entries.c.team, isouter=True
    )


def _read(row: Any) -> Entry:
    own = dict(row._mapping)
    final_id, own_id = own.pop("final_entry_id"), own.pop("id")
    own.pop("lease_token")
    return Entry(entry_id=own_id, is_final=final_id == own_id, **own)


def _find(connection: sa.Connection, content_sha256: str) -> Entry | None:
    row = connection.execute(_select().where(entries.c.content_sha256 == content_sha256)).first()
    return None if row is None else _read(row)


def list_entries(queue: Queue) -> list[Entry]:
    """All entries in the order they came."""
    with begin(queue) as connection:
        return [_read(row) for row in connection.execute(_select().order_by(entries.c.id))]


def claim_entry(
    queue: Queue, *, worker: str, lease_s: float, may_start: Callable[[Entry], bool]
) -> Claim | None:
    """Takes the first entry that waits, or whose worker was silent for its lease; None without.

    may_start: asked before an entry is taken; False leaves it for later. Entries that failed or
    whose workers died come later, so that one of them cannot hold up the others.
    """
    with begin(queue) as connection:
        moment = now(connection)
        waiting = entries.c.state == "queued"
        silent = (entries.c.state == "running") & (entries.c.lease_until < moment)
        rows = connection.execute(
            _select()
            .where(waiting | silent)
            .order_by(entries.c.takeovers + entries.c.attempts, entries.c.id)
        ).all()
    for row in rows:
        entry = _read(row)
        if not may_start(entry):
            continue
        token = secrets.token_hex(16)
        is_takeover = entry.state == "running"
        with begin(queue) as connection:
            done = connection.execute(
                sa.update(entries)
                .where(
                    entries.c.id == entry.entry_id,
                    entries.c.state == entry.state,
                    # whoever was faster has put another token there
                    entries.c.lease_token.is_not_distinct_from(row._mapping["lease_token"]),
                    entries.c.lease_until.is_not_distinct_from(entry.lease_until),
                )
                .values(
                    state="running",
                    worker=worker,
                    lease_token=token,
                    lease_until=now(connection) + lease_s,
                    takeovers=entry.takeovers + int(is_takeover),
                )
            )
        if done.rowcount == 1:
            return Claim(entry=entry, token=token)
    return None


def renew_lease(queue: Queue, claim: Claim, *, lease_s: float) -> bool:
    """Whether the entry is still this worker's; its lease then lasts `lease_s` from now."""
    with begin(queue) as connection:
        done = connection.execute(
            sa.update(entries)
            .where(entries.c.id == claim.entry.entry_id, entries.c.lease_token == claim.token)
            .values(lease_until=now(connection) + lease_s)
        )
    return bool(done.rowcount == 1)


def release_entry(queue: Queue, claim: Claim, *, failed_attempt: bool) -> None:
    """Puts an entry back; a failed attempt is counted, being stopped is not."""
    with begin(queue) as connection:
        connection.execute(
            sa.update(entries)
            .where(entries.c.id == claim.entry.entry_id, entries.c.lease_token == claim.token)
            .values(
                state="queued",
                lease_token=None,
                lease_until=None,
                attempts=entries.c.attempts + int(failed_attempt),
            )
        )


def finish_entry(
    queue: Queue,
    claim: Claim,
    *,
    state: str,
    reason: str,
    build_line: BuildLine,
) -> bool:
    """The entry's end and its line in the ledger, in one transaction; False when it is not ours.

    build_line: (number of the line, the line before it or "") -> the line.
    """
    with begin(queue) as connection:
        done = connection.execute(
            sa.update(entries)
            .where(entries.c.id == claim.entry.entry_id, entries.c.lease_token == claim.token)
            .values(
                state=state,
                reason=reason,
                lease_token=None,
                lease_until=None,
                finished_at=now(connection),
            )
        )
        if done.rowcount != 1:
            return False
        _append_line(connection, claim.entry, kind="result", build=build_line)
    return True


def _append_line(connection: sa.Connection, entry: Entry, *, kind: str, build: BuildLine) -> None:
    _insert_if_absent(connection, settings, {"name": _LEDGER_LOCK, "value": ""})
    connection.execute(  # PostgreSQL: one writer of the ledger at a time
        sa.select(settings.c.name).where(settings.c.name == _LEDGER_LOCK).with_for_update()
    )
    last = connection.execute(
        sa.select(ledger.c.seq, ledger.c.line).order_by(ledger.c.seq.desc()).limit(1)
    ).first()
    seq, before = (last.seq + 1, last.line) if last else (0, "")
    row = {"seq": seq, "content_sha256": entry.content_sha256, "kind": kind, "round": entry.round}
    connection.execute(sa.insert(ledger).values(**row, line=build(seq, before)))


def read_ledger(queue: Queue) -> list[str]:
    """The ledger's lines in order."""
    with begin(queue) as connection:
        return list(connection.scalars(sa.select(ledger.c.line).order_by(ledger.c.seq)))
