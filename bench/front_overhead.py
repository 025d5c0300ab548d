"""What `paceline serve` adds to vLLM's own HTTP server, for each streamed token.

    python bench/front_overhead.py [--requests 16] [--max-tokens 128] [--clients 16]

Pocket with its own MTP head on real vLLM. One client alone asks each prompt four times, through the
front and at vLLM's own socket behind it (A B B A); then --clients at once, through the front and at
the socket. Told: time to the first and to each later token on both ways, and the processor time of
the front's thread and of vLLM's HTTP thread for a token and for an event (a step gives one event).
The processor time hardly moves with other work on the machine; the times do. On two cores two
minutes; with --requests 5 --max-tokens 64 --clients 8 forty seconds.
Figures go to bench/results/front-overhead.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from paceline.records import build_provenance, write_json
from paceline.target import read_target

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from serve_load import Question, Served, build_questions, serve_target  # noqa: E402

NUM_WARM_UP = 2


@dataclass(kw_only=True)
class Asked:
    """Streamed answers on one way. Times in ms; num_events: chunks that held a token."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_events: int = 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    target = read_target("pocket")
    count = options.requests + NUM_WARM_UP
    questions = build_questions(target, count, max_tokens=options.max_tokens)
    with serve_target(("pocket", "--draft", "native", "--weak-draft", "tell")) as served:
        found = asyncio.run(measure(served, questions, options))
    print(json.dumps(found, indent=2))
    command = ["bench/front_overhead.py", *sys.argv[1:]]
    record = {"provenance": {**build_provenance(seed=0), "command": command}, **found}
    write_json(HERE / "results" / "front-overhead.json", record)


async def measure(
    served: Served, questions: Sequence[Question], options: argparse.Namespace
) -> dict[str, Any]:
    back = served.backs()[0]
    behind = aiohttp.UnixConnector(path=find_socket(back), limit=0)
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{served.port}") as front,
        aiohttp.ClientSession("http://back", connector=behind) as direct,
    ):
        for question in questions[:NUM_WARM_UP]:
            for session in (front, direct):
                await ask(session, question, Asked())
        alone = {"front": Asked(), "direct": Asked()}
        for question in questions[NUM_WARM_UP:]:
            for way in ("front", "direct", "direct", "front"):
                await ask(front if way == "front" else direct, question, alone[way])
        found = {"alone": {way: summarise(asked) for way, asked in alone.items()}}
        both: dict[str, Any] = {}
        for way, session in (("front", front), ("direct", direct)):
            asked, before = Asked(), (read_cpu_s(served.process.pid), read_cpu_s(back))
            begun = time.monotonic()
            waiting = iter(questions * 4)

            async def client(session: aiohttp.ClientSession, asked: Asked, left: Any) -> None:
                for question in left:
                    await ask(session, question, asked)

            await asyncio.gather(*(client(session, asked, waiting) for _ in range(options.clients)))
            seconds = time.monotonic() - begun
            both[way] = {**summarise(asked), "tokens_a_second": asked.num_tokens / seconds}
            for name, pid, since in zip(
                ("front", "vllm_http"), (served.process.pid, back), before, strict=True
            ):
                spent_us = (read_cpu_s(pid) - since) * 1e6
                both[way][f"{name}_us_a_token"] = spent_us / asked.num_tokens
                both[way][f"{name}_us_an_event"] = spent_us / asked.num_events
        return {**found, "clients": options.clients, "together": both}


def find_socket(pid: int) -> str:
    """Of vLLM's server, out of its command line."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[words.index("--uds") + 1]


def read_cpu_s(pid: int) -> float:
    """Processor time of a process's main thread, which runs its event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def ask(session: aiohttp.ClientSession, question: Question, asked: Asked) -> None:
    request = question.request
    body = {
        "prompt": list(request.prompt_ids),
        "max_tokens": request.sampling.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    begun, times, num_first = time.perf_counter(), [], 0
    async with session.post("/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            count = len(choices[0].get("token_ids") or ()) if choices else 0
            if count:
                times.append(time.perf_counter())
                num_first = num_first or count
                asked.num_tokens += count
                asked.num_events += 1
    asked.ttft_ms.append((times[0] - begun) * 1e3)
    asked.tpot_ms.append((times[-1] - times[0]) * 1e3 / (request.sampling.max_tokens - num_first))


def summarise(asked: Asked) -> dict[str, Any]:
    return {
        "num_requests": len(asked.ttft_ms),
        "num_tokens": asked.num_tokens,
        "num_events": asked.num_events,
        "ttft_ms": median(asked.ttft_ms),
        "tpot_ms": median(asked.tpot_ms),
    }


if __name__ == "__main__":
    main()
