"""What a server sees of an engine: prepare, generate, abort, stats. `ThreadClient` runs it here.

Decides what a client says of its engine's state, and what the end of an engine means for its
requests. Knows neither HTTP nor what a step computes.

Invariant: each accepted request's stream ends exactly once: with its last delta or with an error.
"""

import asyncio
import enum
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.config import EngineConfig
from octavo.engine import clock
from octavo.engine.face import ModelFace, open_face
from octavo.engine.intake import Intake, Prompt
from octavo.engine.lives import Life
from octavo.engine.messages import (
    Abort,
    Add,
    Answered,
    AskLife,
    Command,
    Event,
    Expecting,
    LifeTold,
    Ready,
    ResetPrefixCache,
    Stepped,
    Stop,
)
from octavo.engine.stats import EngineStats
from octavo.engine.streams import DeltaStream, OpenRequests
from octavo.errors import (
    BadRequestError,
    EngineDeadError,
    InvalidParameterError,
    OctavoError,
    RetryLaterError,
)
from octavo.request import Pooling, Request, SamplingParams

Observer = Callable[[Stepped | None], None]
# Texts of more characters are tokenised beside the event loop.
LONG_TEXT = 2_000


class EngineState(enum.StrEnum):
    """Where an engine stands, as its client knows it."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """The engine's state, and why it is in it.

    silent_seconds: since the last step while requests run, else 0. retry_after: seconds until it
    may take requests, where it does not now.
    """

    state: EngineState
    reason: str = ""
    silent_seconds: float = 0.0
    is_silent_too_long: bool = False
    retry_after: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request would be served now."""
        return self.state is EngineState.READY and not self.is_silent_too_long


class EngineClient(Protocol):
    """One engine, wherever it runs. All of it belongs to one event loop.

    face: tokenizer, chat and defaults. reasons: how settings were resolved, once it is ready.
    """

    config: EngineConfig
    face: ModelFace

    @property
    def intake(self) -> Intake:
        """What builds valid requests; raises RetryLaterError before the engine was ever ready."""
        ...

    @property
    def reasons(self) -> list[str]:
        """How open settings were resolved."""
        ...

    @property
    def status(self) -> ClientStatus:
        """The engine's state."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often an engine was started in place of one that ended."""
        ...

    async def start(self) -> None:
        """Wait until the engine takes requests; raises why it cannot."""
        ...

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        pooling: Pooling | None = None,
    ) -> Request:
        """Tokenise and validate; raises a `BadRequestError` that names field and limit."""
        ...

    async def generate(self, request: Request) -> DeltaStream:
        """Hand over a prepared request; returns its stream once the engine has accepted it.

        Raises a `BadRequestError`, or a `RetryLaterError` where no engine takes requests.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request, if it still runs: its blocks are free before the next step is planned."""
        ...

    async def life_of(self, request_id: str) -> Life | None:
        """Return the life so far of a request; None if the engine has none with this id.

        Those that ended come with the steps that `observe` tells of.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Let no later request reuse what is cached now."""
        ...

    def observe(self, observer: Observer) -> None:
        """Call `observer` with every step from now on, and with None when an engine has ended."""
        ...

    def stats(self) -> EngineStats | None:
        """Return the latest snapshot, at most a fraction of a second old; None before any."""
        ...

    async def close(self) -> None:
        """End every request and the engine."""
        ...


