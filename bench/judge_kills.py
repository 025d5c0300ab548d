"""200 times kill -9 at random points of judging processes: what is lost, what is doubled.

    python bench/judge_kills.py [NUM_KILLS]

Once with the queue in SQLite, and once in PostgreSQL where it is installed. Figures go to
bench/results/judge-kills.json. A minute or two on two cores. Only the engines are scripted; see
tests/judge_kills.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from paceline.records import build_provenance, write_json

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from judge_kills import kill_judges  # noqa: E402
from postgres import find_server, start_postgres  # noqa: E402

NUM_KILLS = 200
SEED = 2027


def main() -> None:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS
    runs = {"sqlite": _run(num_kills, None)}
    binaries = find_server()
    if binaries is not None:
        with start_postgres(binaries) as url:
            runs["postgresql"] = _run(num_kills, url)
    print(json.dumps(runs, indent=2))
    provenance = {**build_provenance(seed=SEED), "command": ["bench/judge_kills.py"]}
    write_json(HERE / "results" / "judge-kills.json", {"provenance": provenance, "runs": runs})


def _run(num_kills: int, url: str | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as folder:
        return kill_judges(Path(folder), num_kills=num_kills, url=url, seed=SEED)


if __name__ == "__main__":
    main()
