"""The sandbox with real processes: what must not work inside is tried there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.serve.process import end_session, session_members
from paceline.serve.sandbox import (
    Isolation,
    Sandbox,
    SandboxWatch,
    clean_env,
    find_isolation,
    wrap_command,
)

_GIB = 2**30
NEEDS = (Path(sys.executable), Path(paceline.__file__))


def build_sandbox(
    scratch: Path, *, mode: str | None = None, data_bytes: int | None = None, time_s: float = 60.0
) -> Sandbox:
    isolation = find_isolation(NEEDS) if mode is None else Isolation(mode=mode, missing=())
    if mode is None and isolation.mode == "none":
        pytest.skip(f"no sandbox here: {isolation}")
    scratch.mkdir(exist_ok=True)
    return Sandbox(
        isolation=isolation,
        scratch=scratch,
        needs=NEEDS,
        memory_bytes=_GIB,
        data_bytes=data_bytes,
        time_s=time_s,
    )


def run_inside(code: str, sandbox: Sandbox, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        wrap_command([sys.executable, "-c", code], sandbox),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
        check=False,
    )


@pytest.fixture(params=["found", "user-same-pids"])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Sandbox:
    """The strongest that this machine has, and the one without its own /proc."""
    found = build_sandbox(tmp_path / "scratch")
    if request.param == "found":
        return found
    return build_sandbox(tmp_path / "scratch", mode=request.param)


def test_network_is_out_of_reach(sandbox: Sandbox) -> None:
    """Neither this machine's own services nor other hosts; its own loopback works."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 2).close()  # from outside it is there
        done = run_inside(
            f"""
import json, socket
found = {{}}
for name, address in (("service", ("127.0.0.1", {port})), ("host", ("192.0.2.1", 53))):
    try:
        socket.create_connection(address, 3).close()
        found[name] = "reached"
    except OSError as problem:
        found[name] = type(problem).__name__
own = socket.create_server(("127.0.0.1", 0))
socket.create_connection(own.getsockname(), 3).close()
found["own"] = "reached"
print(json.dumps(found))
""",
            sandbox,
        )
    assert json.loads(done.stdout) == {
        "service": "ConnectionRefusedError",
        "host": "OSError",
        "own": "reached",
    }, done.stderr


