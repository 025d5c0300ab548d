"""A real HTTP server that streams completions as OpenAI-compatible servers do."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

__all__ = ["completion_server"]


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers in chunks of two tokens, `gap_s` apart, as many tokens as were asked for."""

    seen: ClassVar[list[dict[str, Any]]]
    gap_s = 0.05
    with_usage = True

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, b'{"data": [{"id": "toy"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if body["model"] != "toy":
            self._send(404, b'{"message": "no such model"}')
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(0, body["max_tokens"], 2):
            self._event({"choices": [{"text": "a b "}]})
            time.sleep(self.gap_s)
        if self.with_usage:
            self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def completion_server(**changes: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(base URL, bodies of the completions asked for). changes: gap_s, with_usage."""
    seen: list[dict[str, Any]] = []
    handler = type("Handler", (_Handler,), {"seen": seen, **changes})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
