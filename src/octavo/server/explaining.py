"""The route that tells the life of one request, in words and numbers.

Decides how a record and the lives of its prompts become a document. The words of a life are those
of `engine.explain`. Invariant: the parts of a prompt add up to its wall time, and nothing is told
of a request's text.
"""

import asyncio
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.engine import clock
from octavo.engine.explain import duration, explain, what
from octavo.engine.lives import Life, Part, Work
from octavo.errors import RetryLaterError
from octavo.server.failures import JSONReply
from octavo.server.gate import CALLER
from octavo.server.records import PromptRecord, RequestRecord
from octavo.server.service import Service

Json = dict[str, Any]
ANSWER_SECONDS = 10.0  # how long the engine may take to tell of a request that runs


class Explaining:
    """Handler of /v1/requests/{id}/explain."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def explain(self, request_id: str, http: HttpRequest) -> Response:
        """Tell what happened to a request, by its x-request-id or its reply's id."""
        record = self._service.records.find(request_id, http.scope[CALLER])
        prompts = [await self._prompt(record, prompt) for prompt in record.prompts]
        return JSONReply(_document(record, prompts, self._service.model_names[0]))

    async def _prompt(self, record: RequestRecord, prompt: PromptRecord) -> Json:
        life = prompt.life
        if life is None and not prompt.is_lost:
            life = await self._so_far(prompt.engine_id)
            # While it was asked, the request may have ended, and so may the engine.
            life = prompt.life or life
        return _of_prompt(record, prompt, life, clock.monotonic())

    async def _so_far(self, engine_id: str) -> Life | None:
        try:
            return await asyncio.wait_for(self._service.client.life_of(engine_id), ANSWER_SECONDS)
        except TimeoutError:
            raise RetryLaterError(
                f"The engine has been in one step for {ANSWER_SECONDS:.0f} s and has not told of "
                "the request yet. Ask again, or once it has ended.",
                ANSWER_SECONDS,
            ) from None


def _document(record: RequestRecord, prompts: list[Json], model: str) -> Json:
    """Return the whole: of several prompts, the longest one's parts stand for the request."""
    document: Json = {
        "id": record.id,
        "object": "request.explanation",
        "model": model,
        "status": _status(record, prompts),
    }
    if not prompts:
        seconds = (record.ended_at or record.began_at) - record.began_at
        refused = _part("handover", "refused before it reached the engine", seconds)
        summary = f"Refused after {duration(seconds)}: {record.refused}"
        return {**document, "wall_seconds": seconds, "summary": [summary], "parts": [refused]}
    longest = max(prompts, key=lambda prompt: prompt["wall_seconds"])
    document |= {name: longest[name] for name in ("wall_seconds", "summary", "parts")}
    number = len(prompts) + record.num_more
    if number > 1:
        shown = f", of which {len(prompts)} are told" if record.num_more else ""
        headline = f"One of {number:,} prompts{shown}; this one took longest."
        document["summary"] = [headline, *longest["summary"]]
        document["prompts"] = prompts
    else:
        document |= {name: value for name, value in longest.items() if name not in document}
    return document


def _status(record: RequestRecord, prompts: list[Json]) -> str:
    if not prompts:
        return "refused"
    found = {prompt["status"] for prompt in prompts}
    return next(status for status in ("lost", "running", "ended") if status in found)


def _of_prompt(record: RequestRecord, prompt: PromptRecord, life: Life | None, now: float) -> Json:
    closed_at = prompt.closed_at
    if life is None:
        return _lost(prompt, (now if closed_at is None else closed_at) - record.began_at)
    before = life.arrival_time - record.began_at
    parts = [_part("handover", "checked, tokenised and handed to the engine", before)]
    parts += [_of_part(part) for part in life.parts]
    # A reply that was given up is closed before its request ends in the engine.
    end = life.until if closed_at is None else max(closed_at, life.until)
    if end > life.until:
        parts.append(_part("reply", "sending the end of the reply", end - life.until))
    summary = explain(life)
    if prompt.why:
        summary.append(f"The server ended it: {prompt.why.rstrip('.')}.")
    return {
        "status": "running" if life.finish_reason is None else "ended",
        "wall_seconds": end - record.began_at,
        "summary": summary,
        "parts": parts,
        "finish_reason": life.finish_reason,
        "prompt_tokens": life.num_prompt_tokens,
        "generated_tokens": life.num_generated_tokens,
        "cache": _cache(life),
        "preemptions": life.num_preemptions,
        "recomputed_tokens": life.num_recomputed_tokens,
        "recovered_tokens": life.num_recovered_tokens,
    }


def _lost(prompt: PromptRecord, wall: float) -> Json:
    """Return what is left of a request whose engine died, or never took it."""
    if prompt.is_lost:
        summary = "Its engine died while it ran, and what the engine knew of it is lost."
    else:
        summary = f"It never ran: {prompt.why.rstrip('.')}." if prompt.why else "It never ran."
    lost = _part("lost", "nothing is known of it in the engine", wall)
    status = "lost" if prompt.is_lost else "ended"
    return {"status": status, "wall_seconds": wall, "summary": [summary], "parts": [lost]}


def _cache(life: Life) -> Json | None:
    lookup, admitted = life.cache, life.admitted_at
    if lookup is None or admitted is None:
        return None

    def age(moment: float | None) -> float | None:
        return None if moment is None else admitted - moment

    return {
        "cached_tokens": lookup.num_tokens,
        "miss": str(lookup.miss),
        "num_sources": lookup.num_sources,
        "newest_seconds": age(lookup.newest),
        "oldest_seconds": age(lookup.oldest),
        "evicted_seconds": age(lookup.evicted_at),
        "is_salted": lookup.is_salted,
    }


def _of_part(part: Part) -> Json:
    told = _part(part.name, what(part), part.seconds)
    if part.reason:
        told["reason"] = part.reason
    if part.work.num_steps:
        told |= _work(part.work)
    if part.num_tokens:
        told |= {"tokens": part.num_tokens, "mean_decodes": part.num_beside / part.work.num_steps}
    return told


def _work(work: Work) -> Json:
    told: Json = {"steps": work.num_steps, "mean_sequences": work.num_chunks / work.num_steps}
    if work.bound is not None:
        told |= {
            "flops": work.flops,
            "bytes": work.num_bytes,
            "intensity": work.intensity,
            "bound": work.bound,
            "roofline_share": work.roofline_share,
        }
    return told


def _part(name: str, words: str, seconds: float) -> Json:
    return {"name": name, "what": words, "seconds": seconds}