def test_writing_is_refused_but_in_the_scratch(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(b"weights")
    places = [weights, tmp_path / "draft" / "new", Path("/proc/sys/kernel/hostname"), Path("/new")]
    done = run_inside(
        f"""
import errno, json, os
found = {{}}
for path in {[str(path) for path in places]!r}:
    try:
        open(path, "ab").close()
        found[path] = "written"
    except OSError as problem:
        found[path] = errno.errorcode[problem.errno]
open("here", "w").write("x")
open("/dev/null", "w").write("x")
open("/dev/shm/here", "w").write("x")
try:
    open("/proc/self/comm", "w").write("x")
    own = True
except OSError:
    own = False
print(json.dumps([found, sorted(os.listdir("/dev")), own]))
""",
        sandbox,
    )
    found, devices, own = json.loads(done.stdout)
    # a process may name itself in a /proc of its own; CUDA's driver does, or does not start
    assert own is (sandbox.isolation.mode != "user-same-pids")
    assert set(found.values()) <= {"EROFS", "EACCES"}, found
    assert found[str(weights)] == "EROFS"
    assert not {"sda", "vda", "kvm", "mem", "tty"} & set(devices)
    assert weights.read_bytes() == b"weights"
    assert not list(sandbox.scratch.iterdir()), "the scratch was a file system of its own"


def test_no_privilege_and_no_way_to_one(sandbox: Sandbox) -> None:
    done = run_inside(
        """
import ctypes, json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
libc = ctypes.CDLL(None)
tried = {
    "uid": os.getuid(),
    "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
    "new_privileges": int(status["NoNewPrivs"]),
    "remount": libc.mount(b"none", b"/", b"", 32 | 4096, None),
    "hostname": libc.sethostname(b"x", 1),
}
try:
    os.setuid(0)
    tried["root"] = "became"
except OSError:
    tried["root"] = "refused"
print(json.dumps(tried))
""",
        sandbox,
    )
    assert json.loads(done.stdout) == {
        "uid": 65534,
        "capabilities": 0,
        "new_privileges": 1,
        "remount": -1,
        "hostname": -1,
        "root": "refused",
    }, done.stderr


def test_other_processes_are_out_of_reach(tmp_path: Path) -> None:
    sandbox = build_sandbox(tmp_path / "scratch")
    if not sandbox.isolation.is_whole:
        pytest.skip(str(sandbox.isolation))
    done = run_inside(
        f"""
import os
print([name for name in os.listdir("/proc") if name.isdigit()])
try:
    os.kill({os.getpid()}, 0)
    print("seen")
except ProcessLookupError:
    print("not there")
""",
        sandbox,
    )
    assert done.stdout.splitlines() == ["['1', '2']", "not there"], done.stderr


@pytest.mark.parametrize("mode", [None, "none"])
def test_too_much_memory_asked_for_is_refused(mode: str | None, tmp_path: Path) -> None:
    sandbox = build_sandbox(tmp_path / "scratch", mode=mode, data_bytes=256 * 2**20)
    code = (
        "held = bytearray(200 << 20)\nprint('small')\nheld += bytearray(400 << 20)\nprint('large')"
    )
    done = run_inside(code, sandbox)
    assert done.stdout == "small\n"
    assert "MemoryError" in done.stderr


@contextlib.contextmanager
def started(code: str, sandbox: Sandbox) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        wrap_command([sys.executable, "-c", code], sandbox),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_session(process)
        assert process.stdout is not None
        process.stdout.close()
        assert not session_members(process.pid)


FORKS = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        held = b"x" * (80 << 20)
        time.sleep(60)
        os._exit(0)
print("grown", flush=True)
time.sleep(60)
"""


def test_memory_of_all_processes_together_ends_them(tmp_path: Path) -> None:
    """Three processes of 80 MiB, each below a limit of 200 MiB."""
    with started(FORKS, build_sandbox(tmp_path / "scratch")) as process:
        watch = SandboxWatch(process.pid, memory_bytes=200 << 20, time_s=60)
        try:
            assert process.wait(timeout=20) == -signal.SIGKILL
        finally:
            watch.close()
        assert watch.ended_for == "memory"
        assert watch.peak_bytes > 200 << 20


def test_memory_below_the_limit_is_left_alone(tmp_path: Path) -> None:
    with started(FORKS, build_sandbox(tmp_path / "scratch")) as process:
        watch = SandboxWatch(process.pid, memory_bytes=2 * _GIB, time_s=60)
        time.sleep(1.5)
        assert process.poll() is None
        watch.close()
        assert not watch.ended_for
        assert watch.peak_bytes > 240 << 20


def test_number_of_processes_is_bounded(tmp_path: Path) -> None:
    """A fork bomb: all of it is gone."""
    code = """
import os, time
print("begun", flush=True)
for _ in range(100):
    if os.fork() == 0:
        time.sleep(60)
time.sleep(60)
"""
    with started(code, build_sandbox(tmp_path / "scratch")) as process:
        watch = SandboxWatch(process.pid, memory_bytes=8 * _GIB, time_s=60, max_processes=40)
        try:
            assert process.wait(timeout=20) == -signal.SIGKILL
        finally:
            watch.close()
        assert watch.ended_for == "processes"


def test_wall_time_is_bounded(tmp_path: Path) -> None:
    """Also of a command that only sleeps, and ignores what it can."""
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    with started(code, build_sandbox(tmp_path / "scratch")) as process:
        watch = SandboxWatch(process.pid, memory_bytes=_GIB, time_s=0.5)
        try:
            assert process.wait(timeout=20) == -signal.SIGKILL
        finally:
            watch.close()
        assert watch.ended_for == "time"


def test_processor_time_is_bounded(tmp_path: Path) -> None:
    sandbox = build_sandbox(tmp_path / "scratch", time_s=0.1)
    begun = time.monotonic()
    done = run_inside("while True: pass", sandbox)
    assert done.returncode in (-signal.SIGKILL, -signal.SIGXCPU)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("", 0),
    ],
)
def test_the_end_of_the_command_is_the_end_outside(
    code: str, expected: int, sandbox: Sandbox
) -> None:
    assert run_inside(code, sandbox).returncode == expected


@pytest.mark.parametrize("mode", [None, "user-same-pids", "none"])
def test_nothing_lives_on_when_the_command_ends(mode: str | None, tmp_path: Path) -> None:
    """A daemon that left the session; also where there are no process ids of their own."""
    if mode == "user-same-pids":
        build_sandbox(tmp_path / "scratch")  # skips where no namespaces are
    sandbox = build_sandbox(tmp_path / "scratch", mode=mode)
    mark = f"600.{time.time_ns()}"
    done = run_inside(
        f"""
import subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep({mark})"], start_new_session=True
)
time.sleep(0.5)
print("alive" if child.poll() is None else "gone")
""",
        sandbox,
    )
    assert done.stdout == "alive\n"
    for _ in range(50):
        if not _running(mark):
            return
        time.sleep(0.1)
    pytest.fail("a process of the sandbox is left")


def _running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                return True
    return False


def test_it_ends_with_its_starter(tmp_path: Path) -> None:
    """SIGKILL to the process that holds the sandbox: nothing of it is left."""
    mark = f"600.{time.time_ns()}"
    sandbox = build_sandbox(tmp_path / "scratch")
    command = wrap_command([sys.executable, "-c", f"import time; time.sleep({mark})"], sandbox)
    starter = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"]
    )
    try:
        for _ in range(100):
            if _sleeping(mark):
                break
            time.sleep(0.05)
        assert _sleeping(mark)
    finally:
        starter.kill()
        starter.wait()
    for _ in range(50):
        if not _sleeping(mark):
            return
        time.sleep(0.1)
    pytest.fail("the sandbox outlived its starter")


def _sleeping(mark: str) -> bool:
    """Whether the command itself runs, not only its starter, which carries the same words."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[1:2] == [b"-c"] and words[2] == f"import time; time.sleep({mark})".encode():
                return True
    return False


