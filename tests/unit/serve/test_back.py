"""A server that is ended lets go of everyone who waits for it. A real process on a real socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.serve.back import BASE, Back
from paceline.serve.process import session_members

aiohttp = pytest.importorskip("aiohttp")

# answers as far as its path says, then stays silent, as a server whose engine hangs does
SILENT = """
import asyncio, signal, sys
from aiohttp import web

async def handle(request):
    kind = request.path.strip("/")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    if kind != "nothing":
        await response.prepare(request)
    if kind == "event":
        await response.write(b"data: {}\\n\\n")
    await asyncio.sleep(1000)
    return response

async def main():
    app = web.Application()
    app.router.add_post("/{path}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, sys.argv[1]).start()
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["deaf to nothing", "frozen"])
def test_who_waits_for_an_ended_server_is_told(stopped: bool, tmp_path: Path) -> None:
    socket_path = tmp_path / "http.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT, str(socket_path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    async def act() -> dict[str, str]:
        back = Back(None, log_path=tmp_path / "log")  # type: ignore[arg-type]
        back._process = process
        connector = aiohttp.UnixConnector(path=str(socket_path), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        back._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

        async def wait_for(kind: str, read: str) -> str:
            try:
                with back.carry():
                    async with back.session.post(f"{BASE}/{kind}") as reply:
                        content: Any = reply.content
                        if read == "pieces":
                            async for _ in content.iter_any():
                                pass
                        else:
                            await reply.read()
            except (aiohttp.ClientError, OSError):
                return "told"
            return "ended"

        waiting = {
            f"{kind} {read}": asyncio.create_task(wait_for(kind, read))
            for kind in ("nothing", "headers", "event")
            for read in ("pieces", "whole")
        }
        while back.num_carried < len(waiting):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        if stopped:
            process.send_signal(19)  # SIGSTOP
        begun = time.monotonic()
        await back.stop()
        assert back.is_lost
        assert time.monotonic() - begun < 5.0
        done, _ = await asyncio.wait(waiting.values(), timeout=2.0)
        return {name: task.result() if task in done else "waits" for name, task in waiting.items()}

    found = asyncio.run(act())
    assert set(found.values()) == {"told"}, found
    assert not session_members(process.pid)
