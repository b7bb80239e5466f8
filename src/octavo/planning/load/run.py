"""Sends work to a server: in a closed loop, or when it is due.

Decides when each turn is sent: a session's turns one after another, sessions side by side. Time is
the event loop's, so a loop with virtual time makes a run exact. Knows nothing of figures.

Invariant: every turn of the work has one outcome; the turns after a failed one were not sent, and
their outcomes say so.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Ordered
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from octavo.engine.clock import cpu_time
from octavo.errors import InvalidParameterError, OctavoError
from octavo.planning.load.client import Outcome, Target, complete
from octavo.planning.load.work import Session, Tokens

# One event may carry many tokens and their log-probabilities.
_READ_BUFFER = 1 << 20
_WARM_TOKENS = 8
NOT_SENT = "not sent, since the turn before it failed"


@dataclass(slots=True)
class Run:
    """Outcomes in the order in which requests ended, and what the run took.

    seconds: from the start to the last end. cpu_seconds: of this process, the load generator.
    most_in_flight: requests that were sent and not answered, at most at once.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    most_in_flight: int = 0
    num_in_flight: int = 0


OnChange = Callable[[Run], None]


@asynccontextmanager
async def connect(
    *,
    timeout: float = 600.0,
    headers: dict[str, str] | None = None,
    connector: aiohttp.BaseConnector | None = None,
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client. timeout: seconds that one request may take.

    Every request has a connection of its own, so that none fails because the server closes one that
    was kept.
    """
    made = connector or aiohttp.TCPConnector(limit=0, force_close=True)
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(
        connector=made, timeout=limit, headers=headers, read_bufsize=_READ_BUFFER
    ) as client:
        yield client


async def first_model(client: aiohttp.ClientSession, base_url: str) -> str:
    """Return the first model that a server lists; an `OctavoError` says why there is none."""
    url = f"{base_url}/v1/models"
    try:
        async with client.get(url) as response:
            if response.status != 200:
                raise OctavoError(
                    f"{url} answers with HTTP {response.status}. Name the model with --model."
                )
            listed = await response.json(content_type=None)
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise OctavoError(
            f"No server answers at {base_url}: {error or type(error).__name__}. Start one, or give "
            "its address with --base-url."
        ) from None
    except (ValueError, LookupError, TypeError):
        raise OctavoError(f"{url} lists no model. Name one with --model.") from None


class LoadGenerator:
    """Runs sessions against one target, and remembers what came of them.

    A later turn's prompt has the server's own answers where it tells their token ids, else other
    ids in the same number. on_change: told whenever a request begins or ends.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        target: Target,
        on_change: OnChange = lambda run: None,
    ) -> None:
        self.client, self.target, self.on_change = client, target, on_change
        self._run = Run()
        self._start = 0.0

    async def warm_up(self, sessions: Iterable[Session], prefix: Tokens) -> None:
        """Send the first turns, all at once and for few tokens, then the shared prefix alone.

        Raises an `OctavoError` with the server's own words if that fails.
        """
        first = [session.turns[0] for session in sessions]
        short = [(turn.tokens, min(_WARM_TOKENS, turn.num_output_tokens)) for turn in first]
        await asyncio.gather(*(self._try(tokens, count) for tokens, count in short))
        if len(prefix):
            await self._try(prefix, 1)

    async def _try(self, tokens: Tokens, num_output_tokens: int) -> None:
        outcome = Outcome(sent=0.0, num_prompt_tokens=len(tokens), num_wanted=num_output_tokens)
        body = self.target.body(tokens.tolist(), num_output_tokens)
        await complete(self.client, self.target, body, outcome)
        if outcome.error:
            raise OctavoError(f"{self.target.url} fails in the warm-up: {outcome.error}")

    async def run(self, sessions: Ordered[Session], concurrency: int | None = None) -> Run:
        """Send all sessions and return what came of them.

        Sessions without arrivals go in a closed loop of `concurrency` streams (1 by default), each
        of which takes the next when one ends. Those with arrivals go when they are due, but no more
        than `concurrency` at once, if given.
        """
        if concurrency is not None and concurrency < 1:
            raise InvalidParameterError("concurrency", concurrency, "at least 1")
        loop = asyncio.get_running_loop()
        self._run, self._start = Run(), loop.time()
        cpu = cpu_time()
        if any(session.arrival is not None for session in sessions):
            await self._open(sessions, concurrency)
        else:
            await self._closed(sessions, concurrency or 1)
        self._run.seconds = loop.time() - self._start
        self._run.cpu_seconds = cpu_time() - cpu
        return self._run

    async def _closed(self, sessions: Ordered[Session], concurrency: int) -> None:
        waiting = iter(sessions)

        async def stream() -> None:
            for session in waiting:
                await self._converse(session, self._elapsed())

        await asyncio.gather(*(stream() for _ in range(concurrency)))

    async def _open(self, sessions: Ordered[Session], concurrency: int | None) -> None:
        gate = asyncio.Semaphore(concurrency) if concurrency else nullcontext()

        async def start(session: Session, due: float) -> None:
            async with gate:
                await self._converse(session, due)

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                due = session.arrival or 0.0
                await asyncio.sleep(due - self._elapsed())
                group.create_task(start(session, due))

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def _converse(self, session: Session, due: float) -> None:
        """Send the turns of a session one after another."""
        prompt: list[int] = []
        has_turns = len(session.turns) > 1
        fields: dict[str, Any] = {"return_token_ids": True} if has_turns else {}
        failed = False
        for number, turn in enumerate(session.turns):
            prompt += turn.tokens.tolist()
            sent = self._elapsed()
            outcome = Outcome(
                sent=sent,
                num_prompt_tokens=len(prompt),
                num_wanted=turn.num_output_tokens,
                late=0.0 if number else sent - due,
            )
            if failed:
                outcome.error = NOT_SENT
                self._end(outcome)
                continue
            body = self.target.body(prompt, turn.num_output_tokens, **fields)
            self._begin()
            await complete(self.client, self.target, body, outcome)
            self._run.num_in_flight -= 1
            self._end(outcome)
            failed = not outcome.is_good
            prompt += self._answer(outcome, turn.tokens.tolist())

    @staticmethod
    def _answer(outcome: Outcome, instead: list[int]) -> list[int]:
        """Return the answer's ids for the next prompt; other ones if the server told none."""
        if outcome.token_ids:
            return outcome.token_ids
        repeated = -(-outcome.num_output_tokens // len(instead))
        return (instead * repeated)[: outcome.num_output_tokens]

    def _begin(self) -> None:
        run = self._run
        run.num_in_flight += 1
        run.most_in_flight = max(run.most_in_flight, run.num_in_flight)
        self.on_change(run)

    def _end(self, outcome: Outcome) -> None:
        self._run.outcomes.append(outcome)
        self.on_change(self._run)
