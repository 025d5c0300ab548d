"""The engine process: python -m paceline.serve.child --fd N [--die-with-parent].

Reads one JSON object a line from standard input, answers on file descriptor N; standard output and
error are the engine's log. The only module that imports vLLM (with the inspector it loads). Ends,
with everything it started, when the parent goes away.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import multiprocessing.process
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from paceline.serve.step_counts import StepCounts

__all__ = ["main"]

_BEAT_S = 1.0
_PR_SET_PDEATHSIG = 1


class _Channel:
    """One JSON object a line to the parent, from any thread."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=lambda: os.close(fd))  # else its end is not seen
        self._file = os.fdopen(fd, "w", encoding="utf-8")
        self._lock = threading.Lock()
        self._last_beat = 0.0

    def send(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
            self._file.flush()

    def beat(self, **fields: Any) -> None:
        """Says "still working" at most once a second."""
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_S:
            self._last_beat = now
            self.send("beat", **fields)


class _Parent:
    """Watches the parent; when it goes, kills the whole process group, this process included."""

    def __init__(self, *, die_with_parent: bool) -> None:
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._pid = os.getppid()
        if die_with_parent:  # also when this process hangs inside native code
            libc = ctypes.CDLL(None, use_errno=True)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for work in (self._read, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        # not sys.stdin: vLLM forks its engine, and the fork closes that, waiting for its lock
        for line in os.fdopen(os.dup(0)):
            self.messages.put(json.loads(line))
        self._end()

    def _watch(self) -> None:
        while os.getppid() == self._pid:
            time.sleep(0.5)
        self._end()

    def _end(self) -> None:
        os.killpg(0, signal.SIGKILL)


class _Engine:
    """vLLM's synchronous engine, stepped by hand so that every chunk gets a time."""

    def __init__(self, engine_args: dict[str, Any], eos_token_ids: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self._params = SamplingParams
        self._delta = RequestOutputKind.DELTA
        self._eos = eos_token_ids
        self._count = 0
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(skip_tokenizer_init=True, **engine_args)
        )
        self.config = self.engine.vllm_config
        speculation = self.config.speculative_config
        self._counts = StepCounts(speculation.num_speculative_tokens if speculation else 0)
        assert self.engine.logger_manager is not None  # the plan leaves statistics on
        self.engine.logger_manager.stat_loggers = [self._counts]

    def facts(self) -> dict[str, Any]:
        """What the engine resolved, from its own configuration and its worker."""
        import vllm
        from vllm.platforms import current_platform

        config, spec = self.config, self.config.speculative_config
        worker = self.engine.collective_rpc("paceline_facts")[0]
        return {
            "vllm_version": vllm.__version__,
            "platform": current_platform.device_type,
            "device_name": _device_name(current_platform),
            "method": "none" if spec is None else worker["family"] or str(spec.method),
            "proposer": worker["proposer"],
            "num_speculative_tokens": 0 if spec is None else spec.num_speculative_tokens,
            "runner": worker["runner"],
            "target_architecture": config.model_config.architecture,
            "draft_architecture": worker["draft_class"],
            "rejection_sample_method": None if spec is None else spec.rejection_sample_method,
            "draft_sample_method": None if spec is None else spec.draft_sample_method,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": config.model_config.max_model_len,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "enforce_eager": bool(config.model_config.enforce_eager),
        }

    def generate(self, channel: _Channel, requests: list[dict[str, Any]], concurrency: int) -> None:
        """Keeps `concurrency` requests in flight; sends one "answer" as each finishes."""
        waiting = collections.deque(enumerate(requests))
        flying: dict[str, dict[str, Any]] = {}
        while waiting or flying:
            while waiting and len(flying) < concurrency:
                index, request = waiting.popleft()
                name = self._next_name()
                state = {"index": index, "ids": [], "times": [], "tokens": []}
                state["sent_at_s"] = time.monotonic()
                self._add(name, request["prompt_ids"], self._sampling(request))
                flying[name] = state
            outputs = self.engine.step()
            now = time.monotonic()
            for output in outputs:
                self._collect(channel, output, flying, now)
            channel.beat(waiting=len(waiting), flying=len(flying))

    def _collect(
        self, channel: _Channel, output: Any, flying: dict[str, dict[str, Any]], now: float
    ) -> None:
        state, part = flying[output.request_id], output.outputs[0]
        if part.token_ids:
            state["ids"].extend(part.token_ids)
            state["times"].append(now)
            state["tokens"].append(len(part.token_ids))
        if not output.finished:
            return
        del flying[output.request_id]
        speculation = part.spec_decode_metrics
        drafting = self.config.speculative_config is not None
        channel.send(
            "answer",
            index=state["index"],
            output_ids=state["ids"],
            finish_reason=part.finish_reason,
            sent_at_s=state["sent_at_s"],
            chunk_times_s=state["times"],
            chunk_tokens=state["tokens"],
            accepted=list(speculation.per_step_accepted)
            if speculation
            else []
            if drafting
            else None,
            drafted=list(speculation.per_step_drafted) if speculation else [] if drafting else None,
        )

    def next_token(
        self, channel: _Channel, prefixes: list[list[int]], top: int, concurrency: int
    ) -> list[dict[str, Any]]:
        """The `top` likeliest tokens after each prefix, with log-probabilities, best first."""
        params = {"temperature": 0.0, "max_tokens": 1, "logprobs": top, "detokenize": False}
        choices: list[dict[str, Any]] = [{} for _ in prefixes]
        waiting = collections.deque(enumerate(prefixes))
        flying: dict[str, int] = {}
        while waiting or flying:
            while waiting and len(flying) < concurrency:
                index, prefix = waiting.popleft()
                name = self._next_name()
                self._add(name, prefix, self._params(**params))
                flying[name] = index
            for output in self.engine.step():
                if not output.finished:
                    continue
                found = output.outputs[0].logprobs[0]
                best = sorted(found.items(), key=lambda item: (-item[1].logprob, item[0]))[:top]
                choices[flying.pop(output.request_id)] = {
                    "token_ids": [token for token, _ in best],
                    "logprobs": [value.logprob for _, value in best],
                }
            channel.beat(waiting=len(waiting), flying=len(flying))
        return choices

    def text_logprobs(
        self, channel: _Channel, texts: list[dict[str, Any]], concurrency: int
    ) -> list[list[float]]:
        """Log-probability of each answer token given the prompt and the tokens before it."""
        # 0 asks for the token that is there and no other candidate
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        found: list[list[float]] = [[] for _ in texts]
        waiting = collections.deque(enumerate(texts))
        flying: dict[str, int] = {}
        while waiting or flying:
            while waiting and len(flying) < concurrency:
                index, text = waiting.popleft()
                name = self._next_name()
                self._add(name, [*text["prompt_ids"], *text["output_ids"]], params)
                flying[name] = index
            for output in self.engine.step():
                if not output.finished:
                    continue
                index = flying.pop(output.request_id)
                start, ids = len(texts[index]["prompt_ids"]), texts[index]["output_ids"]
                found[index] = [
                    output.prompt_logprobs[start + place][token].logprob
                    for place, token in enumerate(ids)
                ]
            channel.beat(waiting=len(waiting), flying=len(flying))
        return found

    def counters(self) -> dict[str, Any]:
        """vLLM's own monotonic counters."""
        return self._counts.read()

    def memory(self, context_tokens: int) -> dict[str, Any] | None:
        result = self.engine.collective_rpc("paceline_memory", args=(context_tokens,))[0]
        return result if result is None else dict(result)

    def _next_name(self) -> str:
        self._count += 1
        return f"request-{self._count}"

    def _add(self, name: str, prompt_ids: list[int], params: Any) -> None:
        self.engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)

    def _sampling(self, request: dict[str, Any]) -> Any:
        ignore_eos = request["ignore_eos"]
        return self._params(
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            top_p=request["top_p"],
            top_k=request["top_k"],
            seed=request["seed"],
            # no tokenizer is loaded, so the engine does not know the end tokens by itself
            ignore_eos=ignore_eos,
            stop_token_ids=[] if ignore_eos else self._eos,
            detokenize=False,
            output_kind=self._delta,
        )


def _device_name(platform: Any) -> str:
    if platform.device_type == "cpu":
        with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return str(platform.get_device_name())


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Works in the staging folder, which is gone later, so that the models' paths are the same in
    every start: vLLM finds what it compiled before by a hash that holds them."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    # where a process that Python spawns begins
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def _serve(channel: _Channel, parent: _Parent) -> NoReturn:
    plan = parent.messages.get()
    channel.send("beat", phase="importing vLLM")
    with _inside(plan["folder"]):
        engine = _Engine(plan["engine_args"], plan["eos_token_ids"])
        facts = engine.facts()
    channel.send("ready", facts=facts)
    while True:
        message = parent.messages.get()
        operation = message["op"]
        if operation == "generate":
            engine.generate(channel, message["requests"], message["concurrency"])
            channel.send("done", result=None)
        elif operation == "next_token":
            prefixes, top = message["prefixes"], message["top"]
            choices = engine.next_token(channel, prefixes, top, message["concurrency"])
            channel.send("done", result=choices)
        elif operation == "text_logprobs":
            found = engine.text_logprobs(channel, message["texts"], message["concurrency"])
            channel.send("done", result=found)
        elif operation == "counters":
            channel.send("done", result=engine.counters())
        elif operation == "memory":
            channel.send("done", result=engine.memory(message["context_tokens"]))
        elif operation == "inspect":
            found = engine.engine.collective_rpc(message["method"], args=tuple(message["args"]))
            channel.send("done", result=found[0])
        elif operation == "close":
            channel.send("done", result=None)
            sys.stdout.flush()
            os._exit(0)  # the parent ends what is left; vLLM's own teardown takes seconds
        else:
            raise AssertionError(f"unknown operation {operation!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = _Channel(options.fd)
    parent = _Parent(die_with_parent=options.die_with_parent)
    try:
        _serve(channel, parent)
    except Exception as problem:  # whatever vLLM raises: the parent makes one message of it
        traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send("failed", kind=type(problem).__name__, message=str(problem)[:4000])
        os._exit(1)


if __name__ == "__main__":
    main()
