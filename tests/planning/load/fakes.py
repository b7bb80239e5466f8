"""A server that answers by script, and an event loop whose time is virtual.

Client and server share the loop and talk over a Unix socket, where what one writes the other can
read at once. So the loop knows when nothing is left to do but to wait, and then time jumps.
"""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import UnixConnector, web

T = TypeVar("T")


class _VirtualSelector(selectors.DefaultSelector):
    """Waits for nobody: where nothing is ready, its time jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing will ever happen"
            self.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self.virtual = _VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def run_virtually(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine on a new virtual loop."""

    async def started() -> T:
        return await main()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(started())


@dataclass
class Reply:
    """What the server does: one chunk after each delay, in seconds, then usage and [DONE].

    tokens_per_chunk: what usage counts for each chunk. breaks: the connection after the chunks.
    raw: sent instead of all that. ids: tell the token ids of each chunk.
    """

    delays: list[float] = field(default_factory=list)
    status: int = 200
    tokens_per_chunk: int = 1
    has_usage: bool = True
    num_cached: int | None = None
    breaks: bool = False
    raw: bytes | None = None
    ids: bool = False


Script = Callable[[int, dict[str, Any]], Reply]


def steady(first: float = 0.5, gap: float = 0.1, **fields: Any) -> Script:
    """A script: every answer has as many tokens as asked for, evenly spaced."""
    return lambda _, body: Reply([first, *[gap] * (body["max_tokens"] - 1)], **fields)


class ScriptedServer:
    """Answers completions by script; keeps every body and when it came."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []

    def app(self) -> web.Application:
        made = web.Application()
        made.router.add_post("/v1/completions", self._complete)
        made.router.add_get("/v1/models", self._models)
        return made

    @asynccontextmanager
    async def at(self, path: Path) -> AsyncIterator[UnixConnector]:
        """Listen on a Unix socket, and yield a connector to it."""
        runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(path)).start()
            yield UnixConnector(str(path), limit=0, force_close=True)
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}, {"id": "other"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.headers.append(dict(request.headers))
        number = len(self.bodies)
        self.bodies.append(body)
        self.times.append(asyncio.get_running_loop().time())
        reply = self.script(number, body)
        if reply.status != 200:
            return web.json_response({"error": {"message": "refused"}}, status=reply.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if reply.raw is not None:
            await response.write(reply.raw)
            return response
        for position, delay in enumerate(reply.delays):
            await asyncio.sleep(delay)
            await response.write(event(chunk(position, reply)))
        if reply.breaks:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b": still here\n\n")
        await response.write(event({"choices": [{"text": "", "finish_reason": "length"}]}))
        if reply.has_usage:
            await response.write(event({"choices": [], "usage": usage(body, reply)}))
        await response.write(b"data: [DONE]\n\n")
        return response


def chunk(position: int, reply: Reply) -> dict[str, Any]:
    """One chunk of an answer; every third has no text, as a part of a character has."""
    choice: dict[str, Any] = {"text": "" if position % 3 == 2 else "a", "finish_reason": None}
    if reply.ids:
        choice["token_ids"] = [7000 + position]
    return {"choices": [choice]}


def usage(body: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """What the server counted."""
    found: dict[str, Any] = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": len(reply.delays) * reply.tokens_per_chunk,
    }
    if reply.num_cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": reply.num_cached}
    return found


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"
