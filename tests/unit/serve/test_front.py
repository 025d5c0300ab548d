"""The front over real HTTP: what it refuses, and what a client sees when servers are lost.

The servers behind are scripted here; real ones are in tests/flow/test_serve_front.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.serve import Operation
from paceline.serve.exposition import FrontMetrics, read_sample
from paceline.serve.front import Front
from paceline.serve.watch import AcceptanceWatch
from paceline.target import read_target

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

CHUNK = {"id": "a", "object": "text_completion", "created": 1, "model": "m"}
Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
Scene = Callable[["World"], Awaitable[None]]


class World:
    """A front, its client, and servers behind it: handlers, one after the other when one is lost.

    asked: (server, path, body) in order.
    """

    def __init__(self, handlers: list[Handler], *, max_held: int = 8) -> None:
        self.handlers, self.asked = handlers, []
        self.metrics = FrontMetrics()
        self.failure = self.current = None
        self.has_draft, self.is_weak, self.max_model_len = True, False, 64
        self.operation = Operation(max_held=max_held)
        self.watch = AcceptanceWatch(minimum=1.5, window=4)
        self.front = Front(self, self.metrics, read_target("pocket").path / "tokenizer.json")  # type: ignore[arg-type]
        self.front.is_started = True
        self.number = 0
        self.dead: set[int] = set()

    async def acquire(self) -> Any:
        number = self.number
        session = self.sessions[number]
        return SimpleNamespace(session=session, carry=contextlib.nullcontext, number=number)

    async def report(self, back: Any) -> bool:
        if back.number in self.dead:
            self.number = max(self.number, back.number + 1)
        return back.number in self.dead

    @contextlib.asynccontextmanager
    async def open(self, folder: Path) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            self.sessions = []
            for number in range(len(self.handlers)):
                path = folder / f"{number}.sock"
                app = web.Application()
                app.router.add_route("*", "/{path:.*}", self._script(number))
                runner = web.AppRunner(app)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.UnixSite(runner, str(path)).start()
                connector = aiohttp.UnixConnector(path=str(path))
                session = aiohttp.ClientSession(connector=connector)
                self.sessions.append(await stack.enter_async_context(session))
            runner = web.AppRunner(self.front.build_app(), handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self.client = await stack.enter_async_context(aiohttp.ClientSession())
            yield self

    def _script(self, number: int) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            data = await request.read()
            body = json.loads(data) if data[:1] == b"{" else {}
            self.asked.append((number, request.path, body))
            return await self.handlers[number](request, body)

        return handle

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.base + path, data=data, headers=headers) as reply:
            return reply.status, dict(reply.headers), (await reply.read()).decode()

    def count(self, name: str) -> float | None:
        return read_sample(self.metrics.show(), name)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    def run(scene: Scene, *handlers: Handler, **more: Any) -> None:
        async def act() -> None:
            async with World(list(handlers), **more).open(tmp_path) as world:
                await asyncio.wait_for(scene(world), timeout=20)

        asyncio.run(act())

    return run


async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    record = {"num_spec_steps": 4, "num_accepted_draft_tokens": 1}
    choice = {"text": "whole", "finish_reason": "length"}
    return web.json_response({"choices": [choice], "metrics": {"speculative_decoding": record}})


def streaming(
    *parts: tuple[list[int], str, str | None], end: str = "well", size: int | None = None
) -> Handler:
    """Streams (ids, text, finish) as vLLM does. end: well, broken (the connection), or told (the
    error event of an engine that died). size: of each piece in bytes, else a piece an event."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        pieces = []
        for ids, text, finish in parts:
            choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}
            choice["prompt_token_ids"] = [1, 2]
            event = json.dumps({**CHUNK, "choices": [choice]}, ensure_ascii=False)
            pieces.append(f"data: {event}\n\n".encode())
        if end == "told":
            pieces.append(b'data: {"error": {"message": "EngineCore", "code": 500}}\n\n')
        if end != "broken":
            pieces.append(b"data: [DONE]\n\n")
        if size is not None:
            whole = b"".join(pieces)
            pieces = [whole[begin : begin + size] for begin in range(0, len(whole), size)]
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        if end == "broken":
            assert request.transport is not None
            request.transport.close()
        return response

    return handle


async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "EngineCore encountered an issue"}}, status=500)


def events(text: str) -> list[Any]:
    found = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


def shown(text: str) -> str:
    return "".join(event["choices"][0]["text"] for event in events(text))


