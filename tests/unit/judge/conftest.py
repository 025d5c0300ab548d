"""A queue on SQLite, and on a PostgreSQL server of its own where Debian's is installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def _find_server() -> Path | None:
    found = shutil.which("initdb")
    candidates = [Path(found).parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "postgres").exists()), None)


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server on loopback, ended with the tests."""
    pytest.importorskip("psycopg")
    binaries = _find_server()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (initdb not found); apt install postgresql")
    folder = Path(f"/tmp/paceline-postgres-{os.getpid()}")
    folder.mkdir(mode=0o700)
    words: dict[str, str] = {}
    if os.geteuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "postgres", "postgres")
        words = {"user": "postgres", "group": "postgres"}
    data = folder / "data"
    subprocess.run(
        [binaries / "initdb", "-D", data, "-A", "trust", "-U", "paceline", "-N"],
        check=True,
        capture_output=True,
        cwd=folder,
        **words,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ["-c", "fsync=off", "-c", f"unix_socket_directories={folder}"]
    server = subprocess.Popen(
        [binaries / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), *settings],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        **words,
    )
    try:
        yield _wait(port)
    finally:
        server.send_signal(signal.SIGINT)  # SIGTERM would wait for open connections
        server.wait(timeout=30)
        shutil.rmtree(folder)


def _wait(port: int) -> str:
    import psycopg

    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(
                f"host=127.0.0.1 port={port} user=paceline dbname=postgres", connect_timeout=2
            ).close()
            return f"postgresql://paceline@127.0.0.1:{port}/postgres"
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.fixture(params=["sqlite", "postgresql"])
def queue_url(request: pytest.FixtureRequest) -> str | None:
    """None for SQLite in the judge's folder; else a fresh schema of the server's database."""
    if request.param == "sqlite":
        return None
    return make_schema(request.getfixturevalue("postgres_url"))


def make_schema(server: str) -> str:
    import psycopg

    name = f"judge_{time.monotonic_ns()}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{server}?options=-csearch_path%3D{name}"
