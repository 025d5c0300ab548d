"""Asks a served target as many clients at once, and holds every answer against the target's own.

Used by a test (few requests) and by a bench (10,000). Requests are chat and completions, streamed
and not, with token ids and without, labelled by category. Narrow questions allow an eighth of
the vocabulary: the target answers greedily with the best of it, and a draft, which does not know,
is hardly ever right.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from process_tree import children_of
from tokenizers import Tokenizer

from paceline.data import open_tokenizer, read_prompts
from paceline.endpoint import Request, Sampling, TokenChoice
from paceline.eval.fidelity import classify_fork, find_fork
from paceline.serve.process import session_members
from paceline.target import TargetFacts

__all__ = [
    "Question",
    "Reply",
    "Served",
    "ask_all",
    "build_questions",
    "compare_replies",
    "narrow_questions",
    "serve_target",
]

KINDS = ("chat", "chat-stream", "completion", "completion-stream")
_SHARE = 8  # of the vocabulary is allowed where a question is narrow


@dataclass(frozen=True, kw_only=True)
class Question:
    """messages, and the greedy request of the same tokens. allowed: tokens of the answer."""

    messages: list[dict[str, str]]
    request: Request
    allowed: tuple[int, ...] | None = None


@dataclass(kw_only=True)
class Reply:
    """What one client got. error: what it was told instead of an answer."""

    number: int
    question: int
    kind: str
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running `paceline serve`."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]

    def backs(self) -> list[int]:
        """Sessions of its vLLM servers."""
        return children_of(self.process.pid)

    def engines(self, backs: Sequence[int]) -> list[int]:
        """Processes that compute: vLLM names its engine core and its worker."""
        found = []
        for back in backs:
            for member in session_members(back):
                with contextlib.suppress(OSError):
                    if b"VLLM::" in Path(f"/proc/{member}/cmdline").read_bytes():
                        found.append(member)
        return found


@contextlib.contextmanager
def serve_target(arguments: Sequence[str], *, start_s: float = 240.0) -> Iterator[Served]:
    """Runs `paceline serve` on a free port until the block ends; no process may be left."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from paceline.cli import main; main()", "serve"]
    process = subprocess.Popen(
        [*command, *arguments, "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_end_with_this,
    )
    served = Served(process=process, port=port, lines=[])
    deadline = time.monotonic() + start_s
    assert process.stdout is not None
    try:
        while not any("is served at" in line for line in served.lines):
            line = process.stdout.readline()
            assert line, f"ended before it served: {served.lines}"
            assert time.monotonic() < deadline
            served.lines.append(line.strip())
        os.set_blocking(process.stdout.fileno(), False)
        yield served
    finally:
        backs = served.backs() if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        with contextlib.suppress(OSError):
            served.lines.extend((process.stdout.read() or "").splitlines())
        assert not any(session_members(back) for back in backs)


def _end_with_this() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a killed test leaves no server


def build_questions(target: TargetFacts, count: int, *, max_tokens: int) -> list[Question]:
    """Of the first `count` bundled prompts."""
    tokenizer = open_tokenizer(target, thinking="off" if target.is_hybrid else "none")
    sampling = Sampling(max_tokens=max_tokens)
    found = []
    for number, prompt in enumerate(read_prompts("train").prompts[:count]):
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt.messages]
        ids = tuple(tokenizer.encode(tokenizer.render(messages, ask=True)))
        request = Request(request_id=str(number), prompt_ids=ids, sampling=sampling)
        found.append(Question(messages=messages, request=request))
    return found