def test_categories_count_and_are_judged(play: Callable[..., None]) -> None:
    async def scene(world: World) -> None:
        status, _, _ = await world.post({"prompt": "x"}, **{"X-Paceline-Category": "code"})
        assert status == 200
        assert world.watch.weak_categories() == ["code"]
        status, _, text = await world.post({"prompt": "x"}, **{"X-Paceline-Category": "a b"})
        assert (status, "1 to 64 letters" in text) == (400, True)
        wanted = 'paceline_requests_total{category="code",outcome="answered"} 1.0'
        assert wanted in world.metrics.show()

    play(scene, answer)


def test_what_is_not_taken_says_when_to_come_again(play: Callable[..., None]) -> None:
    held = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await held.wait()
        return await answer(request, body)

    async def scene(world: World) -> None:
        waiting = asyncio.create_task(world.post({"prompt": "x"}))
        while not world.asked:
            await asyncio.sleep(0.01)
        status, headers, text = await world.post({"prompt": "y"})
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "1 requests are held" in json.loads(text)["error"]["message"]
        world.front.is_draining = True
        status, headers, _ = await world.post({"prompt": "z"})
        assert (status, headers["Retry-After"]) == (503, "10")
        async with world.client.get(world.base + "/health") as reply:
            assert (reply.status, (await reply.json())["status"]) == (503, "draining")
        held.set()
        assert (await waiting)[0] == 200  # what was held is answered
        assert world.front.num_held == 0

    play(scene, slow, max_held=1)


def test_what_is_no_request_is_for_vllm_to_refuse(play: Callable[..., None]) -> None:
    async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=400)

    async def scene(world: World) -> None:
        assert (await world.post({"prompt": "x"}))[0] == 400
        assert (await world.post({"prompt": "x", "stream": True}))[0] == 400
        assert (await world.post({"prompt": "x", "stream": True, "stream_options": 1}))[0] == 400
        assert (await world.post(b"no json"))[0] == 400
        status, _, _ = await world.post({}, path="/v1/embeddings")
        assert status == 404

    play(scene, refuses)


def test_a_prompt_that_ends_the_engine_never_reaches_it(play: Callable[..., None]) -> None:
    """vLLM 0.31.0, CPU, recurrent layers: a prefill of one token is a fatal error."""

    async def scene(world: World) -> None:
        assert (await world.post({"prompt": "Once"}))[0] == 200  # another device or target
        world.front._dies_on_one_token = True
        for prompt in ("Once", [7], ["Once upon", "Once"], [[1, 2], [7]]):
            for stream in (False, True):
                status, _, text = await world.post({"prompt": prompt, "stream": stream})
                assert (status, "one token" in text) == (400, True), prompt
        for prompt in ("Once upon", [7, 8], ["Once upon"], [[1, 2]]):
            assert (await world.post({"prompt": prompt}))[0] == 200, prompt

    play(scene, answer)


def test_a_whole_answer_is_asked_again_of_the_next_server(play: Callable[..., None]) -> None:
    async def scene(world: World) -> None:
        world.dead = {0}
        status, _, text = await world.post({"prompt": "x"})
        assert (status, json.loads(text)["choices"][0]["text"]) == (200, "whole")
        assert [number for number, _, _ in world.asked] == [0, 1]
        assert world.count("paceline_requests_asked_again_total") == 1

    play(scene, dies, answer)


def test_a_fault_of_a_living_server_is_the_request_s_own(play: Callable[..., None]) -> None:
    async def scene(world: World) -> None:
        assert (await world.post({"prompt": "x"}))[0] == 500
        assert (await world.post({"prompt": "x", "stream": True}))[0] == 500
        assert len(world.asked) == 2

    play(scene, dies)


def test_an_error_of_a_living_server_reaches_the_client(play: Callable[..., None]) -> None:
    async def scene(world: World) -> None:
        _, _, text = await world.post({"prompt": "x", "stream": True})
        assert events(text)[-1]["error"]["message"] == "EngineCore"
        assert len(world.asked) == 1

    play(scene, streaming(([43], "I", None), end="told"))


def test_a_request_that_every_server_is_lost_over_is_given_up(play: Callable[..., None]) -> None:
    async def scene(world: World) -> None:
        world.dead = {0, 1, 2, 3}
        status, _, text = await world.post({"prompt": "x"})
        assert (status, "3 servers were lost" in text) == (503, True)
        world.number = 0
        _, _, text = await world.post({"prompt": "x", "stream": True})
        (last,) = events(text)
        assert "3 servers were lost" in last["error"]["message"]

    play(scene, dies, dies, dies, answer)


