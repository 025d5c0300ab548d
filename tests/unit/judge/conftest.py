"""A queue on SQLite, and on a PostgreSQL server of its own where Debian's is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgres import find_server, make_schema, start_postgres


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server on loopback, ended with the tests."""
    pytest.importorskip("psycopg")
    binaries = find_server()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (no initdb); apt install postgresql")
    with start_postgres(binaries) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def queue_url(request: pytest.FixtureRequest) -> str | None:
    """None for SQLite in the judge's folder; else a fresh schema of the server's database."""
    if request.param == "sqlite":
        return None
    return make_schema(request.getfixturevalue("postgres_url"))
