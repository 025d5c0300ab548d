"""What else a machine did while a block ran: other processes on the CPU, clocks on the GPU.

A time measured beside someone else's work, or on a GPU that slowed itself down, is no time of the
draft. The watch runs in a thread of the harness and asks little: once or twice a second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.rules import Rules

__all__ = ["Watch", "find_disturbance", "parse_gpu_log", "watch_load"]

_INTERVAL_S = 0.5
_GPU_INTERVAL_MS = 100
_GPU_FIELDS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
# NVML's bits: hardware slowdown, software thermal, hardware thermal, power brake. A power cap (4)
# is the normal state of a GPU under load and no reason.
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80


@dataclass(kw_only=True)
class Watch:
    """Readings while the block ran; `record` is the finished summary, JSON-ready.

    Shares are of all CPUs that this process may use, 1.0 when every one of them is busy.
    """

    started_s: float
    busy: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def watch_load(*, gpu: bool = False, root: int | None = None) -> Iterator[Watch]:
    """Watches while the block runs. root: whose descendants are ours; this process by default."""
    watch = Watch(started_s=time.monotonic())
    stop = threading.Event()
    root = os.getpid() if root is None else root
    thread = threading.Thread(target=_sample, args=(watch, stop, root), daemon=True)
    thread.start()
    with _gpu_log(gpu) as log:
        try:
            yield watch
        finally:
            stop.set()
            thread.join()
            watch.record = {
                "seconds": time.monotonic() - watch.started_s,
                "num_readings": len(watch.others),
                "busy_share": statistics.mean(watch.busy) if watch.busy else None,
                "other_share": statistics.mean(watch.others) if watch.others else None,
                "max_other_share": max(watch.others, default=None),
                "gpu": None,
            }
    if log is not None:
        watch.record["gpu"] = parse_gpu_log("".join(log))


def find_disturbance(
    load: Mapping[str, Any], pair: Mapping[str, Any] | None, rules: Rules
) -> str | None:
    """Why a block does not count, or None. pair: the load of the block it is compared with."""
    other, limit = load["other_share"], rules.protocol.max_other_cpu_share
    if other is not None and other > limit:
        return f"other processes took {other:.0%} of the CPU, at most {limit:.0%} may be"
    gpu = load["gpu"]
    if not gpu:
        return None
    if gpu["throttled_share"]:
        return f"the GPU slowed itself down in {gpu['throttled_share']:.0%} of the readings"
    theirs = (pair or {}).get("gpu")
    if theirs and theirs["sm_mhz"] and gpu["sm_mhz"]:
        apart = abs(gpu["sm_mhz"] / theirs["sm_mhz"] - 1)
        if apart > rules.protocol.max_clock_difference:
            return f"the GPU's clock was {apart:.1%} off the other arm's"
    return None


def parse_gpu_log(text: str) -> dict[str, Any] | None:
    """Summary of nvidia-smi's CSV lines (_GPU_FIELDS, no header, no units); None without any."""
    rows = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5:
            with contextlib.suppress(ValueError):
                reasons = int(parts[4], 0)
                rows.append((*(float(part) for part in parts[:4]), reasons))
    if not rows:
        return None
    sm, memory, temperature, power, _ = zip(*rows, strict=True)
    return {
        "num_readings": len(rows),
        "sm_mhz": statistics.median(sm),
        "min_sm_mhz": min(sm),
        "memory_mhz": statistics.median(memory),
        "max_temperature_c": max(temperature),
        "mean_power_w": statistics.mean(power),
        "throttled_share": sum(1 for row in rows if int(row[4]) & _THROTTLED) / len(rows),
    }


def _sample(watch: Watch, stop: threading.Event, root: int) -> None:
    before = _read_cpu(root)
    while not stop.wait(_INTERVAL_S):
        after = _read_cpu(root)
        if before is None or after is None:
            return
        total = after[0] - before[0]
        if total > 0:
            busy = (after[1] - before[1]) / total
            # processes that ended since keep their time to themselves
            ours = max(0.0, after[2] - before[2]) / total
            watch.busy.append(busy)
            watch.others.append(max(0.0, busy - ours))
        before = after


def _read_cpu(root: int) -> tuple[float, float, float] | None:
    """(all, busy, ours) in clock ticks of the CPUs we may use; None where /proc is not Linux's."""
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    total = busy = 0.0
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, *rest = line.split()
        if name in names:
            ticks = [float(value) for value in rest[:8]]  # guests are inside user
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle and waiting for a disk
    return total, busy, _own_ticks(root)


def _own_ticks(root: int) -> float:
    """User and system time of a process and all that descend from it, dead children included."""
    parents: dict[int, int] = {}
    ticks: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        number = int(path.parent.name)
        parents[number] = int(fields[1])
        ticks[number] = sum(float(value) for value in fields[11:15])
    ours = {root}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(pid, 0.0) for pid in ours)


@contextlib.contextmanager
def _gpu_log(wanted: bool) -> Iterator[list[str] | None]:
    """Lines of nvidia-smi while the block runs, filled in at the end; None without it."""
    command = shutil.which("nvidia-smi") if wanted else None
    if command is None:
        yield None
        return
    lines: list[str] = []
    process = subprocess.Popen(
        [
            command,
            f"--query-gpu={_GPU_FIELDS}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={_GPU_INTERVAL_MS}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        process.terminate()
        process.wait()
        reader.join(timeout=5)
