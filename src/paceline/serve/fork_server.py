"""What engines are forked from: python -m paceline.serve.fork_server --fd N --device cpu|cuda.

Importing vLLM takes ten seconds of an engine's twelve on a CPU, and twice seventeen on a GPU, where
the engine has a process of its own. This process has done it once,
computes nothing itself and has one thread, so that a fork finds no lock of another; each fork is
paceline.serve.child as if just started. N is a socket of whole messages: in comes one request with
the engine's standard input, log and pipe of events; out go {"pid": …} and, when it has ended,
{"ended": pid, "code": …}. Ends when the socket's other end does; its engines notice by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from paceline.serve.forking import MESSAGE_BYTES

__all__ = ["main"]

_LOADED = (
    "vllm.logger",  # first, so that what is said next has its level
    "paceline.serve.child",
    "paceline.serve.inspector",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.metrics.reader",
)
# not on a GPU: modules with kernels ask its driver, and CUDA does not outlive a fork
_LOADED_ON_CPU = (
    "vllm.model_executor.models.llama_eagle3",
    "vllm.model_executor.models.qwen3_5_mtp",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)


def _load(device: str) -> None:
    for name in (*_LOADED, *(_LOADED_ON_CPU if device == "cpu" else ())):
        with contextlib.suppress(ImportError):  # an engine that needs it says so in its own log
            importlib.import_module(name)


def _become(request: dict[str, Any], fds: list[int], added: dict[str, str]) -> NoReturn:
    """The rest of this process is one engine."""
    from paceline.serve import child

    code = 1
    try:
        os.setsid()
        stdin, log, events = fds
        for found, wanted in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(found, wanted)
        os.close(stdin)
        os.close(log)
        sys.stdin = os.fdopen(0)
        os.environ.clear()
        os.environ.update({**added, **request["env"]})
        sys.argv = ["paceline.serve.child", *request["words"], "--fd", str(events)]
        child.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def _serve(line: socket.socket, added: dict[str, str]) -> None:
    """added: what the imports set in the environment, and set once."""
    running: dict[int, int] = {}  # the descriptor that tells of its end -> pid
    while True:
        for fd in select.select([line.fileno(), *running], [], [])[0]:
            if fd in running:
                pid = running.pop(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                line.send(json.dumps({"ended": pid, "code": code}).encode())
                continue
            data, sent, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 3)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                for other in (line.detach(), *running):
                    os.close(other)
                _become(json.loads(data), sent, added)
            for other in sent:
                os.close(other)
            running[os.pidfd_open(pid)] = pid
            line.send(json.dumps({"pid": pid}).encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    options = parser.parse_args()
    line = socket.socket(fileno=options.fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = dict(os.environ)
    _load(options.device)
    added = {name: value for name, value in os.environ.items() if name not in before}
    with contextlib.suppress(OSError):  # the other end is gone
        _serve(line, added)


if __name__ == "__main__":
    main()
