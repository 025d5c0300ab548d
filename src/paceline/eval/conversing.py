"""Questions to a served model as conversations, and answers without the thought before them.

Two ways: an Endpoint, or the chat completions of any OpenAI-compatible server. Both are greedy and
say whether an answer was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.data import ChatTokenizer, Thinking
from paceline.endpoint import Answer, Endpoint, Request, Sampling
from paceline.errors import EngineError, PlanError
from paceline.eval.openai_server import exchange

__all__ = ["Converse", "Reply", "converse_endpoint", "converse_server", "strip_thinking"]

_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT = re.compile(re.escape(_OPEN) + ".*?" + re.escape(_CLOSE), re.DOTALL)

Message = dict[str, str]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """text: the answer after its thought, empty where a thought never ended.

    is_cut: it ran into max_tokens. num_tokens: delivered, thought included; None where the server
    does not count. has_thought: something was stripped.
    """

    text: str
    is_cut: bool
    num_tokens: int | None
    has_thought: bool


Converse = Callable[[Sequence[Sequence[Message]], int], list[Reply]]


def strip_thinking(text: str, *, opened: bool = False) -> tuple[str, bool]:
    """(answer, whether a thought was there). opened: the prompt itself opened the thought.

    A closing tag without an opening one ends a thought that the prompt opened. A thought that is
    never closed leaves no answer: what stands in it was never meant as one.
    """
    close, begin = text.find(_CLOSE), text.find(_OPEN)
    if opened or (close >= 0 and (begin < 0 or close < begin)):
        text = _OPEN + text
    rest = _THOUGHT.sub("", text)
    answer, unclosed, _ = rest.partition(_OPEN)
    return answer.strip(), bool(unclosed) or rest != text


def converse_endpoint(
    endpoint: Endpoint,
    tokenizer: ChatTokenizer,
    *,
    concurrency: int = 8,
    on_progress: Progress = lambda done, total: None,
) -> Converse:
    """Asks a started engine, several questions at a time.

    Raises PlanError for a question that leaves no room for an answer.
    """

    def converse(questions: Sequence[Sequence[Message]], max_tokens: int) -> list[Reply]:
        room = endpoint.facts.max_model_len
        requests, opened = [], []
        for number, messages in enumerate(questions):
            text = tokenizer.render(messages, ask=True)
            ids = tokenizer.encode(text)
            if len(ids) >= room:
                raise PlanError(
                    f"a question takes {len(ids):,} tokens",
                    where=tokenizer.target.name,
                    expected=f"less than {room:,}, the context it is served with",
                )
            # counted from the end, as a template may close an earlier turn's thought
            opened.append(text.rfind(_OPEN) > text.rfind(_CLOSE))
            sampling = Sampling(max_tokens=min(max_tokens, room - len(ids)))
            requests.append(Request(request_id=str(number), prompt_ids=ids, sampling=sampling))
        done = 0

        def count(answer: Answer) -> None:
            nonlocal done
            done += 1
            on_progress(done, len(requests))

        answers = endpoint.generate(requests, concurrency=concurrency, on_answer=count)
        return [
            _read_answer(answer, tokenizer, opened=is_opened)
            for answer, is_opened in zip(answers, opened, strict=True)
        ]

    return converse


def _read_answer(answer: Answer, tokenizer: ChatTokenizer, *, opened: bool) -> Reply:
    ids = list(answer.output_ids)
    while ids and ids[-1] in tokenizer.target.eos_token_ids:
        ids.pop()
    text, has_thought = strip_thinking(tokenizer.decode(ids), opened=opened)
    return Reply(
        text=text,
        is_cut=answer.finish_reason == "length",
        num_tokens=len(answer.output_ids),
        has_thought=has_thought,
    )


def converse_server(
    url: str,
    model: str,
    *,
    thinking: Thinking = "none",
    concurrency: int = 8,
    on_progress: Progress = lambda done, total: None,
) -> Converse:
    """Asks a running OpenAI-compatible server by its chat completions.

    A server with a reasoning parser sends the thought apart, which is left out; one without sends
    it in the answer, and it is stripped. Raises EngineError.
    """

    def ask(messages: Sequence[Message], max_tokens: int) -> Reply:
        body: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0.0,
        }
        if thinking != "none":
            body["chat_template_kwargs"] = {"enable_thinking": thinking == "on"}
        status, data = exchange(url, "POST", "/chat/completions", body)
        if status != 200:
            raise EngineError(
                f"the server answered {status}: {data[:300].decode(errors='replace')}",
                where=url,
                fix="Check the model's name, and that question and answer fit its context.",
            )
        return _read_reply(data, url)

    def converse(questions: Sequence[Sequence[Message]], max_tokens: int) -> list[Reply]:
        replies: list[Reply] = []
        with ThreadPoolExecutor(concurrency) as pool:
            jobs = [pool.submit(ask, messages, max_tokens) for messages in questions]
            try:
                for job in jobs:
                    replies.append(job.result())
                    on_progress(len(replies), len(jobs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return replies

    return converse


def _read_reply(data: bytes, url: str) -> Reply:
    try:
        body = json.loads(data)
        choice = body["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        apart = message.get("reasoning") or message.get("reasoning_content")
        text, has_thought = strip_thinking(message.get("content") or "")
        tokens = (body.get("usage") or {}).get("completion_tokens")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise EngineError(
            "the server's answer is no chat completion",
            where=url,
            expected="choices with a message and a finish_reason",
        ) from None
    if reason not in ("stop", "length"):
        raise EngineError(
            f"an answer ended by {reason!r}", where=url, expected='"stop" or "length"'
        )
    return Reply(
        text=text,
        is_cut=reason == "length",
        num_tokens=tokens if isinstance(tokens, int) else None,
        has_thought=has_thought or bool(apart),
    )
