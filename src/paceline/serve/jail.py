"""Shuts itself in, then becomes the command: python -I jail.py POLICY COMMAND...

Standard library only, and run as a file: nothing of the caller's environment is imported before
the walls are up. POLICY is JSON:
  mode     "root": namespaces made by root, who then becomes an unprivileged user;
           "user": a user namespace, for everybody else; "user-same-pids": the same where no /proc
           of its own can be mounted; "none": limits only
  uid      the unprivileged user inside
  scratch  an existing folder that becomes the only place to write, a tmpfs of scratch_bytes
  needs    paths that must be readable inside
  limits   {"DATA" | "CPU" | "CORE" | "FSIZE": value}
A wall that cannot be built ends the process with code 97 and one line on standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

CODE = 97
_NEWNS, _NEWUTS, _NEWIPC = 0x20000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """A wall that cannot be built."""


def _call(what: str, result: int) -> None:
    if result != 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [word.encode() for word in (source, target, kind)]
    _call(f"mount {target}", _libc.mount(*words, ctypes.c_ulong(flags), data.encode()))


def _set_read_only(path: str, *, on: bool, recursive: bool) -> None:
    change = struct.pack("QQQQ", _ATTR_RDONLY if on else 0, 0 if on else _ATTR_RDONLY, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, path.encode(), flags, change, len(change)
    )
    _call(f"read-only {path}", result)


def _unshare(mode: str, uid: int) -> None:
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWNET
    flags |= 0 if mode == "user-same-pids" else _NEWPID
    outer = os.geteuid(), os.getegid()
    if mode != "root":
        flags |= _NEWUSER
    _call("namespaces", _libc.unshare(flags))
    if mode != "root":
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {outer[0]} 1"),
            ("gid_map", f"{uid} {outer[1]} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _mount_walls(policy: dict[str, Any]) -> None:
    """Private mounts; an empty /tmp-like scratch; a /dev of few files; a /proc of its own; all else
    read-only."""
    scratch = policy["scratch"]
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    size = f"size={policy['scratch_bytes']},mode=1777"
    _mount("tmpfs", scratch, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    new_dev = Path(scratch, "dev")
    new_dev.mkdir()
    _mount("tmpfs", str(new_dev), "tmpfs", _MS_NOSUID, "size=1m,mode=755")
    for device in [Path("/dev", name) for name in _DEVICES] + sorted(Path("/dev").glob("nvidia*")):
        place = new_dev / device.name
        place.mkdir() if device.is_dir() else place.touch()
        _mount(str(device), str(place), "", _MS_BIND | _MS_REC)
    for name, goal in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (new_dev / name).symlink_to(f"/proc/self/{goal}")
    (new_dev / "shm").mkdir()
    _mount("tmpfs", str(new_dev / "shm"), "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    _mount(str(new_dev), "/dev", "", _MS_BIND | _MS_REC)
    writable = [scratch, "/dev/shm"]
    if policy["mode"] != "user-same-pids":
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        _mount("/proc/sys", "/proc/sys", "", _MS_BIND | _MS_REC)  # stays read-only
        writable.append("/proc")  # where CUDA's driver writes of its own threads, or does not start
    _set_read_only("/", on=True, recursive=True)
    for path in writable:
        _set_read_only(path, on=False, recursive=False)


def _raise_loopback() -> None:
    """127.0.0.1 of this namespace alone: torch's process group meets itself there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(probe, 0x8914, request.ljust(40, b"\0"))  # SIOCSIFFLAGS


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _become(policy: dict[str, Any], command: list[str]) -> NoReturn:
    """The last steps, in the process that becomes the command."""
    uid = policy["uid"]
    if policy["mode"] == "root":
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _call("no new privileges", _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    for path in policy["needs"]:
        if not os.access(path, os.R_OK):
            raise Refused(f"the unprivileged user cannot read {path}")
    _limit(policy["limits"])
    if policy["mode"] != "none":
        os.chdir(policy["scratch"])
    os.execvpe(command[0], command, os.environ)


def _die_with_parent() -> None:
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _guard(step: Any, *arguments: Any) -> NoReturn:
    """Runs a step that does not come back; a wall that fails is told and ends the process."""
    try:
        step(*arguments)
    except (Refused, OSError) as problem:
        with contextlib.suppress(OSError):
            os.write(2, f"jail: {problem}\n".encode())
    os._exit(CODE)


def _first_process(policy: dict[str, Any], command: list[str], report: int) -> NoReturn:
    """Process 1 of the namespace: builds the walls, starts the command, ends all with it."""
    _die_with_parent()
    _mount_walls(policy)
    _raise_loopback()
    child = os.fork()
    if child == 0:
        os.close(report)
        _guard(_become, policy, command)
    while True:
        ended, status = os.wait()
        if ended == child:
            os.write(report, struct.pack("i", status))
            os._exit(0)


def _launch(policy: dict[str, Any], command: list[str]) -> NoReturn:
    _die_with_parent()
    if policy["mode"] in ("root", "user"):
        _launch_with_own_pids(policy, command)
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # what leaves the command's session comes back here
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _guard(_enter, policy, command)
    status = 0
    while True:
        ended, found = os.wait()
        if ended == child:
            status = found
            break
    _end_children()
    _end_like(status)


def _stop(*_: object) -> NoReturn:
    _end_children()
    os._exit(CODE)


def _enter(policy: dict[str, Any], command: list[str]) -> NoReturn:
    """The walls without process ids of their own, or none at all."""
    _die_with_parent()
    if policy["mode"] != "none":
        _unshare(policy["mode"], policy["uid"])
        _mount_walls(policy)
        _raise_loopback()
    _become(policy, command)


def _end_children() -> None:
    """Kills all that is left below this process, until nothing is."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.wait()


def _launch_with_own_pids(policy: dict[str, Any], command: list[str]) -> NoReturn:
    _unshare(policy["mode"], policy["uid"])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _guard(_first_process, policy, command, writer)
    os.close(writer)
    data = os.read(reader, 4)
    _, status = os.waitpid(child, 0)
    _end_like(struct.unpack("i", data)[0] if len(data) == 4 else status)


def _end_like(status: int) -> NoReturn:
    """Ends as the command did."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _guard(_launch, json.loads(sys.argv[1]), sys.argv[2:])