def narrow_questions(questions: Sequence[Question], target: TargetFacts) -> list[Question]:
    """The same ones, each with another eighth of the vocabulary, plain letters alone."""
    tokenizer = Tokenizer.from_file(str(target.path / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    whole = [token for token, text in enumerate(texts) if text.strip() and text.isascii()]
    return [
        replace(question, allowed=tuple(t for t in whole if t % _SHARE == number % _SHARE))
        for number, question in enumerate(questions)
    ]


async def ask_all(
    port: int,
    questions: Sequence[Question],
    *,
    num_requests: int,
    clients: int,
    choose: Callable[[int], int] | None = None,
    on_count: Callable[[int], None] = lambda done: None,
) -> list[Reply]:
    """`clients` at once, each asking its next question as soon as the last is answered.

    choose: number of the request -> number of its question; else all of them in turns.
    """
    replies: list[Reply] = []
    waiting = iter(range(num_requests))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:

        async def client() -> None:
            for number in waiting:
                place = number % len(questions) if choose is None else choose(number)
                kind = KINDS[(number // len(questions) + number) % 4]
                reply = Reply(number=number, question=place, kind=kind)
                await _ask(session, port, questions[place], reply)
                replies.append(reply)
                on_count(len(replies))

        await asyncio.gather(*(client() for _ in range(clients)))
    return replies


async def _ask(session: aiohttp.ClientSession, port: int, question: Question, reply: Reply) -> None:
    """Fills the reply in."""
    request, chat = question.request, reply.kind.startswith("chat")
    body: dict[str, Any] = {"temperature": 0, "max_tokens": request.sampling.max_tokens}
    if chat:
        body |= {"messages": question.messages, "chat_template_kwargs": {"enable_thinking": False}}
    else:
        body["prompt"] = list(request.prompt_ids)
    if question.allowed is not None:
        body["allowed_token_ids"] = list(question.allowed)
    if reply.number % 2 or question.allowed is not None:
        body["return_token_ids"] = True
    if reply.kind.endswith("stream"):
        body["stream"] = True
    path = "chat/completions" if chat else "completions"
    headers = {"X-Paceline-Category": reply.kind}
    begun = time.monotonic()
    try:
        async with session.post(
            f"http://127.0.0.1:{port}/v1/{path}", json=body, headers=headers
        ) as response:
            if response.status != 200:
                reply.error = f"{response.status}: {(await response.text())[:200]}"
            elif "stream" in body:
                await _read_stream(response, reply)
            else:
                choice = (await response.json())["choices"][0]
                reply.text = choice["message"]["content"] if chat else choice["text"]
                reply.ids = choice.get("token_ids") or []
                reply.finish = choice["finish_reason"]
    except aiohttp.ClientError as problem:
        reply.error = repr(problem)
    reply.seconds = time.monotonic() - begun


async def _read_stream(response: aiohttp.ClientResponse, reply: Reply) -> None:
    ended = False
    async for line in response.content:
        text = line.strip()
        if text == b"data: [DONE]":
            ended = True
        elif text.startswith(b"data: "):
            event = json.loads(text[6:])
            if "error" in event:
                reply.error = event["error"]["message"]
                continue
            for choice in event["choices"]:
                reply.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                reply.ids += choice.get("token_ids") or []
                reply.finish = choice["finish_reason"] or reply.finish
    if not ended and reply.error is None:
        reply.error = "the stream broke off"


async def ask_target(port: int, questions: Sequence[Question], *, clients: int) -> list[list[int]]:
    """The answer of the server as it is now (the target alone), as token ids, to each question."""
    answers: dict[int, list[int]] = {}
    waiting = iter(range(len(questions)))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for number in waiting:
                request, allowed = questions[number].request, questions[number].allowed
                more = {} if allowed is None else {"allowed_token_ids": list(allowed)}
                choice = await _complete(
                    session, port, request.prompt_ids, request.sampling, **more
                )
                answers[number] = choice["token_ids"]

        await asyncio.gather(*(client() for _ in range(clients)))
    return [answers[number] for number in range(len(questions))]


async def _complete(
    session: aiohttp.ClientSession,
    port: int,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    **more: Any,
) -> dict[str, Any]:
    body = {"prompt": list(prompt_ids), "temperature": 0, "max_tokens": sampling.max_tokens, **more}
    body["return_token_ids"] = True
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice


async def view_tokens(
    port: int, forks: Sequence[tuple[Sequence[int], tuple[int, int]]]
) -> list[TokenChoice]:
    """How likely each of two tokens is after a prefix, by the server as it is now."""
    found = []
    async with aiohttp.ClientSession() as session:
        for prefix, tokens in forks:
            values = {}
            for token in tokens:
                choice = await _complete(
                    session, port, [*prefix, token], Sampling(max_tokens=1), prompt_logprobs=0
                )
                values[token] = choice["prompt_logprobs"][-1][str(token)]["logprob"]
            best = sorted(values.items(), key=lambda item: -item[1])
            found.append(
                TokenChoice(
                    token_ids=tuple(token for token, _ in best),
                    logprobs=tuple(value for _, value in best),
                )
            )
    return found


async def compare_replies(
    port: int,
    replies: Sequence[Reply],
    questions: Sequence[Question],
    target: TargetFacts,
    *,
    clients: int,
    tolerance: float,
) -> dict[str, Any]:
    """Every reply against what the server, by now the target alone, answers to the same question.

    lost: no answer, or an error; wrong: another text that is no near tie by the target's own view.
    """
    tokenizer = Tokenizer.from_file(str(target.path / "tokenizer.json"))
    answers = await ask_target(port, questions, clients=clients)
    counts: collections.Counter[str] = collections.Counter()
    cases, gaps, texts = [], [], {}
    for reply in replies:
        question = reply.question
        plain = [token for token in answers[question] if token not in target.eos_token_ids]
        if reply.error is not None or reply.finish is None:
            counts["lost"] += 1
            texts.setdefault("lost", f"{reply.kind}: {reply.error}")
            continue
        ids = [token for token in reply.ids if token not in target.eos_token_ids]
        if ids and tokenizer.decode(ids) != reply.text:
            counts["text_differs_from_ids"] += 1
            texts.setdefault("text_differs_from_ids", [reply.text, tokenizer.decode(ids)])
        if reply.text == tokenizer.decode(plain):
            counts["identical"] += 1
            continue
        ids = ids or tokenizer.encode(reply.text, add_special_tokens=False).ids
        place = find_fork(plain, ids)
        if place is None:
            counts["wrong"] += 1
            texts.setdefault("wrong", [reply.kind, reply.text, tokenizer.decode(plain)])
        else:
            cases.append((question, plain, ids, place, reply))
    forks = [
        (questions[question].request.prompt_ids + tuple(plain[:place]), (plain[place], ids[place]))
        for question, plain, ids, place, _ in cases
    ]
    choices = await view_tokens(port, forks)
    for (_, plain, ids, place, reply), choice in zip(cases, choices, strict=True):
        kind, gap = classify_fork(
            choice, plain_token=plain[place], token=ids[place], tolerance=tolerance
        )
        counts["near_tie" if kind == "near_tie" else "wrong"] += 1
        if kind == "near_tie":
            gaps.append(gap)
        else:
            texts.setdefault("wrong", [reply.kind, reply.text, tokenizer.decode(plain), gap])
    seconds = sorted(reply.seconds for reply in replies)
    return {
        "num_requests": len(replies),
        **{key: counts[key] for key in ("identical", "near_tie", "wrong", "lost")},
        "text_differs_from_ids": counts["text_differs_from_ids"],
        "max_gap": max((gap for gap in gaps if gap is not None), default=None),
        "seconds_median": statistics.median(seconds),
        "seconds_p99": seconds[int(0.99 * (len(seconds) - 1))],
        "seconds_max": seconds[-1],
        "first": texts,
    }
