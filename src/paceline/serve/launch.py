"""vLLM's own HTTP server for a plan, started under the guard and ended with all it started."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.records import storage_errors
from paceline.serve.command import build_command, build_server_env
from paceline.serve.failure import explain
from paceline.serve.plan import Plan
from paceline.serve.process import build_child_env, end_session
from paceline.serve.staging import make_staging, remove_staging

__all__ = ["launch_server", "open_server"]

_HOST = "127.0.0.1"
_PROBE_S = 5.0
_LOOK_S = 0.2


def launch_server(
    plan: Plan, *, staging: Path, listen: Sequence[str], log_path: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """(the server's process, where its output begins in the log); it is not ready yet.

    listen: the server's own options for its address. It ends when this process is gone.
    """
    command = build_command(plan, folder=Path(), listen=listen)
    # the guard runs vLLM's own module and ends it when this process is gone
    command[2:2] = ["paceline.serve.guard"]
    command += ["--disable-uvicorn-access-log"]
    with storage_errors(log_path):
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = open(log_path, "ab")  # noqa: SIM115
    with log:
        begin = log.tell()
        process = subprocess.Popen(
            command,
            env=build_child_env(build_server_env(plan), staging),
            cwd=staging,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return process, begin


@contextlib.contextmanager
def open_server(plan: Plan, *, log_path: Path, start_s: float = 900.0) -> Iterator[str]:
    """Base URL of a plan's server on a free port of this machine, without Paceline's front.

    Raises EngineError with the end of the log where it does not come up.
    """
    with socket.create_server((_HOST, 0)) as free:
        port = int(free.getsockname()[1])
    staging = make_staging(plan)
    process = None
    try:
        listen = ("--host", _HOST, "--port", str(port))
        process, begin = launch_server(plan, staging=staging, listen=listen, log_path=log_path)
        deadline = time.monotonic() + start_s
        while not _is_healthy(port):
            code = process.poll()
            if code is not None or time.monotonic() > deadline:
                what = "was not ready in time" if code is None else "died while starting"
                end_session(process)
                raise explain(what, message="", exit_code=code, log_path=log_path, start=begin)
            time.sleep(_LOOK_S)
        yield f"http://{_HOST}:{port}/v1"
    finally:
        if process is not None:
            end_session(process)
        remove_staging(staging)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=_PROBE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
