"""What a stranger's draft is run in: no network, nothing to write to, limits that end it.

`find_isolation` tries what this machine allows, by building it; `Sandbox` turns a command into one
that runs inside. Where the system allows no namespaces, limits and environment stay, and
`Isolation.missing` says what does not hold.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.serve.process import session_members

__all__ = [
    "Isolation",
    "Sandbox",
    "SandboxWatch",
    "clean_env",
    "find_isolation",
    "session_bytes",
    "wrap_command",
]

_JAIL = Path(__file__).with_name("jail.py")
_NOBODY = 65534
_SCRATCH_BYTES = 2 * 2**30
_MAX_PROCESSES = 512  # an engine has a dozen
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY$|^AWS_|^AZURE_|^GOOGLE_|^SSH_|_PROXY$", re.I
)
_NOT_SECRET = frozenset({"TOKENIZERS_PARALLELISM"})
_WALLS = "network, writing outside a scratch folder, and other processes are out of reach"


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What can be built here. mode: of jail.py. missing: one sentence for each wall that cannot."""

    mode: str
    missing: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        how = {
            "root": "namespaces and an unprivileged user",
            "user": "a user namespace without privileges",
            "user-same-pids": "a user namespace without privileges",
            "none": "no namespaces",
        }[self.mode]
        return f"{how}; {'; '.join(self.missing) or _WALLS}"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """One run. needs: paths that must be readable inside. memory_bytes: resident, all processes
    together; data_bytes: private memory one process may ask for, None where a driver maps more.
    scratch: an existing empty folder. time_s: wall time; processor time is bounded too.
    """

    isolation: Isolation
    scratch: Path
    needs: tuple[Path, ...]
    memory_bytes: int
    data_bytes: int | None
    time_s: float


def find_isolation(needs: Iterable[Path] = ()) -> Isolation:
    """The strongest isolation that works on this machine and still lets `needs` be read."""
    return _find(tuple(str(path) for path in needs))


@functools.cache
def _find(needs: tuple[str, ...]) -> Isolation:
    reasons: list[str] = []
    modes = ["root"] if os.geteuid() == 0 else []
    for mode in (*modes, "user", "user-same-pids"):
        reason = _try(mode, needs)
        if reason is None:
            if mode != "user-same-pids":
                return Isolation(mode=mode, missing=())
            return Isolation(
                mode=mode,
                missing=(
                    f"other processes of this user can be seen and signalled ({reasons[-1]})",
                ),
            )
        reasons.append(reason)
    text = f"this system allows no namespaces ({reasons[-1]}): network and files are within reach"
    if os.geteuid() == 0:
        text += ", as root"
    return Isolation(mode="none", missing=(text,))


def _try(mode: str, needs: tuple[str, ...]) -> str | None:
    """Builds the walls around a command that does nothing; the reason why not, or None."""
    with tempfile.TemporaryDirectory(prefix="paceline-probe-") as scratch:
        policy = _policy(mode, scratch, needs, {})
        try:
            done = subprocess.run(
                [*_jail(policy), sys.executable, "-I", "-c", "open('/proc/self/status').close()"],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            return f"{type(problem).__name__}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1].removeprefix("jail: ")[:200] if lines else f"exit code {done.returncode}"


def _policy(
    mode: str, scratch: str, needs: tuple[str, ...], limits: Mapping[str, int]
) -> dict[str, object]:
    return {
        "mode": mode,
        "uid": _NOBODY,
        "scratch": scratch,
        "scratch_bytes": _SCRATCH_BYTES,
        "needs": list(needs),
        "limits": dict(limits),
    }


def _jail(policy: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-I", "-S", str(_JAIL), json.dumps(policy)]


def wrap_command(command: list[str], sandbox: Sandbox) -> list[str]:
    """The command that runs `command` inside; it ends with it, and with its starter."""
    cores = len(os.sched_getaffinity(0))
    limits = {"CORE": 0, "CPU": int(sandbox.time_s * cores) + 1}
    if sandbox.data_bytes is not None:
        limits["DATA"] = sandbox.data_bytes
    if sandbox.isolation.mode == "none":
        limits["FSIZE"] = _SCRATCH_BYTES
    needs = tuple(str(path) for path in sandbox.needs)
    policy = _policy(sandbox.isolation.mode, str(sandbox.scratch), needs, limits)
    return [*_jail(policy), *command]


def clean_env(env: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """An environment without tokens, passwords and proxies, whose caches lie in the scratch."""
    kept = {
        name: value
        for name, value in env.items()
        if name in _NOT_SECRET or not _SECRET.search(name)
    }
    home = kept.get("HOME")
    if home and "PYTHONUSERBASE" not in kept:
        kept["PYTHONUSERBASE"] = str(Path(home) / ".local")  # packages of `pip install --user`
    for name in (
        "HOME",
        "TMPDIR",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "HF_HOME",
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "MPLCONFIGDIR",
    ):
        kept[name] = str(scratch)
    kept["PYTHONDONTWRITEBYTECODE"] = "1"
    return kept


def session_bytes(members: Iterable[int]) -> int:
    """Resident bytes of processes, shared pages counted in each."""
    page, total = resource.getpagesize(), 0
    for member in members:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1]) * page
    return total


class SandboxWatch:
    """Ends a session that holds more than `memory_bytes` together, runs longer than `time_s`, or
    has more than `max_processes`.

    Looks each 0.2 s. peak_bytes: the most that was seen. ended_for: "", "memory", "time" or
    "processes".
    """

    def __init__(
        self,
        session: int,
        *,
        memory_bytes: int,
        time_s: float,
        max_processes: int = _MAX_PROCESSES,
    ) -> None:
        self.peak_bytes = 0
        self.ended_for = ""
        self._session, self._memory_bytes = session, memory_bytes
        self._max_processes = max_processes
        self._deadline = time.monotonic() + time_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            members = session_members(self._session)
            held = session_bytes(members)
            self.peak_bytes = max(self.peak_bytes, held)
            excess = [
                name
                for name, is_over in (
                    ("memory", held > self._memory_bytes),
                    ("time", time.monotonic() > self._deadline),
                    ("processes", len(members) > self._max_processes),
                )
                if is_over
            ]
            if excess:
                self.ended_for = self.ended_for or excess[0]
                for member in members:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(member, signal.SIGKILL)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
