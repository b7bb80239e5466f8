"""`ChildClient`: an engine in a child process, watched and replaced when it dies or hangs.

Decides when a child counts as hung, what its death means for the requests it ran, and when to stop
starting new ones. Knows neither HTTP nor what a step computes.

Invariant: at most one child is alive; a request that ran when a child ended is never replayed.
"""

import asyncio
import contextlib
import subprocess
from collections import deque
from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.engine import clock
from octavo.engine.client import ClientBase, ClientStatus, EngineState
from octavo.engine.face import ModelFace
from octavo.engine.frames import FrameBuffer
from octavo.engine.launch import LaunchedChild, launch_child
from octavo.engine.messages import (
    Command,
    Event,
    Loading,
    Ready,
    StartFailed,
    decode_event,
    encode,
)
from octavo.errors import EngineDeadError, OctavoError

WATCH_SECONDS = 0.25
EXIT_SECONDS = 1.0
MAX_RESTARTS, RESTART_WINDOW_SECONDS = 3, 60.0
STEP_FACTOR = 5  # a step may take so many times what is predicted, or what the last one took


class _Connection(asyncio.Protocol):
    """The parent's end of the socket to one child."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._frames = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for content in self._frames.push(data):
            self._on_event(decode_event(content))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def write(self, frame: bytes) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class ChildClient(ClientBase):
    """Starts a child, watches its heartbeat, and starts another when it ends.

    step_timeout: seconds without a finished step, while requests run, after which a child counts as
    hung, unless its last step took more than a fifth of that or the present one is predicted to.
    launched: the first child, if it runs already.
    """

    def __init__(
        self,
        config: EngineConfig,
        face: ModelFace | None = None,
        *,
        step_timeout: float = 10.0,
        launched: LaunchedChild | None = None,
    ) -> None:
        super().__init__(config, face)
        self._launched = launched
        self._step_timeout = step_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: _Connection | None = None
        self._start_error: Exception | None = None
        self._started: asyncio.Future[None] | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._ends: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._spawned_at = 0.0
        self._load_seconds = 5.0
        self._is_hung = False

    @property
    def pid(self) -> int | None:
        """Process id of the child that runs now."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """See `EngineClient`."""
        self._started = asyncio.get_running_loop().create_future()
        await self._spawn()
        self._supervising = asyncio.create_task(self._watch_over(), name="engine supervisor")
        await self._started

    async def close(self) -> None:
        """See `EngineClient`."""
        self._state, self._reason = EngineState.CLOSED, "the server is shutting down"
        if self._supervising is not None:
            self._supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervising
        await self._kill()
        self._end_requests(OctavoError("The engine was closed."))

    @property
    def status(self) -> ClientStatus:
        """See `EngineClient`."""
        now = clock.monotonic()
        silent = now - self._last_beat if self._requests else 0.0
        retry_after = None
        if self._state in (EngineState.LOADING, EngineState.RESTARTING):
            retry_after = max(1.0, self._load_seconds - (now - self._spawned_at))
        return ClientStatus(
            self._state, self._reason, silent, silent > self._longest_silence, retry_after
        )

    @property
    def _longest_silence(self) -> float:
        step = max(self._last_step_seconds, self._expected_seconds)
        return max(self._step_timeout, STEP_FACTOR * step)

    def _send(self, command: Command) -> None:
        assert self._connection is not None
        self._connection.write(encode(command))

    def _take(self, event: Event) -> None:
        if isinstance(event, StartFailed):
            self._start_error = event.error
        elif isinstance(event, Loading):
            if self._state is EngineState.LOADING:
                self._reason = event.stage
        elif isinstance(event, Ready):
            self._load_seconds = clock.monotonic() - self._spawned_at
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
        super()._take(event)

    # --- one child ------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        """Connect to a new process. The event loop's thread must be one that lasts."""
        child, self._launched = self._launched or launch_child(self.config), None
        self._spawned_at = child.launched_at
        self._last_step_seconds = self._expected_seconds = 0.0
        self._start_error, self._is_hung = None, False
        self._process = child.process
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._take), sock=child.connection
        )
        self._connection = connection

    async def _exit_code(self) -> int | None:
        """Return how the child ended; its socket may close a moment before it is gone."""
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    async def _kill(self) -> None:
        """Kill the child, whatever it does, and reap it."""
        if self._connection is not None:
            self._connection.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    # --- its successors -------------------------------------------------------------------------

    async def _watch_over(self) -> None:
        """Supervise; what breaks that is a state too, and not silence."""
        try:
            await self._supervise()
        except Exception as error:
            why = f"its supervision broke: {type(error).__name__}: {error}"
            self._state, self._reason = EngineState.FAILED, why
            self._end_requests(EngineDeadError(f"The engine is lost: {why}."))
            raise

    async def _supervise(self) -> None:
        while True:
            await self._until_end()
            error = self._start_error
            self._state, self._reason = EngineState.RESTARTING, "it ended"
            why = "hung" if self._is_hung else _how_it_ended(await self._exit_code())
            self._reason = f"it {why}"
            self._end_requests(
                EngineDeadError(
                    f"The engine {why} while the request ran. Send the request again.",
                    max(1.0, self._load_seconds),
                )
            )
            await self._kill()
            if self._gives_up(error, why):
                return
            self.num_restarts += 1
            await self._spawn()

    def _gives_up(self, start_error: Exception | None, why: str) -> bool:
        """Whether no other child is to be started: the first failed, or too many ended."""
        if self._started is not None and not self._started.done():
            error = start_error or OctavoError(f"The engine {why} before it was ready.")
            self._state, self._reason = EngineState.FAILED, str(error)
            self._started.set_exception(error)
            return True
        now = clock.monotonic()
        recent = len(self._ends) == MAX_RESTARTS and now - self._ends[0] < RESTART_WINDOW_SECONDS
        self._ends.append(now)
        if recent:
            because = f" Last: {start_error}" if start_error else f" Last, it {why}."
            self._state = EngineState.FAILED
            self._reason = (
                f"it was restarted {MAX_RESTARTS} times within "
                f"{RESTART_WINDOW_SECONDS:.0f} s and is not started again.{because}"
            ).rstrip(".")
        return recent

    async def _until_end(self) -> None:
        """Return when the child has died or hangs."""
        connection = self._connection
        assert connection is not None
        last_look = clock.monotonic()
        while not connection.ended.done():
            await asyncio.wait([connection.ended], timeout=WATCH_SECONDS)
            now = clock.monotonic()
            # After a pause of this very process, what the child sent has to be read first.
            was_away = now - last_look > 4 * WATCH_SECONDS
            last_look = now
            if was_away or self._state is not EngineState.READY:
                continue
            if self.status.is_silent_too_long:
                self._is_hung = True
                return


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None or returncode == 0:
        return "ended"
    if returncode < 0:
        return f"was killed by signal {-returncode}"
    return f"ended with exit code {returncode}"
