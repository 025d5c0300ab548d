"""Load on `paceline serve` while the server behind it dies or its draft stops helping.

    python bench/serve_load.py [EVENT ...] [--requests 2500] [--clients 32] [--max-tokens 8]

Pocket with its own MTP head. Each event is one run of its own: `engine` (kill -9 of the engine),
`server` (kill -9 of vLLM's HTTP server), `hang` (the engine is stopped and never goes on), `weak`
(a minimum that the draft does not keep), `spare` (kill -9 of the engine with `--beside`),
`collapse` (the traffic changes: what is asked from there on allows an eighth of the vocabulary, the
target's answers are the best of it, and the draft is hardly ever right). It comes after two fifths
of the requests; afterwards every answer is held against the target's own. On two quiet cores 10,000
requests take six to eight minutes. Figures go to bench/results/serve-load.json, each event's under
its name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from paceline.records import build_provenance, read_json, write_json
from paceline.target import read_target

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from serve_load import (  # noqa: E402
    Served,
    ask_all,
    build_questions,
    compare_replies,
    narrow_questions,
    serve_target,
)

EVENTS = ("engine", "server", "hang", "weak", "spare", "collapse")
OUT = HERE / "results" / "serve-load.json"
TOLERANCE = 0.5  # nats, as in the rules for pocket
SERVE = ("pocket", "--draft", "native", "--weak-draft", "switch")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("events", nargs="*", default=EVENTS)
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=8)
    options = parser.parse_args()
    for event in options.events:
        found = _run(event, options)
        print(json.dumps({event: found}, indent=2), flush=True)
        before = read_json(OUT)["events"] if OUT.exists() else {}
        provenance = {**build_provenance(seed=0), "command": ["bench/serve_load.py"]}
        write_json(OUT, {"provenance": provenance, "events": {**before, event: found}})


def _run(event: str, options: argparse.Namespace) -> dict[str, Any]:
    target = read_target("pocket")
    count = min(options.requests // 8, 300)
    questions = build_questions(target, count, max_tokens=options.max_tokens)
    begin = options.requests * 2 // 5  # of the event
    if event == "collapse":
        questions += narrow_questions(questions, target)

    def choose(number: int) -> int:
        return number % count + (count if event == "collapse" and number >= begin else 0)

    # pocket accepts about 2.5 tokens a step: no draft of K = 3 keeps 3.9 for long
    more = {
        "weak": ("--min-acceptance", "3.9", "--window", "1500"),
        "hang": ("--silence", "10"),
        "spare": ("--beside",),
        "collapse": ("--min-acceptance", "1.5", "--window", "1500"),
    }
    with serve_target((*SERVE, *more.get(event, ()))) as served:
        at: list[float] = []
        lengths: list[float | None] = []

        def look(done: int) -> None:
            if done == begin:
                at.append(time.monotonic())
                lengths.append(_read_health(served)["acceptance_length"])
                _strike(event, served)

        begun = time.monotonic()
        replies = asyncio.run(
            ask_all(
                served.port,
                questions,
                num_requests=options.requests,
                clients=options.clients,
                choose=choose,
                on_count=look,
            )
        )
        seconds = time.monotonic() - begun
        found = asyncio.run(
            compare_replies(served.port, replies, questions, target, clients=8, tolerance=TOLERANCE)
        )
    return {
        "clients": options.clients,
        "max_tokens": options.max_tokens,
        "requests_a_second": options.requests / seconds,
        "before_event_a_second": begin / (at[0] - begun) if at else None,
        "acceptance_length_before": lengths[0] if lengths else None,
        **found,
        "said": served.lines,
    }


def _read_health(served: Served) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/health", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _strike(event: str, served: Served) -> None:
    number = {"engine": 9, "spare": 9, "server": 9, "hang": signal.SIGSTOP}
    if event in number:
        # the first server is the one that answers; the spare came after it
        hit = served.backs()[:1] if event == "server" else served.engines(served.backs()[:1])
        for pid in hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number[event])


if __name__ == "__main__":
    main()
