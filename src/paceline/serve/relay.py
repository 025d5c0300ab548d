"""One request on its way to a server and back, whatever becomes of the server meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.serve.back import BASE, Back
from paceline.serve.conductor import Conductor
from paceline.serve.resume import BrokenStream, Decode, LostStream, Stream

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["GaveUp", "Whole", "ask_whole", "read_tokenizer", "relay_stream"]

_MAX_ASKS = 3
_BROKEN = "the server was lost and the answer cannot be continued exactly from here; ask again"
_encode = json.JSONEncoder(ensure_ascii=False).encode
_FORWARDED = ("content-type", "authorization", "x-request-id", "accept")


class GaveUp(Exception):
    """Every server that held the request was lost."""

    def __init__(self) -> None:
        super().__init__(f"{_MAX_ASKS} servers were lost while they held this request")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A complete HTTP answer. speculation: vLLM's record of it, where there is one."""

    status: int
    content_type: str
    body: bytes
    speculation: tuple[Mapping[str, Any], ...] = ()

    @property
    def outcome(self) -> str:
        return "answered" if self.status < 500 else "failed"

    def build_response(self) -> web.Response:
        from aiohttp import web

        headers = {"Content-Type": self.content_type}
        return web.Response(status=self.status, headers=headers, body=self.body)


async def ask_whole(
    conductor: Conductor, method: str, path: str, headers: Mapping[str, str], data: bytes
) -> Whole:
    """Asks until a living server has answered. Raises GaveUp, and EngineError when none is left."""
    import aiohttp

    for number in range(_MAX_ASKS):
        back = await conductor.acquire()
        if number:
            conductor.metrics.asked_again.inc()
        try:
            with back.carry():
                async with back.session.request(
                    method, BASE + path, headers=_choose_headers(headers), data=data
                ) as reply:
                    body = await reply.read()
                    whole = _read_whole(reply.status, reply.headers["Content-Type"], body)
        except (aiohttp.ClientError, OSError, LostStream):
            await conductor.report(back)
            continue
        if whole.status < 500 or not await conductor.report(back):
            return whole
    raise GaveUp


def _choose_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() in _FORWARDED}


def _read_whole(status: int, content_type: str, body: bytes) -> Whole:
    speculation: tuple[Mapping[str, Any], ...] = ()
    if status == 200 and body[:1] == b"{":
        answer = json.loads(body)
        for choice in answer.get("choices") or ():
            if choice.get("finish_reason") == "abort":  # the server was told to end
                raise LostStream("aborted")
        found = (answer.get("metrics") or {}).get("speculative_decoding")
        speculation = (found,) if found else ()
    return Whole(status=status, content_type=content_type, body=body, speculation=speculation)


async def relay_stream(
    conductor: Conductor,
    request: web.Request,
    body: Mapping[str, Any],
    tokenizer_path: Path,
) -> tuple[web.StreamResponse, str, tuple[Mapping[str, Any], ...]]:
    """Streams one answer; returns the response, its outcome and vLLM's speculation records.

    A client that leaves ends the request. An answer that can be neither asked again nor continued
    ends with an error event that says so.
    """
    from aiohttp import web

    chat = request.path.endswith("/chat/completions")
    stream = Stream(body, chat=chat, max_model_len=conductor.max_model_len)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    why = str(GaveUp())
    for number in range(_MAX_ASKS):
        back = await conductor.acquire()
        path, asked = request.path, stream.first_body()
        if stream.has_begun:
            if stream.obstacle:
                why = (
                    f"the server was lost and an answer with {stream.obstacle!r} cannot be"
                    " continued exactly; ask again"
                )
                break
            decode = await asyncio.to_thread(_open_decoder, tokenizer_path)
            try:
                path, asked = "/v1/completions", stream.next_body(decode)
            except BrokenStream:
                why = _BROKEN
                break
            conductor.metrics.continued.inc()
        elif number:
            conductor.metrics.asked_again.inc()
        try:
            with back.carry():
                outcome = await _relay_events(
                    back, path, asked, conductor, stream, request, response
                )
        except LostStream:
            await conductor.report(back)
            continue
        except BrokenStream:
            why = _BROKEN
            break
        if isinstance(outcome, Whole):
            return outcome.build_response(), outcome.outcome, ()
        await _write(response, request, *stream.last_events(), None)
        return response, outcome, tuple(stream.speculation)
    lost = {"error": {"message": why, "type": "lost", "code": 503}}
    await _write(response, request, lost, None)
    return response, "failed", tuple(stream.speculation)


async def _relay_events(
    back: Back,
    path: str,
    asked: Mapping[str, Any],
    conductor: Conductor,
    stream: Stream,
    request: web.Request,
    response: web.StreamResponse,
) -> Whole | str:
    """Passes one server's events on; the outcome, or the whole answer of one that did not stream.

    Raises LostStream and BrokenStream.
    """
    async with contextlib.aclosing(_read_events(back, path, request.headers, asked)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Whole):
                if piece.status >= 500 and await conductor.report(back):
                    raise LostStream("died before its answer")
                if response.prepared:
                    raise BrokenStream
                return piece
            shown: list[dict[str, Any]] = []
            error = None
            try:
                for event in piece:
                    if "error" in event:
                        error = event
                        break
                    taken = stream.take(event)
                    if taken is not None:
                        shown.append(taken)
            finally:  # the stream counts as sent what it took
                await _write(response, request, *shown)
            if error is not None:
                if await conductor.report(back):
                    raise LostStream("died")
                await _write(response, request, error)
                return "failed"
    if not stream.is_finished:
        raise LostStream("ended early")
    return "answered"


async def _write(
    response: web.StreamResponse, request: web.Request, *events: dict[str, Any] | None
) -> None:
    """Sends events in one piece; None is the end of the stream."""
    if not events:
        return
    if not response.prepared:
        await response.prepare(request)
    texts = ("[DONE]" if event is None else _encode(event) for event in events)
    await response.write("".join(f"data: {text}\n\n" for text in texts).encode())


async def _read_events(
    back: Back, path: str, headers: Mapping[str, str], body: Mapping[str, Any]
) -> AsyncGenerator[list[dict[str, Any]] | Whole, None]:
    """The events that each piece off the socket completes, or the whole answer of a server that
    does not stream. Raises LostStream."""
    import aiohttp

    try:
        async with back.session.post(
            BASE + path, headers=_choose_headers(headers), data=json.dumps(body).encode()
        ) as reply:
            content_type = reply.headers.get("Content-Type", "application/json")
            if not content_type.startswith("text/event-stream"):
                yield Whole(status=reply.status, content_type=content_type, body=await reply.read())
                return
            rest = b""
            async for piece in reply.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                data = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
                ended = bool(data) and data[-1] == b"[DONE]"
                events = [json.loads(text.decode()) for text in data[: len(data) - ended]]
                if events:
                    yield events
                if ended:
                    return
    except (aiohttp.ClientError, OSError):
        raise LostStream("the connection broke") from None


@functools.lru_cache(maxsize=1)
def read_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _open_decoder(path: Path) -> Decode:
    """How vLLM turns tokens into streamed text: each token's share, after the prompt."""
    from tokenizers.decoders import DecodeStream

    tokenizer = read_tokenizer(path)

    def decode(prompt_ids: Sequence[int], ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)
        return [stream.step(tokenizer, token) or "" for token in ids]

    return decode
