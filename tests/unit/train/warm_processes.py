"""Processes without the ten seconds that importing takes: one has imported, and forks the others.

    warm_processes.py DOOR

listens at the unix socket DOOR until whoever started it is gone, and never computes itself, so a
fork finds no thread and no lock of another. `WarmProcess` is what subprocess.Popen would be: its
own session, environment and exit code, killed as any other. `paceline train --nproc-per-node` as a
command of its own is tests/unit/cli/test_train_processes.py.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_DOOR = "PACELINE_TEST_DOOR"
_LOOK_S = 0.02
_STARTUP_S = 120.0
_IMPORTED = (
    "rank_process",
    "tiny",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "paceline.train.loop",
)


class WarmProcess:
    """args: rank_process.py and its words. Writes where `stdout` points, errors too."""

    def __init__(self, args: Sequence[str], *, env: Mapping[str, str], stdout: int) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(env[_DOOR])
        socket.send_fds(self._line, [b" "], [stdout])
        with self._line.makefile("wb") as file:
            file.write(json.dumps([list(args), dict(env)]).encode() + b"\n")
        self._told = self._line.makefile("rb")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.returncode = int(self._told.readline())
            self._told.close()
            self._line.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
            time.sleep(_LOOK_S)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_forks_of_workers() -> None:
    """In a launcher: torchrun's agent forks its workers, too, where it would run a command."""
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    def start(self: object, args: tuple[str, ...], env: dict[str, str]) -> WarmProcess:
        return WarmProcess(args[1:], env=env, stdout=1)

    subprocess_handler.SubprocessHandler._popen = start  # type: ignore[assignment,method-assign]


def open_door(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """The process that forks, and the environment by which a WarmProcess finds it."""
    door = folder / "door"
    keeper = subprocess.Popen([sys.executable, __file__, str(door)])
    end = time.monotonic() + _STARTUP_S
    while not door.exists():
        assert keeper.poll() is None, "nothing to fork from"
        assert time.monotonic() < end, "nothing to fork from"
        time.sleep(_LOOK_S)
    return keeper, {**os.environ, "OMP_NUM_THREADS": "1", _DOOR: str(door)}


def _import_all() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    import transformers
    from torch import set_num_threads

    _ = transformers.LlamaForCausalLM  # found and imported at its first use
    set_num_threads(1)


def _run(args: list[str], env: dict[str, str], stdout: int) -> NoReturn:
    import rank_process

    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = args
    code: object = 1
    try:
        rank_process.run()
    except SystemExit as end:
        code = end.code or 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def _keep(door: str) -> None:
    _import_all()
    parent = os.getppid()
    told: dict[int, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(door + ".new")
    listener.listen(64)
    os.rename(door + ".new", door)
    while os.getppid() == parent:
        if select.select([listener], [], [], _LOOK_S)[0]:
            line, _ = listener.accept()
            _, (stdout,), _, _ = socket.recv_fds(line, 1, 1)
            with line.makefile("rb") as file:
                args, env = json.loads(file.readline())
            pid = os.fork()
            if pid == 0:
                for other in (listener, line, *told.values()):
                    other.close()
                _run(args, env, stdout)
            os.close(stdout)
            line.sendall(f"{pid}\n".encode())
            told[pid] = line
        while told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with told.pop(pid) as line, suppress(OSError):  # nobody may wait for it any more
                line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    _keep(sys.argv[1])
