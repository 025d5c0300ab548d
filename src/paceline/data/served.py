"""Answers through any OpenAI-compatible server: `vllm serve` on one GPU, many or other machines.

Standard library HTTP, one completion a request, `concurrency` of them at a time. Prompts go as
token ids. A server that gives back the ids of its answer (vLLM: `return_token_ids`) is taken at its
word; of another one the text is read by the target's own tokenizer, with its end token after it
when the answer ended by itself.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.data.tokens import open_tokenizer
from paceline.endpoint import Answer, Request
from paceline.errors import EngineError, PlanError
from paceline.target import TargetFacts

__all__ = ["ServedTarget", "open_server"]

_TIMEOUT_S = 600.0
_TRIES, _WAIT_S = 4, 1.0
_REASONS = ("stop", "length")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """max_model_len: tokens of prompt and answer that the server takes."""

    max_model_len: int


class ServedTarget:
    """A running server as what `answer_prompts` asks; keeps no connection between calls."""

    def __init__(self, url: str, model: str, target: TargetFacts, *, max_model_len: int) -> None:
        self.facts = Limits(max_model_len=max_model_len)
        self.model = model
        self._url, self._target = url, target
        self._tokenizer = open_tokenizer(target)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int = 1,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        """Answers in request order; on_answer from one thread at a time, as each finishes.

        Raises EngineError when the server fails; a request is tried four times before that, and
        those under way then still end (their answers are not lost), without a further try.
        """
        lock, local, stopping = threading.Lock(), threading.local(), threading.Event()

        def ask(request: Request) -> Answer:
            answer = self._ask(request, local, stopping)
            with lock:
                if on_answer is not None:
                    on_answer(answer)
            return answer

        pool = ThreadPoolExecutor(max_workers=concurrency)
        futures = [pool.submit(ask, request) for request in requests]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
        pool.shutdown()  # those under way end
        return [future.result() for future in futures]

    def _ask(self, request: Request, local: threading.local, stopping: threading.Event) -> Answer:
        sampling = request.sampling
        body = {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "return_token_ids": True,
            "ignore_eos": sampling.ignore_eos,
        }
        if sampling.temperature > 0:
            body |= {"top_p": sampling.top_p, "seed": sampling.seed}
            body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        for attempt in range(_TRIES):
            sent = time.monotonic()
            try:
                found = _post(self._url, body, local)
                break
            except (OSError, http.client.HTTPException) as problem:
                local.connection = None
                if attempt + 1 == _TRIES or stopping.is_set():
                    raise _unreachable(self._url, problem) from None
                time.sleep(_WAIT_S * 2.0**attempt)
        return self._read(request, found, sent)

    def _read(self, request: Request, found: dict[str, Any], sent: float) -> Answer:
        try:
            choice = found["choices"][0]
            reason, text, ids = choice["finish_reason"], choice["text"], choice.get("token_ids")
        except (KeyError, IndexError, TypeError):
            raise EngineError("the server's answer has no choice", where=self._url) from None
        if reason not in _REASONS:
            raise EngineError(
                f"the server ended an answer by {reason!r}",
                where=self._url,
                expected=" or ".join(_REASONS),
            )
        if ids is None:
            ends = self._target.eos_token_ids[:1] if reason == "stop" else ()
            ids = [*self._tokenizer.encode(text), *ends]
        return Answer(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(ids),
            finish_reason=reason,
            sent_at_s=sent,
            chunk_times_s=(time.monotonic(),),
            chunk_tokens=(len(ids),),
        )


def open_server(url: str, target: TargetFacts, *, model: str | None = None) -> ServedTarget:
    """A server by its base URL. Raises PlanError for a bad one, EngineError for a silent one.

    model: which of the served ones is the target; None takes the only one.
    """
    path = _path(url) + "/models"
    connection = _connect(url)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        rows = json.loads(response.read())["data"] if response.status == 200 else []
        served = {str(row["id"]): row for row in rows}
    except (OSError, http.client.HTTPException) as problem:
        raise _unreachable(url, problem) from None
    except (ValueError, KeyError, TypeError):
        served = {}
    finally:
        connection.close()
    if (model is None and len(served) != 1) or (model is not None and model not in served):
        raise EngineError(
            f"the server serves {', '.join(served) or 'no model'}",
            where=url,
            expected=f"the model '{model}'" if model else "one model, or its name with --model",
        )
    name = model or next(iter(served))
    length = served[name].get("max_model_len") or target.max_position_embeddings
    return ServedTarget(url, name, target, max_model_len=int(length))


def _path(url: str) -> str:
    path = urlsplit(url).path.rstrip("/")
    return path if path.endswith("/v1") else path + "/v1"


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PlanError(
            f"{url!r} is no server's address", expected="for example http://127.0.0.1:8000/v1"
        )
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        return kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    except ValueError:
        raise PlanError(f"{url!r} has no usable port") from None


def _post(url: str, body: dict[str, Any], local: threading.local) -> dict[str, Any]:
    """One completion over this thread's own connection, which is kept."""
    connection = getattr(local, "connection", None)
    if connection is None:
        connection = local.connection = _connect(url)
    head = {"Content-Type": "application/json"}
    connection.request("POST", _path(url) + "/completions", json.dumps(body).encode(), head)
    response = connection.getresponse()
    said = response.read()
    if response.status in (429, 500, 502, 503, 504):
        raise http.client.HTTPException(f"{response.status} {said[:200].decode(errors='replace')}")
    if response.status != 200:
        raise EngineError(
            f"the server answered {response.status}: {said[:300].decode(errors='replace')}",
            where=url,
            fix="Check that it serves this target with this context, and takes token ids.",
        )
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EngineError("the server's answer is not JSON", where=url)
    return found


def _unreachable(url: str, problem: Exception) -> EngineError:
    return EngineError(
        f"the server cannot be reached: {problem or type(problem).__name__}",
        where=url,
        fix="Start it, or check its address; the same command goes on with what is missing.",
    )
