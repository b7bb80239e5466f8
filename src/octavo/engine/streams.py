"""The deltas of each request, on their way to the coroutine that waits for them.

Decides how what an engine sends reaches readers of one event loop, and how a stream ends. Knows
neither HTTP nor where the engine runs.

Invariant: each accepted request's stream ends exactly once: with its last delta or with an error.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from octavo.engine.messages import Answered, Stepped
from octavo.engine.outputs import OutputDelta, PromptProgress
from octavo.request import Request


class DeltaStream:
    """The deltas of one request, and its progress while the prompt is computed.

    Iterating raises what ended the request early. `is_started`: a step has worked on it.
    """

    def __init__(self, request: Request, on_close: Callable[["DeltaStream"], None]) -> None:
        self.request = request
        self.is_started = False
        self.is_over = False
        self._on_close = on_close
        self._start_calls: list[Callable[[], None]] = []
        self._items: deque[OutputDelta | PromptProgress] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> "DeltaStream":
        return self

    async def begun(self) -> None:
        """Wait until there is something to read; raises where that is an error."""
        while not self._items and not self.is_over:
            await self._wait()
        if self._error is not None and all(_is_failure(item) for item in self._items):
            raise self._error

    async def __anext__(self) -> OutputDelta | PromptProgress:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            await self._wait()
        return self._items.popleft()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def accepted(self) -> None:
        """Wait until the engine has taken the request; raises why not."""
        await self._answered

    def on_start(self, call: Callable[[], None]) -> None:
        """Call `call` once, when a step works on the request or it ends without."""
        if self.is_started or self.is_over:
            call()
        else:
            self._start_calls.append(call)

    def close(self) -> None:
        """Abort the request unless it is over; a second call does nothing."""
        if not self.is_over:
            self.is_over = True
            self._on_close(self)
        self._items.clear()
        self._leave_queue()
        self._wake()

    def end_early(self, error: Exception) -> None:
        """Abort the request, and let its reader get `error`."""
        if not self.is_over:
            self.fail(error)
            self._on_close(self)

    def push(self, item: OutputDelta | PromptProgress) -> None:
        """Add one item; the last delta ends the stream."""
        self.is_started = True
        self._leave_queue()
        self._items.append(item)
        if isinstance(item, OutputDelta):
            self._error = self._error or item.error
            self.is_over = item.is_last
        self._wake()

    def answer(self, error: Exception | None = None) -> None:
        """Say that the engine has taken the request, or refused it with `error`."""
        if error is not None:
            self.is_over = True
        if self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, unless it is over."""
        if self.is_over:
            return
        self.is_over, self._error = True, error
        self._items.clear()
        self.answer(error)
        self._leave_queue()
        self._wake()

    def _leave_queue(self) -> None:
        calls, self._start_calls = self._start_calls, []
        for call in calls:
            call()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _is_failure(item: OutputDelta | PromptProgress) -> bool:
    return isinstance(item, OutputDelta) and item.error is not None


class OpenRequests:
    """The streams of one engine's requests, by id; takes its events."""

    def __init__(self) -> None:
        self._streams: dict[str, DeltaStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def add(self, stream: DeltaStream) -> None:
        """Begin to route deltas to a stream."""
        self._streams[stream.request.request_id] = stream

    def remove(self, request_id: str) -> DeltaStream | None:
        """Stop routing; what still comes for the request is dropped."""
        return self._streams.pop(request_id, None)

    def take_answers(self, answered: Answered) -> None:
        """Tell streams whether they were accepted."""
        for request_id in answered.accepted:
            if (stream := self._streams.get(request_id)) is not None:
                stream.answer()
        for request_id, error in answered.refused:
            if (stream := self._streams.pop(request_id, None)) is not None:
                stream.answer(error)

    def take_step(self, stepped: Stepped) -> None:
        """Hand each stream what a step brought it."""
        for progress in stepped.progress:
            if (stream := self._streams.get(progress.request_id)) is not None:
                stream.push(progress)
        for delta in stepped.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.push(delta)
                if delta.is_last:
                    del self._streams[delta.request_id]

    def fail_all(self, error: Exception) -> None:
        """End every stream with an error."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
