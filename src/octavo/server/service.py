"""From a validated prompt to a stream of the engine, within the server's limits.

Decides whether a request is taken, how long it may wait and run, and when the server is ready.
Owns the queue's bounds and the drain. Knows neither bodies nor replies.

Invariant: every stream that was opened is closed, and then leaves nothing running.
"""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from octavo.config import ServerConfig
from octavo.engine import clock
from octavo.engine.client import EngineClient, EngineState
from octavo.engine.intake import Prompt
from octavo.engine.messages import Stepped
from octavo.engine.outlook import Outlook
from octavo.engine.streams import DeltaStream
from octavo.errors import (
    DeadlineError,
    ModelNotFoundError,
    OctavoError,
    QueueTimeoutError,
    RetryLaterError,
    nearest,
)
from octavo.request import Pooling, SamplingParams
from octavo.server.admission import Admission
from octavo.server.metrics import ServerMetrics
from octavo.server.records import PromptRecord, Records, RequestRecord

DRAIN_LOOK_SECONDS = 0.02


class OpenRequest:
    """One prompt in the engine: its stream, and the timers that bound it.

    queue_position: when it came; the next to begin was 1. ended_early: why it did not end by
    itself, or "".
    """

    def __init__(
        self,
        stream: DeltaStream,
        on_close: Callable[["OpenRequest"], None],
        queue_position: int = 1,
    ) -> None:
        self.stream = stream
        self.queue_position = queue_position
        self.opened_at = clock.monotonic()
        self.ended_early = ""
        self._on_close = on_close
        self._timers: list[asyncio.TimerHandle] = []
        self._is_closed = False

    def bound(self, seconds: float, error: Exception, *, only_waiting: bool = False) -> None:
        """End the stream with `error` after some time; `only_waiting`: unless it has started."""

        def expire() -> None:
            if not (only_waiting and self.stream.is_started):
                self.stop(error)

        self._timers.append(asyncio.get_running_loop().call_later(seconds, expire))

    def stop(self, error: Exception) -> None:
        """End the request early; whoever reads its stream gets `error`."""
        if not self.stream.is_over:
            self.ended_early = str(error)
        self.stream.end_early(error)

    def close(self) -> None:
        """Abort the request unless it is over; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        if not self.stream.is_over:
            self.ended_early = "its reply was given up, as when a client goes away"
        self.stream.close()
        self._on_close(self)


class Service:
    """A server's state: the client, the queue, and whether it drains.

    model_names: under which the model is served; the first is the one that replies tell.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client = client
        self.config = config
        self.model_names = _names(client, config)
        self.started_at = int(clock.now().timestamp())
        self.is_draining = False
        self.admission = Admission(
            max_requests=config.max_waiting_requests,
            max_tokens=config.max_waiting_tokens,
            num_seats=client.config.max_num_seqs,
            outlook=self._outlook,
        )
        self.registry = CollectorRegistry()
        self._metrics = ServerMetrics(self.registry, self.model_names[0])
        self.records = Records(
            client.config.explain_max_requests, config.explain_seconds, clock.monotonic
        )
        client.observe(self._observe)
        self._open: set[OpenRequest] = set()
        self._serial = itertools.count()

    # --- requests -------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """Return the name to tell; raises ModelNotFoundError for one that is not served."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        served = ", ".join(self.model_names)
        raise ModelNotFoundError(
            f"The model {name[:100]!r} does not exist here. The server has {served}."
            f"{nearest(name[:100], self.model_names)}"
        )

    def check_open(self) -> None:
        """Raise RetryLaterError where no request is taken at all."""
        if self.is_draining:
            raise RetryLaterError(
                "The server is shutting down and takes no new requests.",
                self.config.shutdown_timeout,
            )
        status = self.client.status
        if status.state is not EngineState.READY:
            raise RetryLaterError(
                f"The engine is {status.state}: {status.reason}.", status.retry_after
            )

    def _outlook(self) -> Outlook | None:
        stats = self.client.stats()
        return None if stats is None else stats.outlook

    def _observe(self, step: Stepped | None) -> None:
        if step is None:
            self._metrics.forget_engine()
            self.records.lose_engine()
            return
        self.records.take(step.lives)
        now = clock.monotonic()
        for delta in step.deltas:
            self._metrics.observe_delta(delta, now)
        if step.stats is not None:
            self._metrics.observe_step(step.stats)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; ids of padding have none."""
        tokenizer = self.client.face.tokenizer
        if tokenizer is None or token_id >= tokenizer.vocab_size:
            return b""
        return tokenizer.token_bytes(token_id)

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        record: RequestRecord,
        priority: int = 0,
        timeout: float | None = None,
        pooling: Pooling | None = None,
    ) -> OpenRequest:
        """Queue a prompt; the caller closes what is returned. `timeout`: its deadline in seconds.

        record: of the request that it belongs to. Raises a `BadRequestError`, QueueFullError or
        RetryLaterError.
        """
        engine_id = f"{record.id}-{next(self._serial)}"
        try:
            self.check_open()
            ticket = self.admission.enter()
        except RetryLaterError as error:
            self.records.refuse(record, str(error))
            raise
        placed: PromptRecord | None = None
        try:
            request = await self.client.prepare(
                prompt, params, request_id=engine_id, priority=priority, pooling=pooling
            )
            ticket.add_tokens(len(request.prompt_token_ids))
            placed = self.records.open(record, engine_id)
            stream = await self.client.generate(request)
        except BaseException as error:
            ticket.leave()
            self._note_refusal(record, placed, error)
            raise
        stream.on_start(ticket.start)

        def forget(closed: OpenRequest) -> None:
            ticket.leave()
            self._open.discard(closed)
            self.records.close(record, placed, closed.ended_early)

        opened = OpenRequest(stream, forget, ticket.position)
        self._open.add(opened)
        self._bound(opened, timeout)
        return opened

    def _note_refusal(
        self, record: RequestRecord, placed: PromptRecord | None, error: BaseException
    ) -> None:
        """Record why a prompt did not come to run, unless that may tell some of its text."""
        why = str(error) if isinstance(error, RetryLaterError) else "the engine did not take it"
        if placed is not None:
            self.records.close(record, placed, why, was_taken=False)
        elif isinstance(error, RetryLaterError):
            self.records.refuse(record, why)

    def _bound(self, opened: OpenRequest, timeout: float | None) -> None:
        limit = self.config.queue_timeout
        opened.bound(
            limit,
            QueueTimeoutError(
                f"The request waited {limit:g} s, which is the longest that the server lets it.",
                self.admission.retry_after(),
            ),
            only_waiting=True,
        )
        limits = [t for t in (timeout, self.config.request_timeout) if t is not None]
        if limits:
            opened.bound(
                min(limits),
                DeadlineError(f"The request did not finish within its {min(limits):g} s."),
            )

    # --- the server as a whole ------------------------------------------------------------------

    def why_not_ready(self) -> str:
        """Return why a request would not be served now, or ""."""
        if self.is_draining:
            return "the server is shutting down"
        status = self.client.status
        if status.is_silent_too_long:
            return f"the engine has not finished a step for {status.silent_seconds:.1f} s"
        return "" if status.is_ready else f"the engine is {status.state}: {status.reason}"

    async def drain(self) -> None:
        """Take no new requests, let the running ones finish in time, and end those that do not."""
        self.is_draining = True
        await self._until_empty(self.config.shutdown_timeout)
        for opened in list(self._open):
            opened.stop(OctavoError("The server shut down before the request finished."))
        await self._until_empty(1.0)

    async def _until_empty(self, seconds: float) -> None:
        """Wait until no request is open, which includes those that the engine has yet to accept."""
        end = clock.monotonic() + seconds
        while self.admission.num_open and clock.monotonic() < end:
            await asyncio.sleep(DRAIN_LOOK_SECONDS)


def _names(client: EngineClient, config: ServerConfig) -> list[str]:
    given = (config.served_model_name or "").split(",")
    names = [name.strip() for name in given if name.strip()]
    if names:
        return names
    model = client.config.model
    # A path tells callers nothing that they may know.
    return [Path(model).name.removesuffix(".gguf") if Path(model).exists() else model]
