"""Whose greedy text stays a hybrid target's own, with drafts that need no model: on a CPU.

    python bench/hybrid_forks.py --work WORK [--target pocket] [--prompts 200] [--minutes 2.5]

The arms of tests/gpu/test_hybrid_model_free.py (there on CUDA): the target alone, again in another
order, vLLM's own `ngram`, constant-K n-gram and suffix, the native head. Answers lie in WORK as
they come; the same command goes on where it was, so that it can be cut into pieces: after --minutes
it asks nothing more. Last, the target alone is asked for its own view of the first
other token of every text that differs. Table to bench/results/hybrid-forks-cpu.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.draft import Draft
from paceline.endpoint import Answer, Request
from paceline.errors import EngineError
from paceline.records import build_provenance, read_json, write_json
from paceline.serve import Plan, VllmEndpoint, build_plan, find_machine, start
from paceline.serve.endpoint import launch
from paceline.target import TargetFacts, read_target

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "gpu"), str(HERE.parent / "tests")]

from test_hybrid_model_free import (  # noqa: E402
    ARMS,
    K,
    Row,
    build_requests,
    compare,
    find_native,
    has_arctic,
    show,
    write_draft,
)

PLAIN, AGAIN, NATIVE = "no draft", "no draft, again", "native MTP"
PIECE = 24  # prompts asked between two looks at the clock


def main() -> None:
    begun = time.monotonic()
    options = read_options()
    target = read_target(options.target)
    requests = [
        replace(one, sampling=replace(one.sampling, max_tokens=options.max_tokens))
        for one in build_requests(target, options.prompts)
    ]
    assert len({request.prompt_ids for request in requests}) == options.prompts
    made = {
        name: write_draft(spec, options.work / name)
        for name, spec in ARMS.items()
        if name not in options.without
    }
    ours = {name: draft for name, draft in made.items() if name.startswith("constant-K")}
    drafts: dict[str, Draft | None] = {PLAIN: None, **ours}
    if (native := find_native(target)) is not None:
        drafts[NATIVE] = native
    drafts |= {**made, AGAIN: None}
    length = max(len(request.prompt_ids) for request in requests) + options.max_tokens + K + 1
    for name, draft in drafts.items():
        if name == "vLLM's suffix" and not has_arctic():
            write_json(place_of(name, options), {"failure": "not run: no arctic-inference here"})
            continue
        ask(name, plan_arm(target, draft, length, options), requests, options, begun)
        if is_over(begun, options):
            print("time is over: the same command goes on", flush=True)
            return
    rows = judge(target, requests, drafts, length, options)
    print(show(rows))
    write_json(
        HERE / "results" / "hybrid-forks-cpu.json",
        {
            "provenance": build_provenance(),
            "machine": find_machine("cpu"),
            "target": target.name,
            "prompts": options.prompts,
            "max_tokens": options.max_tokens,
            "at_once": options.at_once,
            "threads": options.threads,
            "rows": [asdict(row) for row in rows.values()],
        },
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--without", action="append", default=[], help="An arm to leave out.")
    parser.add_argument("--threads", type=int, default=1, help="Beside other work one is fastest.")
    parser.add_argument("--minutes", type=float, default=1e9)
    return parser.parse_args()


def plan_arm(
    target: TargetFacts, draft: Draft | None, length: int, options: argparse.Namespace
) -> Plan:
    return build_plan(
        target,
        draft,
        device="cpu",
        max_model_len=min(target.max_position_embeddings, length),
        max_num_seqs=options.at_once,
        enforce_eager=True,
        num_threads=options.threads,
    )


def place_of(name: str, options: argparse.Namespace) -> Path:
    work: Path = options.work
    return work / f"{name}.json".replace("/", "-")


def is_over(begun: float, options: argparse.Namespace) -> bool:
    return time.monotonic() - begun > float(options.minutes) * 60


def ask(
    name: str, plan: Plan, requests: Sequence[Request], options: argparse.Namespace, begun: float
) -> None:
    """Answers, some at a time, or why there are none, into the arm's file.

    The plan's own refusal of vLLM's proposers is passed over.
    """
    path = place_of(name, options)
    found = read_json(path) if path.exists() else {"answers": {}}
    left = [request for request in requests if request.request_id not in found.get("answers", ())]
    if "failure" in found or not left:
        return
    if name == AGAIN:
        left.reverse()
    try:
        with launch(plan, log_path=path.with_suffix(".log")) as endpoint:
            for at in range(0, len(left), PIECE):
                if is_over(begun, options):
                    return
                piece = left[at : at + PIECE]
                for answer in endpoint.generate(piece, concurrency=options.at_once):
                    values = asdict(answer)
                    del values["prompt_ids"]
                    found["answers"][answer.request_id] = values
                write_json(path, found)
    except EngineError as problem:
        said = str(problem).partition(" (likely cause")[0].splitlines()[0]
        write_json(path, {"failure": f"failed: {said}"})
    print(f"{name}: {read_json(path).get('failure', 'done')}", flush=True)


def judge(
    target: TargetFacts,
    requests: Sequence[Request],
    drafts: Mapping[str, Draft | None],
    length: int,
    options: argparse.Namespace,
) -> dict[str, Row]:
    found = {name: read_json(place_of(name, options)) for name in drafts}
    plain = read_answers(found.pop(PLAIN), requests)
    rows = {}
    plan = plan_arm(target, None, length, options)
    with start(plan, log_path=options.work / "engine.log") as endpoint:
        for name, one in found.items():
            rows[name] = judge_one(name, one, plain, requests, endpoint)
    return rows


def judge_one(
    name: str,
    found: Mapping[str, Any],
    plain: Sequence[Answer],
    requests: Sequence[Request],
    endpoint: VllmEndpoint,
) -> Row:
    if "failure" in found:
        return Row(name=name, failure=found["failure"])
    return compare(name, plain, read_answers(found, requests), endpoint)


def read_answers(found: Mapping[str, Any], requests: Sequence[Request]) -> list[Answer]:
    answers = []
    for request in requests:
        row = found["answers"][request.request_id]
        values: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in row.items()
        }
        answers.append(Answer(prompt_ids=request.prompt_ids, **values))
    return answers


if __name__ == "__main__":
    main()
