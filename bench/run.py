"""make bench: every benchmark in turn; figures go to bench/results/<machine>.json.

Timings here are single runs on whatever machine this is. They are for reading, not for tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from paceline.records import build_provenance, write_json

HERE = Path(__file__).resolve().parent
BENCHES = (
    "engine_cost.py",
    "train_throughput.py",
    "demo_cost.py",
    "validate_cost.py",
    "fuzz_readers.py",
)


def main() -> None:
    record = {"provenance": build_provenance(), "benches": {}}
    for name in BENCHES:
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(HERE / name)], stdout=subprocess.PIPE, text=True, check=True
        )
        print(done.stdout)
        text = done.stdout[done.stdout.index("{") :] if "{" in done.stdout else "{}"
        record["benches"][name] = {
            "seconds": round(time.monotonic() - began, 1),
            "figures": json.loads(text),
        }
    cores = record["provenance"]["machine"].replace(", ", "-").replace(" ", "-")
    path = HERE / "results" / f"{cores}.json"
    write_json(path, record)
    print(f"kept in {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
