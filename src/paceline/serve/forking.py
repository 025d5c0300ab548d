"""The parent's side of the fork server: engines that start without importing vLLM again."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

__all__ = ["MESSAGE_BYTES", "ForkedEngine", "env_device", "fork_engine", "prepare_forks"]

MESSAGE_BYTES = 1 << 18
_STARTUP_S = 120.0
_LOOK_S = 0.02
_KILLED = -9


class _Server:
    """One started fork server, for engines of one device and one number of threads."""

    def __init__(self, env: Mapping[str, str], log: BinaryIO) -> None:
        self.kind = _kind(env)
        self.codes: dict[int, int] = {}
        self._forked: set[int] = set()
        self._lock = threading.Lock()
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {name: value for name, value in env.items() if name != "PYTHONPATH"}
        if path := os.environ.get("PYTHONPATH"):  # not an engine's, whose folder goes away
            own["PYTHONPATH"] = path
        with other:
            command = [sys.executable, "-m", "paceline.serve.fork_server"]
            self._process = subprocess.Popen(
                [*command, "--fd", str(other.fileno()), "--device", self.kind[0]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(other.fileno(),),
                env=own,
                start_new_session=True,  # Ctrl-C is for the parent, which ends its engines
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int | None:
        """The new engine's process id; None when the server has failed."""
        with self._lock:
            try:
                socket.send_fds(self._line, [json.dumps(request).encode()], list(fds))
            except OSError:
                return None
            end = time.monotonic() + _STARTUP_S
            while time.monotonic() < end:
                message = self._read(timeout_s=1.0)
                if message is None and not self.alive:
                    return None
                if message is not None and "pid" in message:
                    self._forked.add(int(message["pid"]))
                    return int(message["pid"])
            return None

    @property
    def is_idle(self) -> bool:
        """No engine of it runs."""
        return all(self.code(pid) is not None for pid in self._forked)

    def code(self, pid: int) -> int | None:
        """The exit code of an engine of this server; None while it runs."""
        with self._lock:
            while pid not in self.codes and self._read(timeout_s=0.0) is not None:
                pass
        if pid not in self.codes and not self.alive:
            self.codes[pid] = _KILLED  # engines end with their fork server
        return self.codes.get(pid)

    def close(self) -> None:
        """Ends it, in the middle of an import too; engines that are left end with it."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _read(self, *, timeout_s: float) -> dict[str, Any] | None:
        if not select.select([self._line], [], [], timeout_s)[0]:
            return None
        with contextlib.suppress(OSError):
            if data := self._line.recv(MESSAGE_BYTES):
                message: dict[str, Any] = json.loads(data)
                if "ended" in message:
                    self.codes[message["ended"]] = message["code"]
                return message
        return None


class ForkedEngine:
    """An engine's process as EngineProcess needs it: what it uses of subprocess.Popen."""

    def __init__(self, server: _Server, pid: int, stdin: BinaryIO) -> None:
        self._server = server
        self.pid, self.stdin = pid, stdin

    def poll(self) -> int | None:
        return self._server.code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("the engine", timeout or 0.0)
            time.sleep(_LOOK_S)
        return code


_servers: dict[tuple[str, str | None], _Server] = {}
_turn = threading.Lock()


def env_device(env: Mapping[str, str]) -> str:
    """ "cpu" or "cuda": what an engine with this environment runs on (serve/plan.py)."""
    return "cpu" if env.get("CUDA_VISIBLE_DEVICES") == "" else "cuda"


def _kind(env: Mapping[str, str]) -> tuple[str, str | None]:
    """(device, threads): what an engine takes over from the process it is forked from."""
    return env_device(env), env.get("OMP_NUM_THREADS")


def prepare_forks(env: Mapping[str, str]) -> None:
    """Starts the fork server: ready, or nearly so, when the first engine is wanted."""
    with _turn, open(os.devnull, "ab") as log:
        _find_server(env, log)


def fork_engine(
    words: Sequence[str], *, env: Mapping[str, str], log: BinaryIO, writer: int
) -> ForkedEngine | None:
    """An engine forked from this process's fork server, which the first call starts.

    words: what paceline.serve.child is told, without its pipe of events, which is `writer`. None
    when there is no forking here: the engine is then started as a command.
    """
    with _turn:
        server = _find_server(env, log)
        reader, stdin = os.pipe()
        try:
            request = {"words": list(words), "env": dict(env)}
            pid = server.fork(request, (reader, log.fileno(), writer))
        finally:
            os.close(reader)
        if pid is None:
            os.close(stdin)
            _servers.pop(server.kind).close()
            return None
        return ForkedEngine(server, pid, open(stdin, "wb"))


def _find_server(env: Mapping[str, str], log: BinaryIO) -> _Server:
    """The server for such engines; others stay while an engine of theirs runs, which would end."""
    wanted = _kind(env)
    for kind, server in list(_servers.items()):
        if not server.alive or (kind != wanted and server.is_idle):
            _servers.pop(kind).close()
    if wanted not in _servers:
        _servers[wanted] = _Server(env, log)
    return _servers[wanted]


@atexit.register
def _close() -> None:
    while _servers:
        _servers.popitem()[1].close()
