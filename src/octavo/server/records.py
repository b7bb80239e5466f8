"""What is kept of requests, so that somebody can ask later what happened to one.

Decides for how long and how many, and who may ask: the key that sent the request, or an admin.
Owns every record; lives come from the engine. Knows neither bodies nor texts.

Invariant: at most `max_kept` records of ended requests are kept, as many of refused ones, and none
for longer than `seconds` after its end.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.engine.lives import Life
from octavo.errors import RequestNotFoundError
from octavo.server.keys import Caller

# Prompts of one request that are told apart; of further ones only their number is kept.
MAX_PROMPTS = 16
PREFIXES = ("", "cmpl-", "chatcmpl-", "embd-")


@dataclass(slots=True, eq=False)
class PromptRecord:
    """One prompt in the engine. Times are in seconds on the server's clock.

    closed_at: when its reply was done. life: once it has ended. why: what the server ended it for.
    is_lost: its engine died before it ended.
    """

    engine_id: str
    closed_at: float | None = None
    life: Life | None = None
    why: str = ""
    is_lost: bool = False


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request. began_at: as its route began; ended_at: when all its prompts were closed.

    refused: why it was not taken. num_more: prompts beyond those that are told apart.
    """

    id: str
    caller: Caller
    began_at: float
    prompts: list[PromptRecord] = field(default_factory=list)
    num_more: int = 0
    num_open: int = 0
    ended_at: float | None = None
    refused: str = ""


class Records:
    """The records of one server. clock: seconds, comparable with those of the engine's lives."""

    def __init__(self, max_kept: int, seconds: float, clock: Callable[[], float]) -> None:
        self._max_kept = max_kept
        self._seconds = seconds
        self._clock = clock
        self._by_id: dict[str, list[RequestRecord]] = {}
        self._ended: deque[RequestRecord] = deque()
        self._refused: deque[RequestRecord] = deque()
        # Prompts whose lives have not come yet.
        self._living: dict[str, PromptRecord] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_id.values()))

    # --- what happens to requests ---------------------------------------------------------------

    def begin(self, reply_id: str, caller: Caller) -> RequestRecord:
        """Return a record, which is kept once a prompt is opened or refused."""
        return RequestRecord(reply_id, caller, self._clock())

    def open(self, record: RequestRecord, engine_id: str) -> PromptRecord:
        """A prompt is being handed to the engine."""
        prompt = PromptRecord(engine_id)
        record.num_open += 1
        self._keep(record)
        if len(record.prompts) < MAX_PROMPTS:
            record.prompts.append(prompt)
            self._living[engine_id] = prompt
        else:
            record.num_more += 1
        return prompt

    def refuse(self, record: RequestRecord, why: str) -> None:
        """The server does not take a prompt of the request. why: it holds none of its text."""
        record.refused = why
        if not record.num_open and record.ended_at is None:
            self._keep(record)
            self._end(record, self._refused)

    def close(
        self, record: RequestRecord, prompt: PromptRecord, why: str, *, was_taken: bool = True
    ) -> None:
        """A prompt's reply is done. why: the server ended it early, or "".

        was_taken: whether the engine has accepted it, so that a life will come.
        """
        prompt.closed_at, prompt.why = self._clock(), why
        if not was_taken:
            self._living.pop(prompt.engine_id, None)
        record.num_open -= 1
        if not record.num_open:
            self._end(record, self._ended)

    def take(self, lives: Iterable[Life]) -> None:
        """Lives have ended in the engine."""
        for life in lives:
            prompt = self._living.pop(life.request_id, None)
            if prompt is not None:
                prompt.life = life

    def lose_engine(self) -> None:
        """The engine is gone, and what it knew with it."""
        for prompt in self._living.values():
            prompt.is_lost = True
        self._living.clear()

    # --- who asks -------------------------------------------------------------------------------

    def find(self, request_id: str, caller: Caller) -> RequestRecord:
        """Return the latest record of a request's or reply's id that `caller` may see.

        Raises RequestNotFoundError, the same whether there is none or it is somebody else's.
        """
        self._prune()
        if not self._max_kept:
            raise RequestNotFoundError(self._why_gone(request_id))
        found = [
            record
            for prefix in PREFIXES
            for record in self._by_id.get(prefix + request_id, ())
            if caller.may_see(record.caller)
        ]
        if not found:
            raise RequestNotFoundError(self._why_gone(request_id))
        return max(found, key=lambda record: record.began_at)

    def _why_gone(self, request_id: str) -> str:
        shown = request_id[:130].encode("ascii", "backslashreplace").decode()
        if not self._max_kept:
            return (
                f"Nothing is known of the request {shown!r}: octavo was started with "
                "--explain-max-requests 0, which records nothing."
            )
        return (
            f"Nothing is known of a request {shown!r} of yours. The server keeps the last "
            f"{self._max_kept:,} that ended, for {self._seconds:,.0f} s "
            "(--explain-max-requests, --explain-seconds)."
        )

    # --- bounds ---------------------------------------------------------------------------------

    def _keep(self, record: RequestRecord) -> None:
        same = self._by_id.setdefault(record.id, [])
        if record not in same:
            same.append(record)
        record.ended_at = None
        for ended in (self._ended, self._refused):
            if record in ended:  # another of its prompts comes after the others ended
                ended.remove(record)

    def _end(self, record: RequestRecord, ended: deque[RequestRecord]) -> None:
        record.ended_at = self._clock()
        ended.append(record)
        self._prune()

    def _prune(self) -> None:
        oldest = self._clock() - self._seconds
        for ended in (self._ended, self._refused):
            while ended and (len(ended) > self._max_kept or _ended_at(ended[0]) < oldest):
                self._forget(ended.popleft())

    def _forget(self, record: RequestRecord) -> None:
        same = self._by_id[record.id]
        same.remove(record)
        if not same:
            del self._by_id[record.id]
        for prompt in record.prompts:
            self._living.pop(prompt.engine_id, None)


def _ended_at(record: RequestRecord) -> float:
    assert record.ended_at is not None
    return record.ended_at
