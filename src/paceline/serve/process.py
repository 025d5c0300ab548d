"""The engine's process from the parent's side: start it, talk to it, end it and all it started."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import paceline
from paceline.errors import EngineError
from paceline.records import storage_errors
from paceline.serve.failure import explain
from paceline.serve.forking import ForkedEngine, env_device, fork_engine, prepare_forks
from paceline.serve.install import engine_python, find_device
from paceline.serve.plan import build_env

__all__ = [
    "EngineProcess",
    "build_child_env",
    "end_session",
    "find_cache",
    "find_kernels",
    "session_members",
    "start_ahead",
]

_CACHES = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "TRITON_CACHE_DIR")
_KEPT_VLLM = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_LOGGING_LEVEL")


def build_child_env(plan_env: Mapping[str, str], staging: Path) -> dict[str, str]:
    """This environment, without settings of vLLM's that the plan does not name, plus the plan's.

    Another interpreter finds the paceline package through a link in the staging folder, so that
    nothing else of this environment gets in its way.
    """
    env = _own_env(plan_env)
    library = staging / "library"
    if not library.exists():
        library.mkdir()
        (library / "paceline").symlink_to(Path(paceline.__file__).resolve().parent)
    before = [str(Path(p).absolute()) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    env["PYTHONPATH"] = os.pathsep.join([str(library), *before])
    return env


def find_cache() -> Path:
    """The folder of vLLM's own caches, as its environment variables name it."""
    if stated := os.environ.get("VLLM_CACHE_ROOT"):
        return Path(stated).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "vllm"


def find_kernels() -> Path:
    """The folder of tuned kernels: where the user says, else beside vLLM's caches."""
    if stated := os.environ.get("TRITON_CACHE_DIR"):
        return Path(stated).absolute()
    return find_cache() / "triton"


def _own_env(plan_env: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_") or name in _KEPT_VLLM
    }
    for name in _CACHES:  # an engine works in another folder
        if name in kept:
            kept[name] = str(Path(kept[name]).absolute())
    if env_device(plan_env) == "cuda":
        # else each configuration tunes its kernels anew: 68 s of a hybrid's start
        kept["TRITON_CACHE_DIR"] = str(find_kernels())
    return {**kept, **plan_env, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def start_ahead(device: str | None, *, num_engines: int = 1) -> None:
    """Lets vLLM be imported while the caller still prepares what it will ask an engine.

    For so many engines that share a CPU's cores, and on a GPU; without vLLM here, nothing.
    """
    if engine_python() == sys.executable and importlib.util.find_spec("vllm") is not None:
        threads = max(1, len(os.sched_getaffinity(0)) // num_engines)
        prepare_forks(_own_env(build_env(device or find_device(), "v1", threads)))


def session_members(session: int) -> list[int]:
    """Ids of living (not zombie) processes of a session."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                members.append(int(entry.name))
    return members


def end_session(process: subprocess.Popen[bytes] | ForkedEngine, *, grace_s: float = 0.0) -> None:
    """Ends a session leader and everything in its session; returns when nothing of it is left."""
    deadline = time.monotonic() + grace_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for signal_number, wait_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + wait_s
        while members := session_members(process.pid):
            if time.monotonic() > deadline:
                break
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal_number)
            process.poll()
            time.sleep(0.05)
    process.wait()


def _start(
    env: Mapping[str, str],
    log: BinaryIO,
    writer: int,
    wrap: Callable[[list[str]], list[str]] | None,
) -> subprocess.Popen[bytes] | ForkedEngine:
    words = []
    alone = env.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    if wrap is None and engine_python() == sys.executable:
        forked = fork_engine(
            ["--die-with-parent"] if alone else [], env=env, log=log, writer=writer
        )
        if forked is not None:
            return forked
    if alone and threading.current_thread() is threading.main_thread():
        # the kernel's signal follows the starting thread, and would orphan vLLM's own children
        words.append("--die-with-parent")
    command = [engine_python(), "-m", "paceline.serve.child", *words, "--fd", str(writer)]
    return subprocess.Popen(
        wrap(command) if wrap else command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=(writer,),
        env=dict(env),
        start_new_session=True,
    )


class EngineProcess:
    """A started paceline.serve.child. `request` sends one operation; `receive` waits for events.

    wrap: turns the command into one that runs it somewhere, such as in a sandbox. Without it an
    engine of one process is forked from one that has imported vLLM (serve/fork_server.py).
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str],
        log_path: Path,
        wrap: Callable[[list[str]], list[str]] | None = None,
    ) -> None:
        self.log_path = log_path
        with storage_errors(log_path):
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = open(log_path, "ab")  # noqa: SIM115
        self._log_start = log.tell()
        reader, writer = os.pipe()
        try:
            self._process = _start(env, log, writer, wrap)
        except OSError as problem:
            os.close(reader)
            raise EngineError(f"cannot be started: {problem}", where=engine_python()) from None
        finally:
            log.close()
            os.close(writer)
        self._reader: BinaryIO = open(reader, "rb", buffering=0)  # noqa: SIM115
        self._pending = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, message: Mapping[str, Any]) -> None:
        """Sends one message. Raises EngineError if the engine is gone."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except (OSError, ValueError):
            raise self.failure("died") from None

    def receive(self, *, timeout_s: float, doing: str) -> dict[str, Any]:
        """The next event. Raises EngineError when the engine fails, dies or stays silent."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            ready = select.select([self._reader], [], [], max(0.0, min(left, 1.0)))[0]
            if ready:
                data = self._reader.read(1 << 16)
                if not data:
                    raise self.failure(f"died while {doing}")
                self._pending += data
            elif left <= 0:
                raise self.failure(
                    f"gave no sign of life for {round(timeout_s, 1):g} s while {doing}"
                )
        line, _, self._pending = self._pending.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "failed":
            raise self.failure(f"failed while {doing}", f"{event['kind']}: {event['message']}")
        return event

    def failure(self, what: str, message: str = "") -> EngineError:
        """Ends the engine and returns the error that says why, with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if "died" in what:
                self._process.wait(timeout=2.0)
        code = self._process.poll()
        end_session(self._process)
        return explain(
            what, message=message, exit_code=code, log_path=self.log_path, start=self._log_start
        )

    def close(self) -> None:
        """Asks the engine to end, then ends its whole session. Safe to call twice."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            if self._process.poll() is None:
                with contextlib.suppress(OSError, ValueError):
                    stdin.write(b'{"op": "close"}\n')
                    stdin.flush()
                    end_session(self._process, grace_s=1.0)
        finally:
            end_session(self._process)
            with contextlib.suppress(OSError):
                stdin.close()
            self._reader.close()
