"""A closed loop over an OpenAI-compatible server: streamed completions of token ids.

Decides what a request is and which piece of a stream is a token. It runs on the CPUs of the server
that it measures, so it is little more than a socket and a parser. Knows no engine.

Invariant: an answer that failed or is short raises; only a run at its limit of time is partial.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httptools

from benchmarks.peers.figures import Answer, Seen

HOST = "127.0.0.1"
_READ_BYTES = 1 << 16


class ReplyError(Exception):
    """A server's answer that is not what was asked for."""


class Reply:
    """One response as it comes in; the callbacks are httptools'."""

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.first: float | None = None
        self.last: float | None = None
        self.pieces = 0
        self.usage: dict[str, Any] | None = None
        self.is_whole = False
        self.body = b""
        self._line = b""
        self._error: str | None = None
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if self.parser.get_status_code() != 200:
            self.body += body
            return
        *lines, self._line = (self._line + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        """Note the end."""
        self.is_whole = True

    def _event(self, text: bytes) -> None:
        if text == b"[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError:
            self._error = f"an event is no JSON: {text[:100]!r}"
            return
        if event.get("error"):
            self._error = str(event["error"])
        self.usage = event.get("usage") or self.usage
        if _has_token(event):
            self.last = time.perf_counter()
            self.first = self.last if self.first is None else self.first
            self.pieces += 1

    def check(self, output_tokens: int) -> None:
        """Raise ReplyError unless it ended well and with so many tokens."""
        status = self.parser.get_status_code()
        if status != 200:
            raise ReplyError(f"HTTP {status}: {self.body[:300].decode(errors='replace')}")
        if self._error:
            raise ReplyError(self._error[:300])
        if not self.is_whole:
            raise ReplyError("the connection ended before the answer did")
        if self.tokens != output_tokens or self.first is None:
            raise ReplyError(f"an answer has {self.tokens} of {output_tokens} tokens")

    @property
    def tokens(self) -> int:
        """Tokens of the answer: as the server counts them, else one per piece."""
        return int(self.usage["completion_tokens"]) if self.usage is not None else self.pieces

    def answer(self) -> Answer:
        """Return what was seen."""
        return Answer(self.sent, self.first, self.last, self.tokens)


def _has_token(event: dict[str, Any]) -> bool:
    """Return whether an event brings a token; one without text does: part of a character.

    The event that only ends an answer, and the one that only counts, bring none.
    """
    choices = event.get("choices") or []
    return any(choice.get("text") or not choice.get("finish_reason") for choice in choices)


def request_bytes(method: str, path: str, body: bytes = b"") -> bytes:
    """Return an HTTP request for a connection of its own."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _ask(port: int, model: str, prompt: list[int], output_tokens: int, reply: Reply) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    await _exchange(
        port, request_bytes("POST", "/v1/completions", json.dumps(body).encode()), reply
    )
    reply.check(output_tokens)


async def _exchange(port: int, request: bytes, reply: Reply) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        while not reply.is_whole and (received := await reader.read(_READ_BYTES)):
            reply.parser.feed_data(received)
    except httptools.HttpParserError as error:
        raise ReplyError(f"what came is no HTTP: {error}") from None
    finally:
        writer.close()


async def is_ready(port: int, path: str) -> bool:
    """Return whether a GET of `path` is answered with 200."""
    reply = Reply(time.perf_counter())
    try:
        await _exchange(port, request_bytes("GET", path), reply)
        return reply.parser.get_status_code() == 200
    except (OSError, ReplyError):
        return False


async def run_streams(
    port: int,
    model: str,
    prompts: Sequence[list[int]],
    *,
    streams: int,
    output_tokens: int,
    limit: float,
) -> Seen:
    """Keep `streams` requests in flight until all are answered or `limit` seconds have passed.

    Raises ReplyError or OSError for the first answer that fails.
    """
    waiting = iter(prompts)
    replies: list[Reply] = []
    begun = time.perf_counter()
    cut = False
    try:
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(_stream(port, model, waiting, output_tokens, replies))
    except TimeoutError:
        cut = True
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    seconds = time.perf_counter() - begun
    return Seen(tuple(reply.answer() for reply in replies), seconds, cut)


async def _stream(
    port: int, model: str, waiting: Iterator[list[int]], output_tokens: int, replies: list[Reply]
) -> None:
    for prompt in waiting:
        reply = Reply(time.perf_counter())
        replies.append(reply)
        await _ask(port, model, prompt, output_tokens, reply)