@pytest.mark.parametrize("size", [None, 1, 100_000])
@pytest.mark.parametrize("end", ["broken", "told", "well"])
def test_a_stream_goes_on_where_it_was(
    end: str, size: int | None, play: Callable[..., None]
) -> None:
    async def scene(world: World) -> None:
        world.dead = {0}
        body = {"prompt": "x", "stream": True, "max_tokens": 9, "temperature": 0}
        _, _, text = await world.post(body)
        assert shown(text) == "I'm glad you"
        (_, path, asked) = world.asked[1]
        assert path == "/v1/completions"
        assert (asked["prompt"], asked["max_tokens"]) == ([1, 2, 43], 8)
        assert world.count("paceline_streams_continued_total") == 1

    # ids of pocket's tokenizer: "I", "'m", " glad", " you"
    first = streaming(([43], "I", None), end=end, size=size)
    rest = (([379, 1281], "'m glad", None), ([302], " you", "length"))
    play(scene, first, streaming(*rest, size=size))


@pytest.mark.parametrize("size", [None, 1, 7, 100_000])
def test_a_stream_arrives_whole_however_it_was_cut(
    size: int | None, play: Callable[..., None]
) -> None:
    """Pieces end inside a character and inside a number, or hold several events."""
    parts = [([43, 44], "né – ", None), ([45], '"[DONE]"', None), ([46], "\n\ndata: ✓", "length")]

    async def scene(world: World) -> None:
        _, _, text = await world.post({"prompt": "x", "stream": True, "return_token_ids": True})
        choices = [event["choices"][0] for event in events(text)]
        assert [(c["token_ids"], c["text"], c["finish_reason"]) for c in choices] == parts
        assert world.count("paceline_streams_continued_total") == 0

    play(scene, streaming(*parts, size=size))


def test_usage_comes_to_who_asked_for_it(play: Callable[..., None]) -> None:
    async def tells(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert body["stream_options"]["include_usage"]  # asked for whatever the client said
        choice = {"index": 0, "text": "I", "finish_reason": "stop", "token_ids": [43]}
        usage = {**CHUNK, "choices": [], "usage": {"completion_tokens": 1}}
        lines = [json.dumps({**CHUNK, "choices": [choice]}), json.dumps(usage), "[DONE]"]
        text = "".join(f"data: {line}\n\n" for line in lines)
        return web.Response(text=text, content_type="text/event-stream")

    async def scene(world: World) -> None:
        body = {"prompt": "x", "stream": True}
        _, _, text = await world.post(body)
        assert [event.get("usage") for event in events(text)] == [None]
        _, _, text = await world.post({**body, "stream_options": {"include_usage": True}})
        assert [event.get("usage") for event in events(text)] == [None, {"completion_tokens": 1}]

    play(scene, tells)


@pytest.mark.parametrize("end", ["abort", "error"])
def test_what_came_before_a_loss_in_one_piece_is_sent(end: str, play: Callable[..., None]) -> None:
    """What the stream counts as sent, the client has: the next server goes on after it."""

    async def scene(world: World) -> None:
        world.dead = {0}
        _, _, text = await world.post({"prompt": "x", "stream": True, "max_tokens": 9})
        assert shown(text) == "I'm glad you"
        assert world.asked[1][2]["prompt"] == [1, 2, 43, 379]

    parts: list[tuple[list[int], str, str | None]] = [([43], "I", None), ([379], "'m", None)]
    parts += [([], "", "abort")] if end == "abort" else []
    first = streaming(*parts, end="told" if end == "error" else "well", size=100_000)
    play(scene, first, streaming(([1281, 302], " glad you", "length")))


def test_a_stream_that_cannot_go_on_says_so(play: Callable[..., None]) -> None:
    async def scene(world: World) -> None:
        world.dead = {0}
        _, _, text = await world.post({"prompt": "x", "stream": True, "presence_penalty": 1})
        assert "'presence_penalty' cannot be continued" in events(text)[-1]["error"]["message"]
        world.number, world.asked[:] = 0, []
        _, _, text = await world.post({"prompt": "x", "stream": True, "stop": ["zzz"]})
        assert "cannot be continued exactly" in events(text)[-1]["error"]["message"]
        assert [number for number, _, _ in world.asked] == [0, 1]

    held_back = streaming(([43, 379], "I'", None), end="broken")  # "m" is held back for the stop
    play(scene, held_back, streaming(([1281], " glad", "stop")))


def test_a_client_that_leaves_is_let_go(play: Callable[..., None]) -> None:
    left = asyncio.Event()

    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                choice = {"index": 0, "text": "x", "finish_reason": None, "token_ids": [43]}
                event = json.dumps({**CHUNK, "choices": [choice]})
                await response.write(f"data: {event}\n\n".encode())
                await asyncio.sleep(0.01)
        left.set()
        return response

    async def scene(world: World) -> None:
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        async with world.client.post(world.base + "/v1/completions", data=body) as reply:
            await reply.content.readline()
        await left.wait()
        while world.front.num_held:
            await asyncio.sleep(0.01)
        assert 'outcome="gone"} 1.0' in world.metrics.show()

    play(scene, endless)
