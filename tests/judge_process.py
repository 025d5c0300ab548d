"""A judge's worker as a process of its own, with engines that play written steps.

    python tests/judge_process.py HOME DEVICE LEASE_S [QUEUE_URL]     works until nothing waits

Real judge, real eval, real files and locks; only the engines are scripted, so that a run takes
tens of milliseconds and can be killed anywhere. Prompts carry the word CANARY, which must not be
found in anything that a judge leaves behind.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "unit" / "eval")]

from builders import build_draft, build_target_facts  # noqa: E402
from scripted import (  # noqa: E402
    TARGET,
    Script,
    ScriptedEndpoint,
    build_facts,
    build_memory,
    build_request,
    build_rules,
)
from scripted import build_draft as build_baseline  # noqa: E402

from paceline.endpoint import Answer, Request  # noqa: E402
from paceline.eval import EvalPrompt, measure_run  # noqa: E402
from paceline.judge import (  # noqa: E402
    Court,
    Home,
    Task,
    build_screen,
    open_queue,
    run_worker,
    submit_draft,
)
from paceline.records import read_json, write_json  # noqa: E402

CANARY = "CANARY7f3a"
PROMPTS = [f"{category}-{CANARY}-{i}" for category in ("chat", "code") for i in range(5)]
RULES = build_rules(
    min_tokens_for_tpot="4",
    num_resamples="100",
    num_categories="2",
    families='["eagle3"]',
    name='"demo"',
)
PLAIN = Script(steps=(None,) * 8, num_tokens=9, step_ms=10.0)
SLOW = Script(steps=((1, 3),) * 4, num_tokens=9, step_ms=12.0)
FAST = Script(steps=((3, 3),) * 2, num_tokens=9, step_ms=12.0)
WARM_UP = [build_request("warm-1"), build_request("warm-2")]


class SlowEndpoint(ScriptedEndpoint):
    """Takes a little real time a request, so that there is something to kill."""

    def generate(self, requests: Sequence[Request], **words: Any) -> list[Answer]:
        time.sleep(float(os.environ.get("JUDGE_REQUEST_S", "0")))
        return super().generate(requests, **words)


def open_arm(method: str, scripts: dict[str, Script], memory: int | None) -> SlowEndpoint:
    warm = {request.request_id: Script(steps=(None,), num_tokens=2) for request in WARM_UP}
    facts = build_facts(method, 3 if method != "none" else 0)
    return SlowEndpoint(
        facts, {**warm, **scripts}, memory_facts=build_memory(memory) if memory else None
    )


def measure(task: Task) -> None:
    """One run: a draft with an even hash takes three tokens a step, an odd one one."""
    draft = build_draft_record(task.draft_dir)
    names = list(PROMPTS)
    if task.part == "twin":
        names = [name.replace(CANARY, "twin") for name in names]
    if task.part == "shuffled":
        random.Random(1).shuffle(names)
    script = FAST if int(draft.sha256[:2], 16) % 2 == 0 else SLOW
    measure_run(
        plain=open_arm("none", dict.fromkeys(names, PLAIN), None),
        baseline=open_arm("eagle3", dict.fromkeys(names, SLOW), 900),
        candidate=open_arm("eagle3", dict.fromkeys(names, script), 600),
        drafts={"baseline": build_baseline("base"), "candidate": draft},
        prompts=[
            EvalPrompt(category=name.split("-")[0], request=build_request(name)) for name in names
        ],
        warm_up=WARM_UP,
        rules=RULES,
        target=TARGET,
        out_dir=task.run_dir,
        prompt_set_name="hidden",
    )
    result = read_json(task.run_dir / "result.json")
    (task.run_dir / "engine-candidate.log").write_text(f"asked: {PROMPTS[0]}\n")
    result["samples"] = [{"prompt": PROMPTS[0], "steps": [{"target": CANARY}]}]
    result["notes"] = [*result["notes"], f"slow on {PROMPTS[0]}"]
    write_json(task.run_dir / "result.json", result)


def build_draft_record(folder: Path) -> Any:
    from paceline.draft import read_draft

    return read_draft(folder)


def build_court(
    home: Path, *, device: str = "cpu", lease_s: float = 60.0, url: str | None = None, **more: Any
) -> Court:
    words: dict[str, Any] = {
        "home": Home(path=home),
        "queue": open_queue(home, url),
        "rules": RULES,
        "target": build_target_facts(),
        "screen": build_screen(PROMPTS),
        "measure": measure,
        "devices": (device,),
        "lease_s": lease_s,
        **more,
    }
    return Court(**words)


def add_draft(court: Court, folder: Path, *, team: str, name: str, seed: int) -> Any:
    """Makes a small draft whose weights depend on the seed, and enters it."""
    if not folder.exists():
        from builders import random_bf16

        build_draft(
            folder,
            tensors={"fc.weight": random_bf16(16, 48, seed=1000 + seed)},
            metadata={"name": name},
        )
    return submit_draft(
        str(folder), team=team, home=court.home, queue=court.queue, rules=RULES, fetch=Path
    )


if __name__ == "__main__":
    home_path, device, lease_s, *url = sys.argv[1:]
    court = build_court(
        Path(home_path),
        device=device,
        lease_s=float(lease_s),
        url=url[0] if url else None,
        say=lambda text: print(text, flush=True),
    )
    run_worker(court)
