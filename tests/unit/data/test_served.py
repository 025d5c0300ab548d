"""Answers through an OpenAI-compatible server, over real HTTP."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_chat import END

from paceline.data import answer_prompts, open_server, open_tokenizer, read_prompts, read_rows
from paceline.endpoint import Sampling
from paceline.errors import EngineError, PlanError
from paceline.target import TargetFacts


@contextlib.contextmanager
def server(**changes: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(URL, bodies asked). Says "ok N" for a prompt of N tokens; changes: ids, statuses (one a
    request, then 200), slow (seconds before an answer of 200), models, reason."""
    ids, models = changes.get("ids", True), changes.get("models", [{"id": "toy"}])
    statuses, reason = list(changes.get("statuses", ())), changes.get("reason", "stop")
    seen: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(200, {"data": models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            status = statuses.pop(0) if statuses else 200
            time.sleep(changes.get("slow", 0.0) if status == 200 else 0.0)
            text = f"ok {len(body['prompt'])}"
            choice: dict[str, Any] = {"text": text, "finish_reason": reason}
            if ids and body.get("return_token_ids"):
                choice["token_ids"] = [*changes["tokenizer"].encode(text), END]
            self.answer(status, {"choices": [choice]} if status == 200 else {"message": "no"})

        def answer(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", seen
    finally:
        running.shutdown()
        running.server_close()


def answer(url: str, target: TargetFacts, tmp_path: Path, **options: Any) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "why " * (i + 1), "id": f"p{i}"} for i in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return answer_prompts(
        read_prompts(prompts),
        open_server(url, target),
        target,
        out_dir=tmp_path / "data",
        sampling=options.pop("sampling", Sampling(max_tokens=8)),
        concurrency=4,
        **options,
    )


@pytest.mark.parametrize("ids", [True, False])
def test_rows_are_what_the_server_said(target: TargetFacts, tmp_path: Path, ids: bool) -> None:
    tokenizer = open_tokenizer(target)
    with server(tokenizer=tokenizer, ids=ids) as (url, seen):
        record = answer(url, target, tmp_path)
    rows = read_rows(tmp_path / "data")
    assert record["counts"]["rows"] == len(rows) == len(seen) == 12
    asked = {tuple(body["prompt"]) for body in seen}
    for row in rows:
        start, end = row.loss_spans[0]
        assert row.input_ids[:start] in asked
        assert tokenizer.decode(row.input_ids[start : end - 1]) == f"ok {start}"
        assert row.input_ids[-1] == END
    assert all(body["temperature"] == 0.0 and "seed" not in body for body in seen)


def test_sampling_goes_along_with_a_seed_a_prompt(target: TargetFacts, tmp_path: Path) -> None:
    sampling = Sampling(max_tokens=8, temperature=0.7, top_p=0.9, top_k=20, seed=3)
    with server(tokenizer=open_tokenizer(target)) as (url, seen):
        answer(url, target, tmp_path, sampling=sampling)
    assert {(b["temperature"], b["top_p"], b["top_k"]) for b in seen} == {(0.7, 0.9, 20)}
    assert len({body["seed"] for body in seen}) == 12


def test_a_busy_server_is_asked_again_and_a_stopped_run_goes_on(
    target: TargetFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.served._WAIT_S", 0.0)
    tokenizer = open_tokenizer(target)
    with server(tokenizer=tokenizer, statuses=[200] * 3 + [503] * 400) as (url, _):
        with pytest.raises(EngineError, match="503") as caught:
            answer(url, target, tmp_path)
        assert "goes on" in caught.value.fix
    done = len((tmp_path / "data" / "rows.jsonl").read_text().splitlines())
    assert done == 3
    with server(tokenizer=tokenizer, statuses=[503, 429, 503]) as (url, seen):
        answer(url, target, tmp_path)
    assert len(seen) == 12 - done + 3


def test_answers_under_way_when_another_fails_are_kept(target: TargetFacts, tmp_path: Path) -> None:
    changes = {"tokenizer": open_tokenizer(target), "statuses": [200, 400, 200, 400], "slow": 0.3}
    with server(**changes) as (url, seen), pytest.raises(EngineError, match="400"):
        answer(url, target, tmp_path)
    done = len((tmp_path / "data" / "rows.jsonl").read_text().splitlines())
    assert done == len(seen) - 2
    assert done >= 1


def test_refusals(target: TargetFacts, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no server's address"):
        open_server("localhost", target)
    with pytest.raises(EngineError, match="cannot be reached"):
        open_server("http://127.0.0.1:9", target)
    two = [{"id": "a"}, {"id": "b", "max_model_len": 99}]
    with server(models=two) as (url, _):
        with pytest.raises(EngineError, match="serves a, b"):
            open_server(url, target)
        assert open_server(url, target, model="b").facts.max_model_len == 99
        with pytest.raises(EngineError, match="the model 'c'"):
            open_server(url, target, model="c")
    tokenizer = open_tokenizer(target)
    with (
        server(tokenizer=tokenizer, reason="content_filter") as (url, _),
        pytest.raises(EngineError, match="content_filter"),
    ):
        answer(url, target, tmp_path)
    with (
        server(tokenizer=tokenizer, statuses=[400]) as (url, _),
        pytest.raises(EngineError, match="answered 400"),
    ):
        answer(url, target, tmp_path)