def test_isolation_says_what_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.serve import sandbox as module

    answers = {"root": "mount /: not permitted", "user": "mount /proc: no", "user-same-pids": None}
    monkeypatch.setattr(module, "_try", lambda mode, needs: answers[mode])
    needs = (Path(f"/{threading.get_ident()}"),)
    found = find_isolation(needs)
    assert found.mode == "user-same-pids"
    assert not found.is_whole
    assert "other processes" in str(found)
    assert "mount /proc: no" in str(found)
    answers["user-same-pids"] = "namespaces: Operation not permitted"
    none = find_isolation((*needs, Path("/other")))
    assert none.mode == "none"
    assert "network and files are within reach" in str(none)


def test_what_cannot_be_read_inside_is_told(tmp_path: Path) -> None:
    sandbox = build_sandbox(tmp_path / "scratch")
    missing = Sandbox(
        isolation=sandbox.isolation,
        scratch=sandbox.scratch,
        needs=(tmp_path / "nothing",),
        memory_bytes=_GIB,
        data_bytes=None,
        time_s=10,
    )
    done = run_inside("print('ran')", missing)
    assert (done.returncode, done.stdout) == (97, "")
    assert "cannot read" in done.stderr


def test_environment_without_secrets(tmp_path: Path) -> None:
    kept = clean_env(
        {
            "HF_TOKEN": "hf_x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "API_KEY": "x",
            "https_proxy": "http://u:p@proxy",
            "GITHUB_TOKEN": "x",
            "TOKENIZERS_PARALLELISM": "false",
            "PATH": "/bin",
            "HOME": "/home/ann",
            "OMP_NUM_THREADS": "2",
        },
        tmp_path,
    )
    assert "x" not in kept.values()
    assert not {"HF_TOKEN", "https_proxy"} & set(kept)
    assert kept["PATH"] == "/bin"
    assert kept["TOKENIZERS_PARALLELISM"] == "false"
    assert kept["PYTHONUSERBASE"] == "/home/ann/.local"
    assert kept["HOME"] == kept["TMPDIR"] == kept["VLLM_CACHE_ROOT"] == str(tmp_path)
