"""One vLLM server behind the front: started on a Unix socket, asked, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EngineError
from paceline.serve.failure import explain
from paceline.serve.launch import launch_server
from paceline.serve.plan import Plan
from paceline.serve.process import end_session
from paceline.serve.staging import make_staging, remove_staging

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Back"]

_LINE_BYTES = 2**23  # a streamed event holds the token ids of a whole prompt
_PROBE_S = 5.0
_LEAVE_S = 1.0
BASE = "http://back"  # a Unix socket has no host; HTTP wants one


class Back:
    """A plan as a running vLLM server. num_carried: requests that it holds; num_answered: so far.

    is_lost: it died or was given up, and nothing that it still says counts.
    """

    def __init__(self, plan: Plan, *, log_path: Path) -> None:
        self.plan = plan
        self.log_path = log_path
        self.num_carried = 0
        self.num_answered = 0
        self.is_lost = False
        self._staging: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._log_start = 0

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "asked before its start"
        return self._session

    @property
    def pid(self) -> int:
        assert self._process is not None, "asked before its start"
        return self._process.pid

    async def start(self, *, timeout_s: float) -> float:
        """Starts the server and waits until it answers; returns the seconds. Raises EngineError."""
        import aiohttp

        begun = time.monotonic()
        self._staging = await asyncio.to_thread(make_staging, self.plan)
        socket_path = self._staging / "http.sock"
        listen = ("--uds", str(socket_path))
        self._process, self._log_start = launch_server(
            self.plan, staging=self._staging, listen=listen, log_path=self.log_path
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(socket_path), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE_BYTES,
        )
        while not await self.is_healthy():
            if self._process.poll() is not None:
                raise self.failure("died while starting")
            if time.monotonic() - begun > timeout_s:
                raise self.failure(f"was not ready within {timeout_s:g} s")
            await asyncio.sleep(0.2)
        return time.monotonic() - begun

    @contextlib.contextmanager
    def carry(self) -> Iterator[None]:
        """Counts one request while it is asked here."""
        self.num_carried += 1
        try:
            yield
            self.num_answered += 1
        finally:
            self.num_carried -= 1

    def has_exited(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def is_healthy(self) -> bool:
        """Whether /health says that the engine lives."""
        import aiohttp

        if self.is_lost or self.has_exited():
            return False
        limit = aiohttp.ClientTimeout(total=_PROBE_S)
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async with self.session.get(f"{BASE}/health", timeout=limit) as reply:
                return reply.status == 200
        return False

    async def has_died(self) -> bool:
        """Whether it is gone for certain; one that is only slow to answer is not."""
        import aiohttp

        if self.has_exited():
            return True
        limit = aiohttp.ClientTimeout(total=_PROBE_S)
        try:
            async with self.session.get(f"{BASE}/health", timeout=limit) as reply:
                return reply.status == 503
        except aiohttp.ClientConnectorError:
            return True
        except (TimeoutError, aiohttp.ClientError, OSError):
            return self.has_exited()

    async def read_metrics(self) -> str | None:
        """The text of /metrics; None when the server does not answer."""
        import aiohttp

        limit = aiohttp.ClientTimeout(total=_PROBE_S)
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async with self.session.get(f"{BASE}/metrics", timeout=limit) as reply:
                return await reply.text() if reply.status == 200 else None
        return None

    def failure(self, what: str) -> EngineError:
        """The error that says why, with the end of the log."""
        code = None if self._process is None else self._process.poll()
        return explain(
            what, message="", exit_code=code, log_path=self.log_path, start=self._log_start
        )

    async def stop(self) -> None:
        """Ends the server and everything it started; who still reads from it gets a connection
        error. Safe to call twice."""
        self.is_lost = True
        if self._process is not None:
            await asyncio.to_thread(end_session, self._process)
        if self._session is not None:
            # closing it leaves whoever waits for the rest of an answer waiting for ever: they go
            # by the server's own end, which this loop must see first
            deadline = time.monotonic() + _LEAVE_S
            while self.num_carried and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            await self._session.close()
        if self._staging is not None:
            await asyncio.to_thread(remove_staging, self._staging)
