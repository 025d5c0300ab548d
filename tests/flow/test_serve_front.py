"""`paceline serve` on real vLLM, under load: a weak draft, a killed engine, a gentle end.

One start of the command and two of an engine. Switching a weak draft off, hung servers, spares and
10,000 requests: bench/serve_load.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from serve_load import Served, ask_all, build_questions, compare_replies, serve_target

from paceline.cli import main
from paceline.records import read_json
from paceline.serve.exposition import read_sample
from paceline.serve.process import session_members
from paceline.target import read_target

pytestmark = pytest.mark.engine

NUM_REQUESTS = 160
TOLERANCE = 0.5  # nats, as in the rules for pocket


def test_no_request_is_lost_whatever_happens_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = read_target("pocket")
    questions = build_questions(target, 40, max_tokens=32)
    # pocket's head is accepted about 2.5 tokens a step: 3.9 of 4 is a minimum it cannot keep
    weak = ("--min-acceptance", "3.9", "--window", "100", "--weak-draft", "tell", "--drain", "90")
    with serve_target(("pocket", "--draft", "native", *weak)) as served:
        assert _metric(served, "paceline_draft_on") == 1

        def strike(done: int) -> None:
            if done == NUM_REQUESTS // 2:
                for pid in served.engines(served.backs()[:1]):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        replies = asyncio.run(
            ask_all(served.port, questions, num_requests=NUM_REQUESTS, clients=8, on_count=strike)
        )
        assert _metric(served, "paceline_draft_on") == 0
        found = asyncio.run(
            compare_replies(served.port, replies, questions, target, clients=8, tolerance=TOLERANCE)
        )
        assert (found["lost"], found["wrong"], found["text_differs_from_ids"]) == (0, 0, 0), found
        assert _metric(served, "paceline_servers_lost_total") == 1
        assert _metric(served, "paceline_requests_asked_again_total") >= 1
        assert _metric(served, "paceline_streams_continued_total") >= 1
        assert _metric(served, "vllm:generation_tokens_total") > 0
        _check_quality(served, tmp_path / "quality.json", monkeypatch)
        _check_end(served)
    said = "\n".join(served.lines)
    assert "the draft stopped helping: acceptance length" in said
    assert "does not help category 'chat'" in said
    assert "died with" in said
    with capsys.disabled():
        print(f"\n  front: {json.dumps({k: v for k, v in found.items() if k != 'first'})}")


def _check_quality(served: Served, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline quality` asks the running server; arm and plain target are both this one."""
    if find_spec("lm_eval") is None:
        return
    url = f"http://127.0.0.1:{served.port}/v1"
    words = ["--url", url, "--plain-url", url, "--questions", "bundled", "--limit", "2"]
    words += ["--task", "ifeval", "--max-tokens", "48", "--thinking", "off", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["paceline", "quality", "pocket", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1  # two questions decide nothing
    record = read_json(out)
    assert (record["url"], record["plain"]) == (url, url)
    task = record["tasks"]["ifeval"]
    for arm in ("arm", "plain"):
        assert len(task[arm]["questions"]) == 2


def _metric(served: Served, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=30) as answer:
        found = read_sample(answer.read().decode(), name)
    assert found is not None, name
    return found


def _check_end(served: Served) -> None:
    """SIGTERM: what is held is answered, new requests get a 503 with Retry-After, exit code 0."""
    backs = served.backs()
    with pytest.raises(urllib.error.HTTPError) as deadly:
        _complete(served.port, 1, prompt="Once")  # one token: it would end the engine
    assert deadly.value.code == 400
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(_complete(served.port, 120)))
    asking.start()
    time.sleep(0.5)
    served.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(urllib.error.HTTPError) as refused:
        _complete(served.port, 1)
    assert refused.value.code == 503
    assert int(refused.value.headers["Retry-After"]) > 0
    with pytest.raises(urllib.error.HTTPError) as health:
        urllib.request.urlopen(f"http://127.0.0.1:{served.port}/health", timeout=30)
    assert json.load(health.value)["status"] == "draining"
    asking.join(timeout=120)
    assert answers[0]["usage"]["completion_tokens"] == 120
    assert served.process.wait(timeout=30) == 0
    assert not any(session_members(back) for back in backs)


def _complete(port: int, max_tokens: int, *, prompt: str = "Once upon a time") -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
