"""Kills judges at random and counts what is left: used by a test (few) and by a bench (many).

Workers and submitting processes are forked from one process that has everything imported, so that
a kill lands in their work and not in Python's start. Half the kills come at a random time, half at
a random function call inside the judge, so that the short steps are hit as well as the long ones.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from judge_process import PROMPTS, add_draft, build_court

from paceline.errors import DraftError
from paceline.judge import list_entries, parse_lines, read_ledger, run_worker
from paceline.judge.ledger import read_key, read_lines
from paceline.judge.tables import Queue, open_queue
from paceline.records import read_json, read_jsonl

__all__ = ["kill_judges"]

_FORK = multiprocessing.get_context("fork")
_LEASE_S = 0.5
_Point = tuple[str, tuple[str, ...], int]
# (files, calls in them for one submission, calls in them for two measured entries)
_FINE = (("worker", "queue", "publish", "ledger", "home", "tables", "submit"), 70, 350)
_COARSE = (("staging", "records"), 350, 9000)
# where two things become true, one after the other: kills soon after these begin
_CRITICAL = {
    "work": ("claim_entry", "publish_entry", "write_private", "finish_entry", "_append_line",
             "export_lines", "clear_work_dir", "_swap"),
    "submit": ("stage_folder", "read_key", "add_entry", "_append_line", "export_lines"),
}  # fmt: skip
_SOON = 40


def _die_at(folder: Path, begin: str, names: tuple[str, ...], call: int) -> None:
    """Kills this process at the `call`-th function call in these files after `begin` was entered.

    begin: a function of the judge, "" for at once. Where it ended is noted.
    """
    left, has_begun = call, not begin
    rooms = {"records": "paceline"}
    places = tuple(f"/{rooms.get(name, 'judge')}/{name}.py" for name in names)

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal left, has_begun
        code = frame.f_code
        has_begun = has_begun or (event == "call" and code.co_name == begin)
        if has_begun and code.co_filename.endswith(places):
            left -= event in ("call", "c_call", "c_return")
            if left <= 0:
                sys.setprofile(None)
                _mark(folder, f"{Path(code.co_filename).stem}.{begin or code.co_name}")
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def _mark(folder: Path, text: str) -> None:
    with open(folder / f"step-{os.getpid()}", "w") as file:
        file.write(text)


def _work(home: Path, device: str, url: str | None, die_at: _Point | None) -> None:
    os.environ["JUDGE_REQUEST_S"] = "0.002"
    if die_at:
        _die_at(home.parent, *die_at)
    court = build_court(
        home,
        device=device,
        lease_s=_LEASE_S,
        url=url,
        say=lambda text: _mark(home.parent, " ".join(text.split()[2:3])),
    )
    run_worker(court)


def _enter(home: Path, url: str | None, numbers: list[int], die_at: _Point | None) -> None:
    """Enters each draft under two teams' names; the second is always refused."""
    if die_at:
        _die_at(home.parent, *die_at)
    _mark(home.parent, "entering")
    court = build_court(home, url=url)
    for number in numbers:
        for team in random.sample(["left", "right"], 2):
            folder = home.parent / f"draft-{number}"
            with contextlib.suppress(DraftError):
                add_draft(court, folder, team=team, name=f"{team} {number}", seed=number)


