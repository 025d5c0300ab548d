"""The operator's way in: one address in front of vLLM's own server, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import MissingExtraError, PlanError
from paceline.serve.checks import check_plan
from paceline.serve.conductor import Conductor, Operation
from paceline.serve.exposition import FrontMetrics
from paceline.serve.front import Front
from paceline.serve.plan import Plan, build_plan
from paceline.serve.requests import dies_on_one_token

__all__ = ["build_plain_plan", "serve_http"]

_FILES_A_REQUEST = 2  # its client's socket and the server's
_SPARE_FILES = 256
_LAST_S = 3.0  # for the answers that say that a request was not answered


def build_plain_plan(plan: Plan) -> Plan:
    """The same target with the same limits, without the draft."""
    if plan.method == "none":
        return plan
    args = plan.engine_args
    plain = build_plan(
        plan.target,
        device=plan.device,
        max_model_len=plan.max_model_len,
        dtype=args["dtype"],
        enforce_eager=args["enforce_eager"],
        prefix_caching=args["enable_prefix_caching"],
        max_num_seqs=plan.max_num_seqs,
        num_threads=plan.num_threads,
        seed=args["seed"],
    )
    kept = {"stream_interval": args["stream_interval"]} if "stream_interval" in args else {}
    return replace(plain, engine_args={**plain.engine_args, **kept})


def serve_http(
    plan: Plan,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    operation: Operation | None = None,
    log_path: str | Path | None = None,
    on_ready: Callable[[str], None] = print,
    tell: Callable[[str], None] = print,
) -> int:
    """Serves until Ctrl-C or SIGTERM, then answers what it holds and ends; returns 0.

    SIGUSR1 switches the draft off, SIGUSR2 on again. on_ready is called with a sentence once the
    target answers, tell with whatever an operator should know later. log_path: where the servers'
    output is appended; None keeps it only when something fails. Raises PlanError for a port in use,
    EngineError when no server can be kept alive.
    """
    check_plan(plan)
    _require_libraries()
    operation = operation or Operation()
    plain = build_plain_plan(plan)
    check_plan(plain)
    _raise_file_limit(operation.max_held * _FILES_A_REQUEST + _SPARE_FILES)
    listening = _listen(host, port)
    with contextlib.closing(listening), contextlib.ExitStack() as stack:
        if log_path is None:
            folder = tempfile.mkdtemp(prefix="paceline-serve-")
            log_path = Path(folder) / "vllm.log"
            stack.callback(_remove_log, Path(log_path))
        try:
            return asyncio.run(
                _serve(plan, plain, operation, listening, Path(log_path), on_ready, tell)
            )
        except BaseException:
            stack.pop_all()  # the log says why
            raise


async def _serve(
    plan: Plan,
    plain: Plan,
    operation: Operation,
    listening: socket.socket,
    log_path: Path,
    on_ready: Callable[[str], None],
    tell: Callable[[str], None],
) -> int:
    from aiohttp import web

    metrics = FrontMetrics()
    conductor = Conductor(plan, plain, operation, log_path=log_path, metrics=metrics, tell=tell)
    front = Front(
        conductor,
        metrics,
        plan.target.path / "tokenizer.json",
        dies_on_one_token=dies_on_one_token(plan),
    )
    told = _Signals(conductor)
    runner = web.AppRunner(
        front.build_app(), handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_S
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        if not await told.unless_ended(conductor.start()):
            return 0
        front.is_started = True
        on_ready(f"{plan.target.name} is served at http://{_show_address(listening)}/v1")
        await told.unless_ended(_until_failed(conductor))
        if conductor.failure is not None:
            raise conductor.failure
        front.is_draining = True
        if front.num_held:
            tell(f"ending: {front.num_held} requests are answered first (again to break off)")
        told.ended.clear()
        await told.unless_ended(_until_empty(front, operation.drain_s))
        if front.num_held:
            tell(f"{front.num_held} requests were not answered in time")
        return 0
    finally:
        await conductor.close()
        await runner.cleanup()


class _Signals:
    """SIGINT and SIGTERM end, SIGUSR1 and SIGUSR2 switch the draft off and on."""

    def __init__(self, conductor: Conductor) -> None:
        self.ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.ended.set)
        for number, drafts in ((signal.SIGUSR1, False), (signal.SIGUSR2, True)):
            loop.add_signal_handler(number, _ask, conductor, drafts)

    async def unless_ended(self, work: object) -> bool:
        """Waits for the work or a signal to end; whether the work came first."""
        doing = asyncio.ensure_future(work)  # type: ignore[call-overload]
        waiting = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait((doing, waiting), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                await doing
                return True
            return False
        finally:
            for task in (doing, waiting):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


def _ask(conductor: Conductor, drafts: bool) -> None:
    conductor.ask_switch(drafts=drafts, reason="operator")


async def _until_failed(conductor: Conductor) -> None:
    while conductor.failure is None:
        await asyncio.sleep(0.2)


async def _until_empty(front: Front, limit_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + limit_s
    while front.num_held and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


def _require_libraries() -> None:
    for name in ("aiohttp", "prometheus_client"):
        if find_spec(name) is None:
            raise MissingExtraError(
                f"the library {name} is not installed", fix="pip install 'paceline[serve]'"
            )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as problem:
        raise PlanError(
            f"port {port} cannot be used: {problem}", where=host, fix="Choose another --port."
        ) from None


def _show_address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _raise_file_limit(wanted: int) -> None:
    """Room for the sockets of every held request, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise PlanError(
            f"holding that many requests takes {wanted} open files, this system allows {hard}",
            where="--max-held",
            fix="Lower it, or raise the limit (ulimit -Hn).",
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _remove_log(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.rmdir()
