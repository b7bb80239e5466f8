"""The route that turns texts into vectors: the pooled final states of a decoder.

Decides how states become vectors, and how many inputs of a request are in the engine at once.
Computes nothing with the model. Invariant: every input has one vector, in the order given.
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.engine.outputs import OutputDelta
from octavo.engine.pooling import Floats, as_vector
from octavo.errors import BadRequestError
from octavo.request import Pooling, SamplingParams
from octavo.server.answering import ClientGoneError, ending_with
from octavo.server.bodies import EmbeddingBody
from octavo.server.failures import JSONReply
from octavo.server.gate import CALLER, NOTE, REQUEST_ID
from octavo.server.generation import as_prompt, note_ignored
from octavo.server.records import RequestRecord
from octavo.server.service import OpenRequest, Service

# Inputs of one request that wait or run at once, so that a long list does not fill the queue.
WINDOW = 32


class Embeddings:
    """Handler of /v1/embeddings."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, body: EmbeddingBody, http: HttpRequest) -> Response:
        """Return a vector for each input."""
        service = self._service
        reply_id = f"embd-{http.scope[REQUEST_ID]}"
        record = service.records.begin(reply_id, http.scope[CALLER])
        headers = note_ignored(body, http, strict=service.config.strict)
        model = service.check_model(body.model)
        pooling = self._pooling(body)
        service.check_open()
        run = _Run(service, body, pooling, record)
        async with ending_with(http.receive, run.close):
            vectors = [
                as_vector(state, dimensions=body.dimensions, normalize=body.normalize)
                for state in await run.states(body.inputs())
            ]
        http.scope[NOTE].update(prompt_tokens=run.num_tokens, inputs=len(vectors))
        reply = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encoded(vector, body)}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": run.num_tokens, "total_tokens": run.num_tokens},
        }
        return JSONReply(reply, headers=headers)

    def _pooling(self, body: EmbeddingBody) -> Pooling:
        served = self._service.config.pooling
        if served == "none":
            raise BadRequestError(
                "This model is not served for embeddings: octavo was started with --pooling none."
            )
        return body.pooling or served


class _Run:
    """The inputs of one request on their way through the engine."""

    def __init__(
        self, service: Service, body: EmbeddingBody, pooling: Pooling, record: RequestRecord
    ) -> None:
        self._service = service
        self._body = body
        self._pooling = pooling
        self._record = record
        self._params = SamplingParams(
            temperature=0, detokenize=False, truncate_prompt_tokens=body.truncate_prompt_tokens
        )
        self._open: set[OpenRequest] = set()
        self._is_closed = False
        self.num_tokens = 0

    async def states(self, inputs: Sequence[str | list[int]]) -> list[bytes]:
        """Return each input's pooled state; the first error ends those of the others."""
        window = asyncio.Semaphore(WINDOW)

        async def one(given: str | list[int]) -> bytes:
            async with window:
                return await self._state(given)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(given)) for given in inputs]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [task.result() for task in tasks]

    async def _state(self, given: str | list[int]) -> bytes:
        if self._is_closed:
            raise ClientGoneError
        body = self._body
        opened = await self._service.open(
            as_prompt(given, body.cache_salt),
            self._params,
            record=self._record,
            priority=body.priority,
            timeout=body.timeout,
            pooling=self._pooling,
        )
        self._open.add(opened)
        try:
            pooled = await _last_delta(opened)
            self.num_tokens += len(opened.stream.request.prompt_token_ids)
        finally:
            opened.close()
            self._open.discard(opened)
        return pooled

    def close(self) -> None:
        """End what still runs, and let nothing more begin."""
        self._is_closed = True
        for opened in list(self._open):
            opened.close()


async def _last_delta(opened: OpenRequest) -> bytes:
    """Return the state that comes with a request's last delta."""
    async for item in opened.stream:
        if isinstance(item, OutputDelta) and item.is_last:
            if item.error is not None:
                raise item.error
            if item.pooled is not None:
                return item.pooled
    raise ClientGoneError


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def encoded(vector: Floats, body: EmbeddingBody) -> Any:
    """Return a vector as numbers, or as base64 of little-endian float32."""
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()