class ClientBase:
    """What the clients share: everything but how messages travel.

    A subclass implements `_send`, `start`, `close` and `status`, and passes every event to `_take`.
    """

    def __init__(self, config: EngineConfig, face: ModelFace | None = None) -> None:
        self.config = config
        self.face = face or open_face(config)
        self.num_restarts = 0
        self._state = EngineState.LOADING
        self._reason = "the model is being loaded"
        self._ready: Ready | None = None
        self._intake: Intake | None = None
        self._stats: EngineStats | None = None
        self._requests = OpenRequests()
        self._last_beat = 0.0
        self._last_step_seconds = 0.0
        self._expected_seconds = 0.0  # of the step that runs, as predicted
        self._observers: list[Observer] = []
        self._asked: dict[str, list[asyncio.Future[Life | None]]] = {}

    @property
    def intake(self) -> Intake:
        """See `EngineClient`."""
        if self._intake is None:
            raise RetryLaterError(f"The engine is not ready: {self._reason}.", 1.0)
        return self._intake

    @property
    def reasons(self) -> list[str]:
        """See `EngineClient`."""
        return [] if self._ready is None else self._ready.reasons

    def stats(self) -> EngineStats | None:
        """See `EngineClient`."""
        return self._stats

    def observe(self, observer: Observer) -> None:
        """See `EngineClient`."""
        self._observers.append(observer)

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        pooling: Pooling | None = None,
    ) -> Request:
        """See `EngineClient`."""
        intake = self.intake

        def build() -> Request:
            return intake.build(
                prompt,
                params,
                request_id=request_id,
                number=0,  # the engine derives the seed
                arrival_time=clock.monotonic(),
                priority=priority,
                pooling=pooling,
            )

        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if params.bad_words or (isinstance(text, str) and len(text) > LONG_TEXT):
            return await asyncio.to_thread(build)
        return build()

    async def generate(self, request: Request) -> DeltaStream:
        """See `EngineClient`."""
        self._require_ready()
        if request.request_id in self._requests:
            raise InvalidParameterError("request_id", request.request_id, "one that is not in use")
        stream = DeltaStream(request, self._abandon)
        if not self._requests:
            self._last_beat = clock.monotonic()  # silence counts from here
        self._hand_over(stream)
        try:
            await stream.accepted()
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    def _hand_over(self, stream: DeltaStream) -> None:
        request = stream.request
        self._requests.add(stream)
        try:
            self._send(
                Add(
                    request.request_id,
                    request.prompt_token_ids,
                    request.params,
                    request.priority,
                    request.extra_keys[0] if request.extra_keys else None,
                    request.pooling,
                )
            )
        except (ValueError, OverflowError, RecursionError) as error:  # what no message can hold
            self._requests.remove(request.request_id)
            raise BadRequestError(
                f"The request holds what the engine cannot be told: {error}."
            ) from None

    def abort(self, request_id: str) -> None:
        """See `EngineClient`."""
        stream = self._requests.remove(request_id)
        if stream is not None:
            stream.is_over = True
            self._send(Abort(request_id))

    async def life_of(self, request_id: str) -> Life | None:
        """See `EngineClient`."""
        if self._state is not EngineState.READY:
            return None
        asked: asyncio.Future[Life | None] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(request_id, []).append(asked)
        self._send(AskLife(request_id))
        return await asked

    def _answer_life(self, request_id: str, life: Life | None) -> None:
        for asked in self._asked.pop(request_id, []):
            if not asked.done():
                asked.set_result(life)

    def reset_prefix_cache(self) -> None:
        """See `EngineClient`."""
        self._require_ready()
        self._send(ResetPrefixCache())

    def _abandon(self, stream: DeltaStream) -> None:
        self.abort(stream.request.request_id)

    def _require_ready(self) -> None:
        if self._state is not EngineState.READY:
            retry = self.status.retry_after
            raise RetryLaterError(f"The engine is {self._state}: {self._reason}.", retry)

    @property
    def status(self) -> ClientStatus:
        """See `EngineClient`."""
        return ClientStatus(self._state, self._reason)

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    # --- events ---------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        """Bring one event to whom it concerns."""
        self._last_beat = clock.monotonic()
        match event:
            case Stepped():
                self._last_step_seconds, self._expected_seconds = event.seconds, 0.0
                self._stats = event.stats or self._stats
                self._tell(event)
                self._requests.take_step(event)
            case Expecting(seconds):
                self._expected_seconds = seconds
            case Answered():
                self._requests.take_answers(event)
            case LifeTold(request_id, life):
                self._answer_life(request_id, life)
            case Ready():
                self._become_ready(event)
            case _:
                pass

    def _tell(self, step: Stepped | None) -> None:
        for observer in self._observers:
            observer(step)

    def _end_requests(self, error: Exception) -> None:
        """The engine is gone: each of its requests gets `error`."""
        self._stats = None
        self._tell(None)
        for request_id in list(self._asked):
            self._answer_life(request_id, None)
        self._requests.fail_all(error)

    def _become_ready(self, ready: Ready) -> None:
        self._ready = ready
        self._stats = ready.stats
        self._state, self._reason = EngineState.READY, ""
        self._intake = Intake(
            tokenizer=self.face.tokenizer,
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            max_pool_tokens=ready.max_pool_tokens,
            seed=self.config.seed,
        )


class _ThreadPort:
    """Two queues as the port of an engine loop."""

    def __init__(self, deliver: Callable[[Event], None]) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._deliver = deliver

    def receive(self, *, wait: bool) -> list[Command]:
        """See `Port`."""
        received: list[Command] = []
        try:
            while True:
                received.append(self.commands.get(block=wait and not received))
        except queue.Empty:
            return received

    def send(self, event: Event) -> None:
        """See `Port`."""
        self._deliver(event)


class ThreadClient(ClientBase):
    """An engine in a thread of this process: the same loop and messages, without supervision."""

    _port: _ThreadPort
    _thread: threading.Thread

    async def start(self) -> None:
        """See `EngineClient`."""
        from octavo.engine.start import start_engine

        self._loop = asyncio.get_running_loop()
        self._port = _ThreadPort(self._deliver)
        started = await asyncio.to_thread(start_engine, self.config, encodes=False)
        self._engine = started.engine
        from octavo.engine.loop import EngineLoop, describe_ready

        self._become_ready(describe_ready(started))
        engine_loop = EngineLoop(started.engine, self._port, clock.monotonic)
        self._thread = threading.Thread(target=self._run, args=(engine_loop.run,), daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """See `EngineClient`."""
        if self._state in (EngineState.LOADING, EngineState.CLOSED):
            return
        self._state, self._reason = EngineState.CLOSED, "it was closed"
        self._send(Stop())
        await asyncio.to_thread(self._thread.join)
        self._engine.close()
        self._end_requests(OctavoError("The engine was closed."))

    def _run(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except Exception as error:
            self._loop.call_soon_threadsafe(self._die, error)
            raise

    def _die(self, error: Exception) -> None:
        self._state, self._reason = EngineState.FAILED, f"it broke: {type(error).__name__}"
        self._end_requests(EngineDeadError("The engine broke while the request ran."))

    def _deliver(self, event: Event) -> None:
        # The loop is closed where the server has gone first; then nobody waits.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, event)

    def _send(self, command: Command) -> None:
        self._port.commands.put(command)
