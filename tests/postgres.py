"""A PostgreSQL server of its own on loopback, from Debian's package, as a real process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["find_server", "make_schema", "start_postgres"]


def find_server() -> Path | None:
    """The folder of initdb and postgres, None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    candidates = [Path(found).parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "postgres").exists()), None)


@contextlib.contextmanager
def start_postgres(binaries: Path) -> Iterator[str]:
    """Yields the address of an empty database; ends the server and removes its files."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-postgres-"))
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


def make_schema(server: str) -> str:
    """The address of a fresh schema of the server's database."""
    import psycopg

    name = f"judge_{time.monotonic_ns()}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{server}?options=-csearch_path%3D{name}"
