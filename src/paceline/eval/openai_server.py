"""Times of one request to a running OpenAI-compatible server, whatever engine it is.

Standard library HTTP, one streamed completion at a time. A chunk may hold several tokens, so tokens
are counted by the server's own usage, never by chunks.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from paceline.endpoint import Request
from paceline.errors import EngineError, PlanError
from paceline.eval.bench import Ask, Timing

__all__ = ["ask_server", "complete_ids", "exchange", "find_model"]

_TIMEOUT_S = 600.0


def find_model(url: str) -> str:
    """Name of the first model that the server serves."""
    status, body = exchange(url, "GET", "/models")
    try:
        names = [row["id"] for row in json.loads(body)["data"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        names = []
    if not names:
        raise EngineError(
            "the server names no model",
            where=f"{url}/models",
            fix="Give the base URL of an OpenAI-compatible server, or name the model.",
        )
    return str(names[0])


def ask_server(url: str, model: str) -> Ask:
    """One streamed completion at a time; the prompt goes as token ids."""

    def ask(request: Request) -> Timing:
        body = {
            **_build_body(model, request),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection, path = _connect(url)
        data = json.dumps(body).encode()
        try:
            sent = time.monotonic()
            connection.request(
                "POST", f"{path}/completions", data, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(300).decode(errors="replace")
                raise EngineError(
                    f"the server answered {response.status}: {said}",
                    where=url,
                    fix="Check the model's name, and that prompt and answer fit its context.",
                )
            return _read_stream(response, sent, url)
        except (OSError, http.client.HTTPException) as problem:
            raise _unreachable(url, problem) from None
        finally:
            connection.close()

    return ask


def complete_ids(url: str, model: str, request: Request) -> tuple[list[int], str]:
    """(tokens of the answer, why it ended) from a server that hands out token ids, as vLLM does."""
    asked = {**_build_body(model, request), "return_token_ids": True}
    _, body = exchange(url, "POST", "/completions", asked)
    try:
        choice = json.loads(body)["choices"][0]
        return [int(token) for token in choice["token_ids"]], str(choice["finish_reason"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise EngineError(
            f"the server gave no token ids: {body[:300].decode(errors='replace')}",
            where=url,
            expected="a completion with token_ids, as vLLM gives it",
        ) from None


def _build_body(model: str, request: Request) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.sampling.max_tokens,
        "temperature": request.sampling.temperature,
        "ignore_eos": request.sampling.ignore_eos,
    }


def _read_stream(response: http.client.HTTPResponse, sent: float, url: str) -> Timing:
    times: list[float] = []
    tokens = None
    for event in _events(response):
        choices = event.get("choices") or []
        if choices and (choices[0].get("text") or choices[0].get("token_ids")):
            times.append(time.monotonic())
        usage = event.get("usage")
        if usage:
            tokens = usage.get("completion_tokens")
        if event.get("error"):
            raise EngineError(f"the server broke off: {event['error']}", where=url)
    if not times or not isinstance(tokens, int):
        raise EngineError(
            "the server streamed no tokens" if not times else "the server gave no usage",
            where=url,
            expected="a streamed completion whose last event counts its tokens",
        )
    # tokens that came with the first chunk are not known; one is assumed
    several = tokens > 1 and len(times) > 1
    return Timing(
        ttft_ms=(times[0] - sent) * 1000.0,
        latency_ms=(times[-1] - sent) * 1000.0,
        tpot_ms=(times[-1] - times[0]) * 1000.0 / (tokens - 1) if several else None,
        num_tokens=tokens,
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for raw in response:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == b"[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def exchange(
    url: str, method: str, path: str, body: Mapping[str, Any] | None = None
) -> tuple[int, bytes]:
    """(status, whole answer) of one request. Raises EngineError where nobody answers."""
    connection, root = _connect(url)
    data: bytes | None = None
    headers: dict[str, str] = {}
    if body is not None:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        connection.request(method, root + path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as problem:
        raise _unreachable(url, problem) from None
    finally:
        connection.close()


def _connect(url: str) -> tuple[http.client.HTTPConnection, str]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PlanError(
            f"{url!r} is no server's address", expected="for example http://127.0.0.1:8000/v1"
        )
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = parts.path.rstrip("/")
    path = path if path.endswith("/v1") else path + "/v1"
    try:
        return kind(parts.hostname, parts.port, timeout=_TIMEOUT_S), path
    except ValueError:
        raise PlanError(f"{url!r} has no usable port") from None


def _unreachable(url: str, problem: Exception) -> EngineError:
    return EngineError(
        f"the server cannot be reached: {problem or type(problem).__name__}",
        where=url,
        fix="Start it, or check its address.",
    )
