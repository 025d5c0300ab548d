"""The operator's address: OpenAI-compatible paths, /health and /metrics, in front of one vLLM.

Completions and chat, streamed or not, survive the loss of the server behind (relay.py). What the
front adds to vLLM: a bound on what it holds, a drain, metrics of its own, and a label of traffic in
the header X-Paceline-Category.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import EngineError
from paceline.serve.conductor import Conductor
from paceline.serve.exposition import FrontMetrics
from paceline.serve.relay import GaveUp, ask_whole, read_tokenizer, relay_stream
from paceline.serve.requests import ONE_TOKEN_ENDS_IT

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["CATEGORY_HEADER", "Front"]

CATEGORY_HEADER = "X-Paceline-Category"
_NO_CATEGORY = "unlabelled"
_CATEGORY = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GENERATING = ("/v1/completions", "/v1/chat/completions")
_PASSED_GET = ("/v1/models", "/version")
_PASSED_POST = ("/tokenize", "/detokenize")
_MAX_BODY_BYTES = 32 * 2**20
_LONGEST_TOKEN = 256  # characters
_RETRY_FULL_S, _RETRY_DRAIN_S = 1, 10


class Front:
    """Answers every request on the public port. is_draining: nothing new is taken."""

    def __init__(
        self,
        conductor: Conductor,
        metrics: FrontMetrics,
        tokenizer_path: Path,
        *,
        dies_on_one_token: bool = False,
    ) -> None:
        self.conductor = conductor
        self.metrics = metrics
        self.num_held = 0
        self.is_started = False
        self.is_draining = False
        self._tokenizer_path = tokenizer_path
        self._dies_on_one_token = dies_on_one_token

    def build_app(self) -> web.Application:
        from aiohttp import web

        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        for path in _PASSED_GET:
            app.router.add_get(path, self._hold)
        for path in (*_GENERATING, *_PASSED_POST):
            app.router.add_post(path, self._hold)
        return app

    async def _health(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        state, current = "ok", self.conductor.current
        if self.is_draining:
            state = "draining"
        elif self.conductor.failure is not None:
            state = "failed"
        elif not self.is_started:
            state = "starting"
        elif current is None:
            state = "changing servers"  # requests are taken and wait
        drafts = self.conductor.has_draft
        found = {
            "status": state,
            "drafts": drafts,
            "draft_helps": not self.conductor.is_weak if drafts else None,
            "acceptance_length": self.conductor.watch.overall.acceptance_length,
            "weak_categories": self.conductor.watch.weak_categories(),
            "held": self.num_held,
        }
        takes = state in ("ok", "changing servers")
        headers = {} if takes else {"Retry-After": str(_RETRY_DRAIN_S)}
        return web.json_response(found, status=200 if takes else 503, headers=headers)

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        current = self.conductor.current
        text = await current.read_metrics() if current is not None else None
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(text=self.metrics.show() + (text or ""), headers=headers)

    async def _hold(self, request: web.Request) -> web.StreamResponse:
        """Takes a request or refuses it; counts it, and turns failures into OpenAI's form."""
        label = request.headers.get(CATEGORY_HEADER, _NO_CATEGORY)
        if not _CATEGORY.fullmatch(label):
            return _error(400, f"{CATEGORY_HEADER}: 1 to 64 letters, digits, '_', '.' or '-'")
        category = self.conductor.watch.note_category(label)
        outcome = "gone"  # what is left when the client breaks off
        refusal = self._refuse()
        if refusal is not None:
            self.metrics.requests.labels(category, "refused").inc()
            return refusal
        self.num_held += 1
        self.metrics.held.set(self.num_held)
        try:
            response, outcome, speculation = await self._answer(request)
            if speculation:
                self.conductor.watch.add_answer(category, speculation)
            return response
        except (GaveUp, EngineError) as problem:
            outcome = "failed"
            return _error(503, str(problem).partition("\n")[0])
        finally:
            self.num_held -= 1
            self.metrics.held.set(self.num_held)
            self.metrics.requests.labels(category, outcome).inc()

    def _refuse(self) -> web.Response | None:
        if self.is_draining:
            return _error(503, "the server is ending", retry_s=_RETRY_DRAIN_S)
        if not self.is_started:
            return _error(503, "the server is starting", retry_s=_RETRY_DRAIN_S)
        most = self.conductor.operation.max_held
        if self.num_held >= most:
            return _error(503, f"{most} requests are held already", retry_s=_RETRY_FULL_S)
        return None

    async def _answer(self, request: web.Request) -> tuple[web.StreamResponse, str, Any]:
        data = await request.read()
        if request.path in _GENERATING:
            body = _read_body(data)
            if body is not None and self._has_one_token(body):
                return _error(400, f"{ONE_TOKEN_ENDS_IT}; send two tokens or more"), "refused", ()
            if body is not None and body.get("stream"):
                return await relay_stream(self.conductor, request, body, self._tokenizer_path)
        whole = await ask_whole(self.conductor, request.method, request.path, request.headers, data)
        return whole.build_response(), whole.outcome, whole.speculation

    def _has_one_token(self, body: dict[str, Any]) -> bool:
        """Whether a prompt of the request would kill the engine for everyone."""
        prompt = body.get("prompt")
        if not self._dies_on_one_token or not isinstance(prompt, (str, list)):
            return False
        several = isinstance(prompt, list) and any(isinstance(part, (str, list)) for part in prompt)
        for one in prompt if several else [prompt]:
            if isinstance(one, str) and len(one) <= _LONGEST_TOKEN:
                one = read_tokenizer(self._tokenizer_path).encode(one).ids
            if isinstance(one, list) and len(one) == 1:
                return True
        return False


def _read_body(data: bytes) -> dict[str, Any] | None:
    """The request as an object; None for what vLLM shall refuse in its own words."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not isinstance(body.get("stream_options") or {}, dict):
        return None
    return body


def _error(status: int, message: str, *, retry_s: int | None = None) -> web.Response:
    from aiohttp import web

    kind = "invalid_request_error" if status < 500 else "unavailable"
    headers = {} if retry_s is None else {"Retry-After": str(retry_s), "Connection": "close"}
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}},
        status=status,
        headers=headers,
    )
