"""How much may wait: the bounded queue before the engine's first step on a request.

Decides who is refused with 429, and when to come back. Knows neither HTTP nor how a request is
computed.

Invariant: what waits is at most the limits, beyond what the engine has free seats for.
"""

from collections.abc import Callable

from octavo.errors import QueueFullError

MIN_RETRY, MAX_RETRY = 1.0, 120.0
UNKNOWN_RATE = 100.0  # tokens per second, before the engine has worked


class Admission:
    """Counts requests from arrival to their first step, and to their end.

    num_seats: sequences that the engine runs at once. rate: its tokens per second, if known.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        num_seats: int,
        rate: Callable[[], float | None],
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._num_seats = num_seats
        self._rate = rate
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
        seconds = self.backlog_seconds()
        return QueueFullError(
            f"The server is busy: {what}, and {limit:,} may. Try again in {seconds:.0f} s.", seconds
        )

    def backlog_seconds(self) -> float:
        """Return the time that the waiting prompts alone take, within reasonable bounds."""
        seconds = self.num_waiting_tokens / (self._rate() or UNKNOWN_RATE)
        return min(MAX_RETRY, max(MIN_RETRY, seconds))


class Ticket:
    """One request's place: it waits, then runs, then leaves; each once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_tokens = 0
        self._stage = "waiting"
        admission.num_waiting += 1

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
