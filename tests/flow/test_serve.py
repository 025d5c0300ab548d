"""The serving room on real vLLM: numbers that add up, memory by hand, and no process left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import both_counts
import pytest
from process_tree import children_of, parent_of

from paceline.acceptance import build_acceptance, count_decode_steps
from paceline.draft import Draft, read_draft
from paceline.endpoint import Request, Sampling
from paceline.errors import DraftError, EngineError
from paceline.eval import ask_server, find_model
from paceline.serve import VllmEndpoint, build_plan, process, start
from paceline.serve.process import session_members
from paceline.target import TargetFacts, read_target

pytestmark = pytest.mark.engine

Ask = Callable[..., Request]
QUESTIONS = ("Name three colours.", "What is the capital of France?", "Count from 1 to 9.")


def test_greedy_answers_add_up_and_repeat(plain_endpoint: VllmEndpoint, ask: Ask) -> None:
    requests = [ask(question) for question in QUESTIONS]
    first = plain_endpoint.generate(requests, concurrency=3)
    again = plain_endpoint.generate(requests, concurrency=3)
    for request, answer, repeated in zip(requests, first, again, strict=True):
        assert answer.prompt_ids == request.prompt_ids
        assert sum(answer.chunk_tokens) == len(answer.output_ids)
        assert set(answer.chunk_tokens) == {1}
        assert list(answer.chunk_times_s) == sorted(answer.chunk_times_s)
        assert answer.ttft_ms > 0
        assert answer.per_step_accepted is None
        assert answer.output_ids == repeated.output_ids
        assert answer.finish_reason == ("stop" if answer.output_ids[-1] == 2 else "length")
    capital = first[1]
    assert capital.finish_reason == "stop"
    assert len(capital.output_ids) < 48


def test_the_same_models_have_the_same_paths_in_every_start(
    plain_endpoint: VllmEndpoint, engine_logs: Path
) -> None:
    """vLLM finds what it compiled by a hash that holds them."""
    name = plain_endpoint.plan.engine_args["model"]
    assert f"model='{name}'" in (engine_logs / "plain.log").read_text()
    assert Path(f"/proc/{plain_endpoint.pid}/cwd").readlink() == Path.cwd()


def test_an_engine_in_a_forked_process_of_its_own(
    plain_endpoint: VllmEndpoint, tmp_path: Path
) -> None:
    """As on a GPU: the fork neither waits for the child's reader nor hides the child's end. An
    engine of another number of threads stays meanwhile."""
    plan = build_plan(read_target("pocket"), device="cpu", max_model_len=256, num_threads=1)
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    plan = replace(plan, env={**plan.env, **apart})
    request = Request(
        request_id="a", prompt_ids=(5, 6, 7), sampling=Sampling(max_tokens=4, ignore_eos=True)
    )
    with start(plan, log_path=tmp_path / "engine.log") as endpoint:
        assert len(session_members(endpoint.pid)) > 1
        (answer,) = endpoint.generate([request])
        assert len(answer.output_ids) == 4
        os.kill(endpoint.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="died"):
            endpoint.generate([request])
        assert session_members(endpoint.pid) == []
    assert session_members(plain_endpoint.pid)


def test_ignored_end_runs_to_the_limit(plain_endpoint: VllmEndpoint, ask: Ask) -> None:
    answer = plain_endpoint.generate([ask(QUESTIONS[1], ignore_eos=True)])[0]
    assert (len(answer.output_ids), answer.finish_reason) == (48, "length")


def test_next_token_agrees_with_greedy(plain_endpoint: VllmEndpoint, ask: Ask) -> None:
    request = ask(QUESTIONS[0], max_tokens=3)
    answer = plain_endpoint.generate([request])[0]
    prefixes = [request.prompt_ids + answer.output_ids[:count] for count in range(3)]
    choices = plain_endpoint.next_token(prefixes, top=3)
    assert [choice.token_ids[0] for choice in choices] == list(answer.output_ids)
    for choice in choices:
        assert len(choice.token_ids) == 3
        assert list(choice.logprobs) == sorted(choice.logprobs, reverse=True)
        assert all(value <= 0 for value in choice.logprobs)


def test_facts_and_counters_without_a_draft(plain_endpoint: VllmEndpoint) -> None:
    facts = plain_endpoint.facts
    assert (facts.method, facts.num_speculative_tokens, facts.runner) == ("none", 0, "v1")
    assert plain_endpoint.counters().num_drafts == 0
    assert plain_endpoint.counters().prefix_cache_queries == 0
    assert plain_endpoint.memory() is None


def test_a_misleading_path_does_not_change_the_method(draft_endpoint: VllmEndpoint) -> None:
    facts = draft_endpoint.facts
    assert (facts.method, facts.num_speculative_tokens) == ("eagle3", 3)
    assert facts.draft_architecture == "Eagle3LlamaForCausalLM"


def test_draft_memory_by_hand(draft_endpoint: VllmEndpoint, random_draft: Draft) -> None:
    found = draft_endpoint.memory(context_tokens=16384)
    assert found is not None
    in_file = sum(tensor.end - tensor.start for tensor in random_draft.tensors.values())
    assert found.weights_bytes == in_file  # packed linears included; nothing of the target's
    assert sum(found.tensors.values()) == found.weights_bytes + found.buffers_bytes
    assert found.buffers_bytes == 16  # four fp32 scales of the attention layer
    assert found.kv_bytes == 12 * 2**20 == 16384 * 768  # 3 KV heads x 64 x K and V x 2 bytes
    assert found.state_bytes == 0
    assert found.total_bytes == in_file + 16 + 12 * 2**20
    assert any("embed_tokens" in name for name in found.shared)
    longer = draft_endpoint.memory(context_tokens=16385)
    assert longer is not None
    assert longer.kv_bytes - found.kv_bytes == 128 * 768  # the next block


def test_untrained_draft_is_counted_step_by_step(draft_endpoint: VllmEndpoint, ask: Ask) -> None:
    before = draft_endpoint.counters()
    answers = draft_endpoint.generate([ask(q) for q in QUESTIONS], concurrency=2)
    after = draft_endpoint.counters()
    drafted = [step for answer in answers for step in answer.per_step_drafted or ()]
    assert set(drafted) == {3}
    assert after.num_drafts - before.num_drafts == len(drafted)
    for answer in answers:
        assert sum(answer.chunk_tokens) == len(answer.output_ids)
        steps = count_decode_steps(
            num_output_tokens=len(answer.output_ids), accepted=answer.per_step_accepted or ()
        )
        assert steps == len(answer.chunk_tokens) - 1


def test_arrays_and_vllms_loggers_agree_with_counters_then_death_is_told(
    smollm2: TargetFacts, engine_logs: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(both_counts.__file__).parent))
    monkeypatch.setattr(process, "fork_engine", lambda *_, **__: None)  # it has its own path
    plan = build_plan(
        smollm2, method="ngram", ngram_min=2, ngram_max=4, device="cpu", prefix_caching=True
    )
    worker = {"worker_extension_cls": "both_counts.BothCounts"}
    plan = replace(plan, engine_args={**plan.engine_args, **worker})
    endpoint = start(plan, log_path=engine_logs / "ngram.log")
    try:
        endpoint.inspect("paceline_count_twice")
        before = endpoint.counters()
        assert before.num_accepted_tokens_per_pos == (0, 0, 0)
        requests = [
            ask(f"Repeat: {'a b c d, ' * 40}{word}.", max_tokens=64, ignore_eos=True)
            for word in ("again", "and on")
        ]
        answers = endpoint.generate(requests, concurrency=2)
        after = endpoint.counters()
        total = None
        for answer in answers:
            assert answer.per_step_accepted is not None
            assert answer.per_step_drafted is not None
            one = build_acceptance(
                answer.per_step_accepted, answer.per_step_drafted, num_speculative_tokens=3
            )
            total = one if total is None else total + one
            steps = count_decode_steps(
                num_output_tokens=len(answer.output_ids), accepted=answer.per_step_accepted
            )
            assert steps == len(answer.chunk_tokens) - 1
            assert set(answer.per_step_drafted) == {3}
        assert total is not None
        assert total.num_accepted > 0
        assert after.num_drafts - before.num_drafts == total.num_steps
        assert after.num_draft_tokens - before.num_draft_tokens == total.num_drafted
        assert after.num_accepted_tokens - before.num_accepted_tokens == total.num_accepted
        assert after.num_accepted_tokens_per_pos == total.accepted_at
        by_vllm = endpoint.inspect("paceline_vllm_counters")
        assert after.prefix_cache_hits
        for name, value in vars(after).items():
            given = by_vllm[name if name in by_vllm else f"spec_decode_{name}"]
            assert given == (list(value) if isinstance(value, tuple) else value), name

        killer = threading.Timer(1.0, os.kill, (endpoint.pid, signal.SIGKILL))
        killer.start()
        begun = time.monotonic()
        with pytest.raises(EngineError, match="died while generating"):
            endpoint.generate([ask("Tell a long story.", max_tokens=1500, ignore_eos=True)])
        assert time.monotonic() - begun < 10
        assert session_members(endpoint.pid) == []
    finally:
        endpoint.close()


def test_a_killed_parent_leaves_no_engine(smollm2: TargetFacts, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        from paceline.endpoint import Request, Sampling
        from paceline.serve import build_plan, start
        from paceline.target import read_target
        endpoint = start(build_plan(read_target({str(smollm2.path)!r}), device="cpu"),
                         log_path={str(tmp_path / "engine.log")!r})
        print(endpoint.pid, flush=True)
        sampling = Sampling(max_tokens=2000, ignore_eos=True)
        endpoint.generate([Request(request_id="r", prompt_ids=(1, 2, 3), sampling=sampling)])
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    server = parent_of(engine)
    assert server != parent.pid
    time.sleep(1.0)
    assert session_members(engine)
    assert session_members(server)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while session_members(engine) + session_members(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(engine) == session_members(server) == []


def test_a_killed_fork_server_ends_its_engine_and_the_next_start_has_another(
    tmp_path: Path,
) -> None:
    script = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from paceline.endpoint import Request, Sampling
        from paceline.errors import EngineError
        from paceline.serve import build_plan, start
        from paceline.serve.process import session_members
        from paceline.target import read_target
        plan, log = build_plan(read_target("pocket"), device="cpu"), {str(tmp_path / "log")!r}
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        request = Request(request_id="r", prompt_ids=(1, 2, 3), sampling=sampling)
        with start(plan, log_path=log) as endpoint:
            stat = Path(f"/proc/{{endpoint.pid}}/stat").read_text().rpartition(")")[2]
            os.kill(int(stat.split()[1]), signal.SIGKILL)
            try:
                endpoint.generate([request])
            except EngineError as error:
                print(error.what)
            print(session_members(endpoint.pid))
        with start(plan, log_path=log) as endpoint:
            print(len(endpoint.generate([request])[0].output_ids))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    told = done.stdout.splitlines()
    assert "died" in told[0], done.stdout + done.stderr
    assert told[1:] == ["[]", "8"]


def test_a_draft_without_fc_never_reaches_the_engine(random_draft: Draft, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(random_draft.path, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DraftError, match=r"fc\.weight"):
        read_draft(folder)


def test_http_server_answers_and_leaves_nothing(
    smollm2: TargetFacts, random_draft: Draft, tmp_path: Path
) -> None:
    script = textwrap.dedent(
        f"""
        import socket, sys
        from paceline.draft import read_draft
        from paceline.serve import build_plan, serve_http
        from paceline.target import read_target
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        target, draft = read_target({str(smollm2.path)!r}), read_draft({str(random_draft.path)!r})
        plan = build_plan(target, draft, device="cpu")
        sys.exit(serve_http(plan, port=port, log_path={str(tmp_path / "server.log")!r},
                            on_ready=lambda text: print(port, flush=True)))
        """
    )
    operator = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert operator.stdout is not None
    port = operator.stdout.readline().strip()
    assert port, (tmp_path / "server.log").read_text()[-2000:]
    body = {"model": smollm2.name, "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=60) as answer:
        reply = json.load(answer)
    assert reply["usage"]["completion_tokens"] == 8
    assert reply["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    asked = Request(
        request_id="r", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=8, ignore_eos=True)
    )
    address = f"http://127.0.0.1:{port}/v1"
    timing = ask_server(address, find_model(address))(asked)  # as `paceline bench --url` asks
    assert timing.num_tokens == 8
    assert 0 < timing.ttft_ms < timing.latency_ms
    servers = [pid for pid in children_of(operator.pid) if session_members(pid)]
    assert servers
    os.kill(operator.pid, signal.SIGKILL)  # a gentle end: tests/flow/test_serve_front.py
    operator.wait()
    deadline = time.monotonic() + 10
    while any(session_members(pid) for pid in servers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(session_members(pid) for pid in servers)
