"""A plan as the command line of vLLM's own OpenAI-compatible server, unmodified."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from paceline.serve.endpoint import resolve_engine_args
from paceline.serve.install import engine_python
from paceline.serve.plan import Plan

__all__ = ["build_command", "build_server_env", "format_command"]


def build_command(plan: Plan, *, folder: Path, listen: Sequence[str]) -> list[str]:
    """The command that serves a plan. `vllm serve` is not used: the CPU wheel cannot run it.

    folder: where target and draft lie; Path() when it runs there, as `resolve_engine_args` wants.
    listen: the server's own options for its address.
    """
    command = [engine_python(), "-m", "vllm.entrypoints.openai.api_server", *listen]
    command += ["--served-model-name", plan.target.name]
    for name, value in resolve_engine_args(plan, folder).items():
        if name == "disable_log_stats":
            continue  # on is the server's default
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, dict):
            command += [flag, json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            command += [flag, *(str(part) for part in value)]
        else:
            command += [flag, str(value)]
    return command


def build_server_env(plan: Plan) -> dict[str, str]:
    env = dict(plan.env)
    if plan.device == "cpu":
        # the server always runs its engine in a process of its own; keep the compute threads of
        # the worker on the planned number of cores
        del env["VLLM_ENABLE_V1_MULTIPROCESSING"], env["OMP_NUM_THREADS"]
        cores = sorted(os.sched_getaffinity(0))[: plan.num_threads]
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    else:
        env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # the server's own process has threads
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
    words = [
        f"{name}={shlex.quote(value)}" for name, value in sorted(build_server_env(plan).items())
    ]
    listen = ("--host", host, "--port", str(port))
    lines.append('cd "$STAGING"')
    command = build_command(plan, folder=Path(), listen=listen)
    lines.append(" ".join([*words, *(shlex.quote(word) for word in command)]))
    return "\n".join(lines)
