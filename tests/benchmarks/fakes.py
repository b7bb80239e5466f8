"""A small OpenAI-like server for the client's tests, on this machine's loopback."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Script = Callable[[dict], list[bytes]]

USAGE = {"completion_tokens": 2}


def event(values: dict | str) -> bytes:
    """Return one server-sent event."""
    text = values if isinstance(values, str) else json.dumps(values)
    return f"data: {text}\n\n".encode()


def token(text: str, finish: str | None = None) -> bytes:
    """Return the event of a token."""
    return event({"choices": [{"text": text, "finish_reason": finish}]})


def answer(request: dict) -> list[bytes]:
    """Return the events of a whole answer, of as many tokens as were asked for."""
    count = request["max_tokens"]
    usage = event({"choices": [], "usage": {"completion_tokens": count}})
    return [*(token("x") for _ in range(count)), token("", "length"), usage, event("[DONE]")]


@asynccontextmanager
async def server(
    script: Script, *, status: int | str = 200, hang: bool = False
) -> AsyncIterator[int]:
    """Serve what `script` says of each request's body; yield the port.

    hang: never end an answer.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        body = await reader.readexactly(length)
        writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in script(json.loads(body or b"{}")):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if hang:
            await writer.drain()
            await reader.read()  # until the client goes
        else:
            writer.write(b"0\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]
