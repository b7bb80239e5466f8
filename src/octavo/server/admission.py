"""How much may wait: the bounded queue before the engine's first step on a request.

Decides who is refused with 429, and says when it would have begun: from the work that the engine
predicts for what runs, and what waits here. Knows neither HTTP nor how a request is computed.

Invariant: what waits is at most the limits, beyond what the engine has free seats for.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from octavo.engine.outlook import Outlook
from octavo.errors import QueueFullError

MIN_RETRY, MAX_RETRY = 1.0, 120.0
UNKNOWN_RATE = 100.0  # prompt tokens per second, of an engine that predicts nothing


class Admission:
    """Counts requests from arrival to their first step, and to their end.

    num_seats: sequences that the engine runs at once. outlook: what it predicts, if it does.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        num_seats: int,
        outlook: Callable[[], Outlook | None],
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._num_seats = num_seats
        self._outlook = outlook
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self.num_running = 0

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return self.num_waiting + self.num_running

    def enter(self) -> "Ticket":
        """Take a place in the queue; raises QueueFullError where there is none."""
        free_seats = max(0, self._num_seats - self.num_running)
        if self.num_waiting >= self._max_requests + free_seats:
            raise self._full(f"{self.num_waiting:,} requests wait", self._max_requests)
        return Ticket(self)

    def check_tokens(self, num_tokens: int) -> None:
        """Raise QueueFullError where so many more prompt tokens may not wait.

        A prompt longer than the limit is taken where nothing else waits.
        """
        if self.num_waiting_tokens and self.num_waiting_tokens + num_tokens > self._max_tokens:
            raise self._full(f"{self.num_waiting_tokens:,} prompt tokens wait", self._max_tokens)

    def _full(self, what: str, limit: int) -> QueueFullError:
        seconds, retry = self.seconds_to_wait(), self.retry_after()
        return QueueFullError(
            f"The server is busy: {what}, and {limit:,} may. One more would be number "
            f"{self.num_waiting + 1:,} in the queue and begin in about {_spoken(seconds)}. Try "
            f"again in {retry:.0f} s.",
            retry,
        )

    def retry_after(self) -> float:
        """Return when to try again: once the queue has begun, within reasonable bounds."""
        return min(MAX_RETRY, max(MIN_RETRY, math.ceil(self.seconds_to_wait())))

    def seconds_to_wait(self) -> float:
        """Return how long one more request would wait for its first step, as predicted."""
        outlook = self._outlook()
        if outlook is None:
            return self.num_waiting_tokens / UNKNOWN_RATE
        # The engine's snapshot may be older than what has begun since.
        free = min(outlook.num_free_seats, max(0, self._num_seats - self.num_running))
        now = replace(outlook, num_free_seats=free)
        return now.seconds_until(self.num_waiting_tokens, self.num_waiting)


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < MAX_RETRY else f"{seconds / 60:.0f} minutes"


class Ticket:
    """One request's place: it waits, then runs, then leaves; each once.

    position: in the queue when it came; the next to begin is 1.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_tokens = 0
        self._stage = "waiting"
        admission.num_waiting += 1
        self.position = admission.num_waiting

    def add_tokens(self, num_tokens: int) -> None:
        """Count the prompt's tokens too; raises QueueFullError."""
        self._admission.check_tokens(num_tokens)
        self._num_tokens = num_tokens
        self._admission.num_waiting_tokens += num_tokens

    def start(self) -> None:
        """A step works on the request now."""
        if self._stage == "waiting":
            self._stop_waiting()
            self._stage = "running"
            self._admission.num_running += 1

    def leave(self) -> None:
        """The request is over."""
        if self._stage == "waiting":
            self._stop_waiting()
        elif self._stage == "running":
            self._admission.num_running -= 1
        self._stage = "left"

    def _stop_waiting(self) -> None:
        self._admission.num_waiting -= 1
        self._admission.num_waiting_tokens -= self._num_tokens
