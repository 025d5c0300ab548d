"""Seconds and memory of `paceline demo`: 360 s and 6 GB are what a laptop's user was promised.

    python bench/demo_cost.py

Memory is the proportional set size (shared pages counted once) of the command and all its children,
sampled twice a second. Prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S, LIMIT_BYTES = 360, 6 * 10**9


def family(root: int) -> set[int]:
    """A process and all its descendants."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def proportional_bytes(pids: set[int]) -> int:
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total * 1024


def main() -> None:
    command = str(Path(sys.executable).with_name("paceline"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo"
        began, peak = time.monotonic(), 0
        with subprocess.Popen(
            [command, "demo", "--out", str(out)], stdout=subprocess.DEVNULL
        ) as process:
            while process.poll() is None:
                peak = max(peak, proportional_bytes(family(process.pid)))
                time.sleep(0.5)
        seconds = time.monotonic() - began
        if process.returncode:
            sys.exit(f"paceline demo ended with {process.returncode}")
        result = json.loads((out / "run" / "result.json").read_text())
    arms = {
        name: {"tau": round(arm["tau"]["value"], 3), "tpot_ms": round(arm["tpot_ms"]["geomean"], 2)}
        for name, arm in result["arms"].items()
    }
    figures = {
        "demo_s": round(seconds, 1),
        "demo_peak_bytes": peak,
        "within_promise": seconds <= LIMIT_S and peak <= LIMIT_BYTES,
        "score": round(result["score"]["value"], 2),
        "arms": arms,
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
