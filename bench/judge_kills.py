"""200 times kill -9 at random points of judging processes: what is lost, what is doubled.

    python bench/judge_kills.py [NUM_KILLS] [QUEUE_URL]

Figures go to bench/results/judge-kills.json. About a minute on two cores. Only the engines are
scripted; see tests/judge_kills.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from paceline.records import build_provenance, read_json, write_json

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from judge_kills import kill_judges  # noqa: E402

NUM_KILLS = 200
SEED = 2027


def main() -> None:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS
    url = sys.argv[2] if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as folder:
        figures = kill_judges(Path(folder), num_kills=num_kills, url=url, seed=SEED)
    print(json.dumps(figures, indent=2))
    path = HERE / "results" / "judge-kills.json"
    record = read_json(path) if path.exists() else {"provenance": {}, "runs": {}}
    record["provenance"] = build_provenance(seed=SEED)
    record["provenance"]["command"] = ["bench/judge_kills.py", str(num_kills)]
    record["runs"][figures["queue"]] = figures
    write_json(path, record)


if __name__ == "__main__":
    main()
