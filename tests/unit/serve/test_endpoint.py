"""The parent's side against engines that are only played: no vLLM is started here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.endpoint import Request, Sampling
from paceline.errors import EngineError, PlanError
from paceline.serve import Plan, VllmEndpoint, build_plan, start
from paceline.serve.process import session_members
from paceline.serve.requests import check_ids
from paceline.target import read_target

Play = Callable[..., None]

READY = "receive(); send('beat'); send('ready', facts=FACTS)\n"
ANSWER = """
while True:
    message = receive()
    if message['op'] == 'close':
        sys.exit()
    for index in reversed(range(len(message.get('requests', [])))):
        send('answer', index=index, output_ids=[5, 6, 7], finish_reason='stop', sent_at_s=1.0,
             chunk_times_s=[1.1, 1.3], chunk_tokens=[1, 2], accepted=None, drafted=None)
    send('done', result=None)
"""


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2), max_tokens: int = 4) -> Request:
    return Request(request_id=name, prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens))


def begin(plan: Plan, tmp_path: Path, **settings: Any) -> VllmEndpoint:
    return start(plan, log_path=tmp_path / "engine.log", **settings)


def test_answers_come_in_request_order(plain_plan: Plan, play_vllm: Play, tmp_path: Path) -> None:
    play_vllm(READY + ANSWER)
    seen: list[str] = []
    with begin(plain_plan, tmp_path) as endpoint:
        answers = endpoint.generate(
            [request("a"), request("b")],
            concurrency=2,
            on_answer=lambda answer: seen.append(answer.request_id),
        )
        assert endpoint.memory() is None
        pid = endpoint.pid
    assert [answer.request_id for answer in answers] == ["a", "b"]
    assert seen == ["b", "a"]
    assert answers[0].output_ids == (5, 6, 7)
    assert answers[0].ttft_ms == pytest.approx(100.0)
    assert session_members(pid) == []
    with pytest.raises(EngineError, match="closed"):
        endpoint.counters()


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("method", "draft_model"),
        ("num_speculative_tokens", 2),
        ("runner", "v2"),
        ("dtype", "float16"),
        ("prefix_caching", True),
        ("rejection_sample_method", "synthetic"),
        ("max_model_len", 1024),
        ("enforce_eager", False),
        ("target_architecture", "Qwen3ForCausalLM"),
        ("platform", "cuda"),
    ],
)
def test_an_engine_that_is_not_the_planned_one_is_refused(
    plain_plan: Plan, play_vllm: Play, tmp_path: Path, fact: str, value: object
) -> None:
    play_vllm(f"FACTS[{fact!r}] = {value!r}\n" + READY + ANSWER)
    with pytest.raises(EngineError, match=f"resolved {fact} to {value!r}, the plan says"):
        begin(plain_plan, tmp_path)


def test_death_at_the_start_gives_the_log_and_a_cause(
    plain_plan: Plan, play_vllm: Play, tmp_path: Path
) -> None:
    play_vllm("print('MemoryError: no room', flush=True); receive(); os._exit(1)\n")
    with pytest.raises(EngineError, match="died while starting") as caught:
        begin(plain_plan, tmp_path)
    assert "likely cause: not enough memory" in str(caught.value)
    assert "MemoryError: no room" in str(caught.value)


def test_a_failure_the_engine_reports_is_the_message(
    plain_plan: Plan, play_vllm: Play, tmp_path: Path
) -> None:
    play_vllm("receive(); send('failed', kind='ValueError', message='bad head'); time.sleep(60)\n")
    with pytest.raises(EngineError, match="failed while starting: ValueError: bad head"):
        begin(plain_plan, tmp_path)


def test_a_hung_start_ends(plain_plan: Plan, play_vllm: Play, tmp_path: Path) -> None:
    play_vllm("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n")
    begun = time.monotonic()
    with pytest.raises(EngineError, match="no sign of life"):
        begin(plain_plan, tmp_path, timeout_s=0.5)
    assert time.monotonic() - begun < 10


def test_ctrl_c_while_starting_leaves_nothing(
    plain_plan: Plan, play_vllm: Play, tmp_path: Path
) -> None:
    play_vllm("print(os.getpid(), flush=True)\ntime.sleep(60)\n")
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        begin(plain_plan, tmp_path)
    assert session_members(int((tmp_path / "engine.log").read_text())) == []


def test_silence_while_generating_ends(plain_plan: Plan, play_vllm: Play, tmp_path: Path) -> None:
    play_vllm(READY + "receive(); send('beat'); time.sleep(60)\n")
    endpoint = begin(plain_plan, tmp_path, silence_s=0.5)
    with pytest.raises(EngineError, match=r"no sign of life for 0\.5 s while generating"):
        endpoint.generate([request()])
    assert session_members(endpoint.pid) == []


def test_death_while_generating_is_named(plain_plan: Plan, play_vllm: Play, tmp_path: Path) -> None:
    play_vllm(READY + "receive(); os.kill(os.getpid(), signal.SIGKILL)\n")
    endpoint = begin(plain_plan, tmp_path)
    with pytest.raises(EngineError, match=r"died while generating .*SIGKILL"):
        endpoint.generate([request()])


def test_children_of_the_engine_end_with_it(
    plain_plan: Plan, play_vllm: Play, tmp_path: Path
) -> None:
    stubborn = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    scene = f"import subprocess; subprocess.Popen([sys.executable, '-c', {stubborn!r}])\n"
    play_vllm(scene + READY + ANSWER)
    endpoint = begin(plain_plan, tmp_path)
    time.sleep(0.3)
    assert len(session_members(endpoint.pid)) == 2
    endpoint.close()
    assert session_members(endpoint.pid) == []


@pytest.mark.parametrize("raised", [KeyboardInterrupt, OSError])
def test_an_exception_in_the_caller_closes_the_engine(
    plain_plan: Plan, play_vllm: Play, tmp_path: Path, raised: type[BaseException]
) -> None:
    play_vllm(READY + ANSWER)
    endpoint = begin(plain_plan, tmp_path)

    def interrupt(answer: object) -> None:
        raise raised

    with pytest.raises(raised):
        endpoint.generate([request()], on_answer=interrupt)
    assert session_members(endpoint.pid) == []


def test_nothing_is_left_in_the_temporary_folder(
    plain_plan: Plan, play_vllm: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    play_vllm("print(receive()['folder'], flush=True)\nsend('ready', facts=FACTS)\n")
    with begin(plain_plan, tmp_path) as endpoint:
        assert not list(temporary.iterdir())
        endpoint.close()
    assert str(temporary) in (tmp_path / "engine.log").read_text()
    play_vllm("os._exit(3)")
    with pytest.raises(EngineError):
        begin(plain_plan, tmp_path)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("asked", "concurrency", "words"),
    [
        (request(prompt=()), 1, "the prompt is empty"),
        (request(prompt=(1, 64)), 1, "a token id that the target does not have"),
        (request(prompt=(1,) * 2048), 1, "2048 prompt tokens and 4 new ones do not fit"),
        (request(max_tokens=0), 1, "max_tokens is below 1"),
        (request(), 9, "concurrency 9"),
        (request(), 0, "concurrency 0"),
    ],
)
def test_requests_that_cannot_be_taken_leave_the_engine_running(
    plain_plan: Plan,
    play_vllm: Play,
    tmp_path: Path,
    asked: Request,
    concurrency: int,
    words: str,
) -> None:
    play_vllm(READY + ANSWER)
    with begin(plain_plan, tmp_path) as endpoint:
        with pytest.raises(PlanError, match=words):
            endpoint.generate([asked], concurrency=concurrency)
        assert len(endpoint.generate([request()])) == 1


def test_vllm_variables_of_the_caller_do_not_reach_the_engine(
    plain_plan: Plan, play_vllm: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "X")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    play_vllm(
        "print(sorted(n for n in os.environ.items() if 'VLLM' in n[0]), flush=True)\n" + READY
    )
    begin(plain_plan, tmp_path).close()
    log = (tmp_path / "engine.log").read_text()
    assert "VLLM_ATTENTION_BACKEND" not in log
    assert "('VLLM_USE_V2_MODEL_RUNNER', '0')" in log


def test_the_engine_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """The real child process, before it imports vLLM: its watch must not depend on the engine."""
    parent = textwrap.dedent(
        """
        import os, subprocess, sys, time
        reader, writer = os.pipe()
        child = subprocess.Popen(
            [sys.executable, "-m", "paceline.serve.child", "--fd", str(writer)],
            stdin=subprocess.PIPE, pass_fds=(writer,), start_new_session=True,
        )
        print(child.pid, flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    time.sleep(1.5)
    assert session_members(child) == [child]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5
    while session_members(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(child) == []


def test_one_token_is_refused_where_it_would_end_the_engine() -> None:
    hybrid, dense = (build_plan(read_target(name), device="cpu") for name in ("pocket", "smollm2"))
    with pytest.raises(PlanError, match="a prompt of one token"):
        check_ids(hybrid, "request r", (1,), 4)
    check_ids(hybrid, "request r", (1, 2), 4)
    check_ids(dense, "request r", (1,), 4)