def kill_judges(
    folder: Path,
    *,
    num_kills: int,
    num_workers: int = 2,
    url: str | None = None,
    seed: int = 0,
    deadline_s: float = 600.0,
) -> dict[str, Any]:
    """Runs workers and submitters, kills `num_kills` of them, lets the rest end; the figures."""
    rng = random.Random(seed)
    home = folder / "judge"
    queue = open_queue(home, url)
    began = time.monotonic()
    numbers: list[int] = []
    for number in range(6):  # their folders are made before anything can be killed
        _prepare(folder, number)
        numbers.append(number)
    running: dict[str, Any] = {}
    kills: Counter[str] = Counter()
    try:
        while True:
            killing = sum(kills.values()) < num_kills
            assert time.monotonic() - began < deadline_s, "the judge did not come to its end"
            for name in [*(f"cpu:{i}" for i in range(num_workers)), "submit"]:
                if name in running and running[name].is_alive():
                    continue
                _count(running.pop(name, None), folder, kills)
                if killing and len(numbers) < 6 + sum(kills.values()) // 3 and name == "submit":
                    _prepare(folder, len(numbers))
                    numbers.append(len(numbers))
                die_at = _choose_point(rng, name) if killing and rng.random() < 0.6 else None
                words = (home, url, numbers[-4:] if killing else numbers, die_at)
                if name == "submit":
                    running[name] = _FORK.Process(target=_enter, args=words)
                else:
                    running[name] = _FORK.Process(target=_work, args=(home, name, url, die_at))
                running[name].start()
            is_over = not killing and _is_over(queue, numbers)
            queue.engine.dispose()  # no open connection is taken into the next fork
            if is_over:
                break
            time.sleep(rng.uniform(0.0, 0.25))
            if killing:
                name = rng.choice(sorted(running))
                if rng.random() < (0.2 if name == "submit" else 0.5):
                    running[name].kill()  # SIGKILL; nothing where it has ended by itself
                    running[name].join()
        for process in running.values():
            process.join()
    finally:
        for process in running.values():
            process.kill()
    found = _count_results(folder, queue)
    return {
        "num_kills": sum(kills.values()),
        "killed_while": dict(sorted(kills.items())),
        "num_workers": num_workers,
        "queue": "postgresql" if url else "sqlite",
        "seconds": round(time.monotonic() - began, 1),
        "num_drafts": len(numbers),
        **found,
    }


def _choose_point(rng: random.Random, name: str) -> _Point:
    kind = "submit" if name == "submit" else "work"
    if rng.random() < 0.5:
        everything = (*_FINE[0], *_COARSE[0])
        return rng.choice(_CRITICAL[kind]), everything, rng.randrange(1, _SOON)
    names, to_submit, to_measure = _FINE if rng.random() < 0.7 else _COARSE
    return "", names, rng.randrange(1, to_submit if kind == "submit" else to_measure)


def _prepare(folder: Path, number: int) -> None:
    from builders import build_draft, random_bf16

    weights = {"fc.weight": random_bf16(16, 48, seed=1000 + number)}
    build_draft(folder / f"draft-{number}", tensors=weights, metadata={"name": str(number)})


def _count(process: Any, folder: Path, kills: Counter[str]) -> None:
    if process is None:
        return
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), f"a process ended with {process.exitcode}"
    step = folder / f"step-{process.pid}"
    if process.exitcode == -signal.SIGKILL:
        kills[step.read_text() if step.exists() and step.read_text() else "starting"] += 1
    step.unlink(missing_ok=True)


def _is_over(queue: Queue, numbers: list[int]) -> bool:
    entries = list_entries(queue)
    return len(entries) == len(numbers) and all(entry.state == "done" for entry in entries)


def _count_results(folder: Path, queue: Queue) -> dict[str, Any]:
    """Looks at everything that the killed judges left."""
    home = build_court(folder / "judge").home
    entries, lines = list_entries(queue), read_ledger(queue)
    bodies = parse_lines(lines, where="ledger", key=read_key(home.key_path))
    answered = [
        Counter(
            (row["arm"], row["id"])
            for row in read_jsonl(home.private_dir(entry.content_sha256) / "hidden.jsonl")
            if row["kind"] == "answer"
        )
        for entry in entries
    ]
    wrong = 0
    for entry in entries:
        result = read_json(home.result_dir(entry.content_sha256) / "result.json")
        is_fast = int(result["arms"]["candidate"]["draft"]["sha256"][:2], 16) % 2 == 0
        wrong += result["ratios"]["tau"]["value"] != (2.0 if is_fast else 1.0)
    left = [*(home.path / "work").iterdir(), *(home.path / "results").glob(".*")]
    return {
        "num_entries": len(entries),
        "num_results": len(bodies),
        "num_lost": sum(len(PROMPTS) * 3 - len(counter) for counter in answered)
        + len(entries)
        - len({body["content_sha256"] for body in bodies}),
        "num_doubled": sum(sum(counter.values()) - len(counter) for counter in answered)
        + len(bodies)
        - len({body["content_sha256"] for body in bodies}),
        "num_wrong": wrong,
        "num_takeovers": sum(entry.takeovers for entry in entries),
        "ledger_file_is_whole": read_lines(home.ledger_path) == lines,
        "left_over": [path.name for path in left],
    }


if __name__ == "__main__":
    print(json.dumps(kill_judges(Path(sys.argv[1]), num_kills=int(sys.argv[2])), indent=2))
