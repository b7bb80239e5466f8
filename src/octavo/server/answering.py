"""One pipeline from open requests to a reply, streamed or whole.

Decides the order of events of a stream, what ends it, and that a whole reply is a joined stream.
Knows neither routes nor bodies.

Invariant: however a reply ends, its requests are closed, and so is a client that went away.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.engine.outputs import OutputDelta, PromptProgress
from octavo.server import failures
from octavo.server.pieces import Item, Items, Piece, PieceMaker
from octavo.server.service import OpenRequest
from octavo.server.shapes import Json, Shape, timings, usage

_encode = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """The client went away before its whole reply was there; nobody is left to tell."""


@dataclass(slots=True)
class Reply:
    """A reply in the making.

    finish: what to do with a piece before it is shown, such as a reason of its own. note: what the
    log line tells, filled as the reply goes.
    """

    requests: Sequence[OpenRequest]
    maker: PieceMaker
    shape: Shape
    include_usage: bool = False
    continuous_usage: bool = False
    with_progress: bool = False
    prompt_token_ids: list[int] | None = None
    amend: Callable[[Piece], None] = lambda piece: None
    note: dict[str, Any] = field(default_factory=dict)

    async def chunks(self) -> AsyncIterator[Json]:
        """Yield the chunks of a stream; the last choice's has the timings."""
        async for prompt, item in _merged([r.stream for r in self.requests]):
            if isinstance(item, PromptProgress):
                if self.with_progress:
                    yield self._progress(prompt, item)
                continue
            piece = self.maker.push(prompt, item)
            if piece is not None:
                for chunk in self._piece_chunks(piece):
                    yield chunk
        self._note()
        if not self.maker.is_over:
            raise ClientGoneError
        if self.include_usage:
            yield {**self.shape.envelope([], is_whole=False), "usage": usage(self.maker.totals)}

    def _piece_chunks(self, piece: Piece) -> Sequence[Json]:
        self.amend(piece)
        choices = self.shape.chunks(piece)
        made = [self.shape.envelope([choice], is_whole=False) for choice in choices]
        if self.prompt_token_ids is not None and piece.is_first and piece.choice == 0:
            made[0]["prompt_token_ids"] = self.prompt_token_ids
        if self.continuous_usage:
            for chunk in made:
                chunk["usage"] = usage(self.maker.totals)
        if self.maker.is_over:
            made[-1]["timings"] = timings(self.maker.totals)
        return made

    def _progress(self, prompt: int, progress: PromptProgress) -> Json:
        total = len(self.requests[prompt].stream.request.prompt_token_ids)
        return {
            **self.shape.envelope([], is_whole=False),
            "prompt_progress": {
                "prompt": prompt,
                "total": total,
                "cached": progress.num_cached,
                "processed": progress.num_computed,
            },
        }

    async def begun(self, seconds: float) -> None:
        """Wait, not for long, until there is something to tell; raises where that is an error.

        So what fails before the first token has its own status, also in a stream.
        """
        streams = [request.stream.begun() for request in self.requests]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*streams), seconds)

    async def whole(self) -> Json:
        """Return the joined stream."""
        choices: dict[int, list[Json]] = {}
        further: Json = {}
        async for chunk in self.chunks():
            for choice in chunk["choices"]:
                choices.setdefault(choice["index"], []).append(choice)
            for name in ("timings", "prompt_token_ids"):
                if name in chunk:
                    further[name] = chunk[name]
        joined = [self.shape.join(choices[index]) for index in sorted(choices)]
        reply = self.shape.envelope(joined, is_whole=True)
        return {**reply, "usage": usage(self.maker.totals), **further}

    def close(self) -> None:
        """Abort what still runs."""
        self._note()
        for request in self.requests:
            request.close()

    def _note(self) -> None:
        totals = self.maker.totals
        self.note.update(
            prompt_tokens=totals.num_prompt_tokens,
            generated_tokens=totals.num_generated_tokens,
            finish=",".join(totals.finish_reasons) or "none",
            **timings(totals),
        )


async def _merged(streams: Sequence[AsyncIterator[OutputDelta | PromptProgress]]) -> Items:
    """Yield the items of several streams as they come, each with its stream's number."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    arrived: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(i, stream, arrived)) for i, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            found = await arrived.get()
            if found is None:
                num_open -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()


async def _pump(
    number: int,
    stream: AsyncIterator[OutputDelta | PromptProgress],
    arrived: "asyncio.Queue[Item | BaseException | None]",
) -> None:
    try:
        async for item in stream:
            arrived.put_nowait((number, item))
    except Exception as error:
        arrived.put_nowait(error)
    else:
        arrived.put_nowait(None)


# --- over HTTP ----------------------------------------------------------------------------------


async def watch(receive: Receive, on_disconnect: Callable[[], None]) -> None:
    """Wait until the client goes away, and say so."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            on_disconnect()
            return


async def answer_whole(reply: Reply, receive: Receive) -> Json:
    """Return the whole reply; a client that goes away ends it with ClientGoneError."""
    async with ending_with(receive, reply.close):
        return await reply.whole()


@contextlib.asynccontextmanager
async def ending_with(receive: Receive, close: Callable[[], None]) -> AsyncIterator[None]:
    """Call `close` when the client goes away, and at the end."""
    watching = asyncio.create_task(watch(receive, close))
    try:
        yield
    finally:
        watching.cancel()
        close()


class EventStream(Response):
    """A reply as server-sent events: an ASGI response.

    An error after the beginning becomes one event, and no [DONE] follows. A comment is sent
    whenever nothing else was for `keep_alive` seconds.
    """

    def __init__(self, reply: Reply, *, keep_alive: float, headers: dict[str, str]) -> None:
        self._reply = reply
        self._keep_alive = keep_alive
        self.status_code, self.background = 200, None
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()),
        ]
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        beginning: Message = {
            "type": "http.response.start",
            "status": 200,
            "headers": self.raw_headers,
        }
        tasks = [asyncio.create_task(watch(receive, self._reply.close))]
        try:
            await send(beginning)
            tasks.append(asyncio.create_task(self._keep_it_alive(send)))
            async for event in self._events():
                self._num_sent += 1
                await send({"type": "http.response.body", "body": event, "more_body": True})
            tasks.pop().cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in tasks:
                task.cancel()
            self._reply.close()

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._reply.chunks():
                yield b"data: " + _encode(chunk) + b"\n\n"
        except ClientGoneError:
            return
        except Exception as error:
            status, content, _ = failures.describe(error)
            content["error"]["status"] = status
            self._reply.note["error"] = type(error).__name__
            yield b"data: " + _encode(content) + b"\n\n"
            failures.log_unexpected(error)
        else:
            yield b"data: [DONE]\n\n"

    async def _keep_it_alive(self, send: Callable[[Message], Awaitable[None]]) -> None:
        if not self._keep_alive:
            return
        while True:
            before = self._num_sent
            await asyncio.sleep(self._keep_alive)
            if self._num_sent == before:
                with contextlib.suppress(OSError):
                    await send(
                        {"type": "http.response.body", "body": b": alive\n\n", "more_body": True}
                    )
