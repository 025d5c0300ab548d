"""The operator's way in: a plan as an OpenAI-compatible HTTP server, vLLM's own, unmodified."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.errors import PlanError
from paceline.serve.checks import check_plan
from paceline.serve.endpoint import resolve_engine_args
from paceline.serve.failure import explain
from paceline.serve.install import engine_python
from paceline.serve.plan import Plan
from paceline.serve.process import build_child_env, end_session
from paceline.serve.staging import make_staging, remove_staging

__all__ = ["build_command", "format_command", "serve_http"]

_PR_SET_PDEATHSIG = 1


def build_command(plan: Plan, *, host: str, port: int, staging: Path) -> list[str]:
    """The command that serves a plan. `vllm serve` is not used: the CPU wheel cannot run it."""
    command = [engine_python(), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", host, "--port", str(port), "--served-model-name", plan.target.name]
    for name, value in resolve_engine_args(plan, staging).items():
        if name == "disable_log_stats":
            continue  # on is the server's default
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, dict):
            command += [flag, json.dumps(value)]
        else:
            command += [flag, str(value)]
    return command


def _server_env(plan: Plan) -> dict[str, str]:
    env = dict(plan.env)
    if plan.device == "cpu":
        # the server always runs its engine in a process of its own; keep the compute threads of
        # the worker on the planned number of cores
        del env["VLLM_ENABLE_V1_MULTIPROCESSING"], env["OMP_NUM_THREADS"]
        cores = sorted(os.sched_getaffinity(0))[: plan.num_threads]
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    return env


def format_command(plan: Plan, *, host: str = "127.0.0.1", port: int = 8000) -> str:
    """The plan as shell commands to copy: a neutral folder, then the server with its settings."""
    args = plan.engine_args
    lines = [
        "STAGING=$(mktemp -d)",
        f'ln -s {shlex.quote(str(plan.target.path.resolve()))} "$STAGING/{args["model"]}"',
    ]
    if plan.draft is not None and plan.draft_name is not None:
        source = shlex.quote(str(plan.draft.path.resolve()))
        lines.append(f'cp -r {source} "$STAGING/{plan.draft_name}"')
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(_server_env(plan).items())]
    command = build_command(plan, host=host, port=port, staging=Path("$STAGING"))
    lines.append(" ".join([*words, *(_quote(word) for word in command)]))
    return "\n".join(lines)


def _quote(word: str) -> str:
    if "$STAGING" not in word:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def serve_http(
    plan: Plan,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_path: str | Path | None = None,
    timeout_s: float = 900.0,
    on_ready: Callable[[str], None] = print,
) -> int:
    """Serves until Ctrl-C or SIGTERM; returns the server's exit code, 0 after a signal.

    on_ready is called with a sentence once /health answers. log_path: where the server's output
    goes; None is this terminal. Raises PlanError for a port in use, EngineError if it dies.
    """
    check_plan(plan)
    _check_port(host, port)
    staging = make_staging(plan)
    stopped: list[int] = []
    process: subprocess.Popen[bytes] | None = None
    try:
        log = open(log_path, "ab") if log_path is not None else None  # noqa: SIM115
        try:
            process = subprocess.Popen(
                build_command(plan, host=host, port=port, staging=staging),
                env=build_child_env(_server_env(plan), staging),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        finally:
            if log is not None:
                log.close()
        with _forwarded(stopped):
            _wait_ready(process, host, port, time.monotonic() + timeout_s, stopped, log_path)
            if not stopped:
                on_ready(f"{plan.target.name} is served at http://{host}:{port}/v1")
            while not stopped and process.poll() is None:
                time.sleep(0.2)
            if not stopped:
                raise _died(process, log_path, "died while serving")
            process.send_signal(signal.SIGINT)
            end_session(process, grace_s=15.0)
            return 0
    finally:
        if process is not None:
            end_session(process)
        remove_staging(staging)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _check_port(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as problem:
        raise PlanError(
            f"port {port} cannot be used: {problem}", where=host, fix="Choose another --port."
        ) from None


@contextlib.contextmanager
def _forwarded(stopped: list[int]) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    before: dict[int, Any] = {
        number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_ready(
    process: subprocess.Popen[bytes],
    host: str,
    port: int,
    deadline: float,
    stopped: list[int],
    log_path: str | Path | None,
) -> None:
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}/health"
    while not stopped:
        if process.poll() is not None:
            raise _died(process, log_path, "died while starting")
        if time.monotonic() > deadline:
            raise _died(process, log_path, "did not become ready in time")
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(url, timeout=2.0) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.3)


def _died(process: subprocess.Popen[bytes], log_path: str | Path | None, what: str) -> Exception:
    code = process.poll()
    end_session(process)
    path = Path(log_path) if log_path is not None else Path("the terminal above")
    return explain(what, message="", exit_code=code, log_path=path)
