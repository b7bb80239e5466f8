"""One streamed completion of an OpenAI-compatible server, and what was seen of it.

Decides what is asked and what counts as a token: a chunk with a choice, unless it only ends the
answer. Whatever goes wrong is part of the outcome, never raised. Knows nothing of other requests.

Invariant: an outcome has either all times or an error.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# What an error message may take of a reply.
_SHOWN = 300
# What a reply that is no proper stream of events may raise where it is read.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and what every one of them carries.

    extra: fields merged into the body; None removes one.
    """

    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: list[int], num_output_tokens: int, **fields: Any) -> dict[str, Any]:
        """Return what asks for so many tokens after `prompt`."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            **fields,
            **self.extra,
        }
        return {name: value for name, value in body.items() if value is not None}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of one request. Times are in seconds.

    sent: when, after the start of the run; late: how long after it was due. ttft: from then to
    the first token; e2e: to the end of the stream; gaps: between chunks. num_output_tokens and
    num_prompt_tokens are the server's own counts if it tells them. error: why it failed.
    """

    sent: float
    num_prompt_tokens: int
    num_wanted: int
    late: float = 0.0
    ttft: float | None = None
    e2e: float | None = None
    gaps: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it was answered to the end."""
        return not self.error

    @property
    def is_short(self) -> bool:
        """Whether it was answered with another number of tokens than was asked for."""
        return self.is_good and self.num_output_tokens != self.num_wanted

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is only one."""
        if not self.is_good or self.num_output_tokens < 2:
            return None
        return sum(self.gaps) / (self.num_output_tokens - 1)


class ReplyError(Exception):
    """A reply that is an error or makes no sense; the message is shown."""


async def complete(
    session: aiohttp.ClientSession, target: Target, body: Mapping[str, Any], outcome: Outcome
) -> None:
    """Send one request and write into `outcome` what is seen of it."""
    try:
        await _stream(session, target, body, outcome)
    except TimeoutError:
        outcome.error = "timed out"
    except ReplyError as error:
        outcome.error = str(error)[:_SHOWN]
    except (aiohttp.ClientError, OSError, *_MALFORMED) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:_SHOWN]


async def _stream(
    session: aiohttp.ClientSession, target: Target, body: Mapping[str, Any], outcome: Outcome
) -> None:
    clock = asyncio.get_running_loop().time
    start, last, num_chunks = clock(), 0.0, 0
    usage: Mapping[str, Any] = {}
    is_ended = False
    async with session.post(target.url, json=body) as response:
        if response.status != 200:
            text = (await response.text(errors="replace")).strip()
            raise ReplyError(f"HTTP {response.status}: {text}")
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue  # a comment that keeps the stream alive, or the blank line between events
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            now = clock()
            event = _parse(data)
            usage = event.get("usage") or usage
            is_ended = is_ended or _ends(event)
            if _has_token(event):
                num_chunks += 1
                outcome.token_ids += event["choices"][0].get("token_ids") or ()
                if outcome.ttft is None:
                    outcome.ttft = now - start
                else:
                    outcome.gaps.append(now - last)
                last = now
    outcome.e2e = clock() - start
    _count(outcome, usage, num_chunks)
    if not is_ended:
        raise ReplyError("the stream broke off before the answer's end")
    if outcome.ttft is None:
        raise ReplyError("no token came")


def _parse(data: bytes) -> Mapping[str, Any]:
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ReplyError(f"not an event: {event!r}")
    if error := event.get("error"):
        raise ReplyError(
            str(error.get("message", error)) if isinstance(error, dict) else str(error)
        )
    return event


def _ends(event: Mapping[str, Any]) -> bool:
    return bool(event.get("choices") and event["choices"][0].get("finish_reason"))


def _has_token(event: Mapping[str, Any]) -> bool:
    """Whether a chunk carries a token.

    An empty piece of text may be part of a character; the chunk that only ends the answer has an
    empty text too, and the chunk that carries usage has no choice.
    """
    if not event.get("choices"):
        return False
    choice = event["choices"][0]
    return bool(choice.get("text") or choice.get("token_ids") or not choice.get("finish_reason"))


def _count(outcome: Outcome, usage: Mapping[str, Any], num_chunks: int) -> None:
    outcome.num_output_tokens = usage.get("completion_tokens") or num_chunks
    outcome.num_prompt_tokens = usage.get("prompt_tokens") or outcome.num_prompt_tokens
    details = usage.get("prompt_tokens_details") or {}
    outcome.num_cached_tokens = details.get("cached_tokens")
