"""Thoughts are stripped, cut answers are told, whatever the server does with either."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import EngineError
from paceline.eval import Reply, converse_server
from paceline.eval.conversing import strip_thinking


@pytest.mark.parametrize(
    ("text", "opened", "answer", "thought"),
    [
        ("plain", False, "plain", False),
        ("<think>a (A)</think>\n\nThe answer is (B)", False, "The answer is (B)", True),
        ("a (A)</think>The answer is (B)", True, "The answer is (B)", True),
        ("a (A)</think>The answer is (B)", False, "The answer is (B)", True),
        ("<think></think>x", False, "x", True),
        ("x<think>a</think>y<think>b</think>z", False, "xyz", True),
        ("<think>the answer is (A)", False, "", True),  # never closed: no answer
        ("the answer is (A)", True, "", True),
        ("x <think>a", False, "x", True),
        ("", False, "", False),
    ],
)
def test_thoughts_are_stripped(text: str, opened: bool, answer: str, thought: bool) -> None:
    assert strip_thinking(text, opened=opened) == (answer, thought)


@contextlib.contextmanager
def chat_server(status: int, body: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    seen: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def completion(content: str | None, reason: str = "stop", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    return {
        "choices": [{"message": message, "finish_reason": reason}],
        "usage": {"completion_tokens": 7},
    }


def ask(body: Any, status: int = 200) -> Reply:
    with chat_server(status, body) as (url, _):
        return converse_server(url, "m")([[{"role": "user", "content": "q"}]], 9)[0]


def test_answers_of_a_server() -> None:
    assert ask(completion("<think>t</think>a")) == Reply(
        text="a", is_cut=False, num_tokens=7, has_thought=True
    )
    assert ask(completion("a", reasoning="t")).has_thought
    cut = ask(completion(None, "length", reasoning_content="t"))  # cut within its thought
    assert (cut.text, cut.is_cut, cut.has_thought) == ("", True, True)
    assert ask(completion("<think>t", "length")).is_cut


def test_questions_to_a_server() -> None:
    shown: list[tuple[int, int]] = []
    with chat_server(200, completion("a")) as (url, seen):
        questions = [[{"role": "user", "content": str(number)}] for number in range(3)]
        converse = converse_server(
            url, "m", thinking="off", on_progress=lambda done, total: shown.append((done, total))
        )
        assert len(converse(questions, 9)) == 3
    assert sorted(body["messages"][0]["content"] for body in seen) == ["0", "1", "2"]
    assert {(body["max_tokens"], body["temperature"]) for body in seen} == {(9, 0.0)}
    assert seen[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert shown == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ({"message": "no"}, 404, "answered 404"),
        ({"choices": []}, 200, "no chat completion"),
        ([], 200, "no chat completion"),
        (completion("a", "content_filter"), 200, "ended by 'content_filter'"),
    ],
)
def test_a_server_that_does_not_answer(body: Any, status: int, expected: str) -> None:
    with pytest.raises(EngineError, match=expected):
        ask(body, status)


def test_no_server() -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        converse_server("http://127.0.0.1:9", "m")([[{"role": "user", "content": "q"}]], 9)
