"""The queue's tables, and the one way to open them: SQLite in a folder, PostgreSQL by URL."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from paceline.errors import MissingExtraError, StorageError
from paceline.records import storage_errors

__all__ = ["Queue", "begin", "entries", "ledger", "now", "open_queue", "settings", "teams"]

_BUSY_S = 60
_metadata = sa.MetaData()

settings = sa.Table(
    "judge_settings",
    _metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
teams = sa.Table(
    "judge_teams",
    _metadata,
    sa.Column("team", sa.String(64), primary_key=True),
    sa.Column("final_entry_id", sa.Integer),
)
entries = sa.Table(
    "judge_entries",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("team", sa.String(64), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("family", sa.String(64), nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    # what vLLM would load; the same weights under two names are one entry
    sa.Column("content_sha256", sa.String(64), nullable=False, unique=True),
    # every byte as staged; looked at again before a run
    sa.Column("files_sha256", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False, default=""),
    sa.Column("round", sa.Integer, nullable=False, default=0),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("takeovers", sa.Integer, nullable=False, default=0),
    sa.Column("worker", sa.Text, nullable=False, default=""),
    sa.Column("lease_token", sa.String(32)),
    sa.Column("lease_until", sa.Float),
    sa.Column("added_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
)
ledger = sa.Table(
    "judge_ledger",
    _metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("content_sha256", sa.String(64), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("line", sa.Text, nullable=False),
    sa.UniqueConstraint("content_sha256", "kind", "round"),
)


@dataclass(frozen=True, kw_only=True)
class Queue:
    """An open queue. shown: its address without a password, for messages."""

    engine: sa.Engine
    shown: str


def open_queue(home: str | Path, url: str | None = None) -> Queue:
    """Opens the queue and makes its tables where they are missing.

    url: postgresql://user@host/database or sqlite:///file; None is queue.sqlite in `home`.
    Raises StorageError when it cannot be reached, MissingExtraError without a driver.
    """
    if url is None:
        path = Path(home) / "queue.sqlite"
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{path}"
    for short in ("postgresql://", "postgres://"):
        if url.startswith(short):
            url = "postgresql+psycopg://" + url.removeprefix(short)
    try:
        address = sa.make_url(url)
        shown = address.render_as_string(hide_password=True)
        engine = _create_engine(address)
    except sa.exc.ArgumentError:
        raise StorageError(
            "is not the address of a queue",
            where="--queue",
            expected="postgresql://user@host/database or sqlite:///file",
        ) from None
    except ModuleNotFoundError as problem:
        raise MissingExtraError(
            f"a queue at {shown} needs {problem.name}",
            fix="Run `pip install 'paceline[judge]'`.",
        ) from None
    queue = Queue(engine=engine, shown=shown)
    try:
        _make_tables(engine)
    except (sa.exc.OperationalError, sa.exc.DatabaseError) as problem:
        raise _unreachable(queue, problem) from None
    return queue


def _create_engine(address: sa.URL) -> sa.Engine:
    if address.get_backend_name() != "sqlite":
        # read committed and row locks; a connection that died is replaced
        return sa.create_engine(address, pool_pre_ping=True)
    engine = sa.create_engine(address, connect_args={"timeout": _BUSY_S})

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # a read that later writes would fail at once beside another writer: take the lock first
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _make_tables(engine: sa.Engine) -> None:
    for attempt in (0, 1):
        try:
            with engine.begin() as connection:
                _metadata.create_all(connection)
            return
        except (sa.exc.IntegrityError, sa.exc.ProgrammingError):
            if attempt:  # the first time, another process may have made them meanwhile
                raise


@contextlib.contextmanager
def begin(queue: Queue) -> Iterator[sa.Connection]:
    """One transaction. Raises StorageError when the database cannot be reached or is full."""
    try:
        with queue.engine.begin() as connection:
            yield connection
    except (sa.exc.OperationalError, sa.exc.InterfaceError) as problem:
        raise _unreachable(queue, problem) from None


def now(connection: sa.Connection) -> float:
    """Seconds since 1970 by the clock that every worker of this queue shares."""
    if connection.dialect.name == "postgresql":
        value: Any = connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())"))
        return float(value)
    return time.time()


def _unreachable(queue: Queue, problem: sa.exc.SQLAlchemyError) -> StorageError:
    cause = getattr(problem, "orig", None)
    first_line = str(cause or problem).strip().splitlines()[0][:200]
    return StorageError(
        f"the queue cannot be used: {first_line}",
        where=queue.shown,
        fix="Start the database or free some space, and run the same command again.",
    )
