"""The loop around an engine: commands in, steps, events out.

Decides when the engine steps and when it waits: it never spins. Knows neither HTTP nor how
messages travel; a port carries them.

Invariant: every command that came before a step has taken effect when that step is planned, and
every step sends one `Stepped`, which is the heartbeat.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.engine.engine import Engine
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
from octavo.engine.start import StartedEngine
from octavo.errors import OctavoError

STATS_SECONDS = 0.2  # between two snapshots while the engine works
LONG_STEP_SECONDS = 0.1  # a step that is predicted to take longer is announced


class Port(Protocol):
    """How a loop talks to whoever uses its engine."""

    def receive(self, *, wait: bool) -> list[Command]:
        """Return the commands that came, at least one if `wait`; raises EOFError if none can."""
        ...

    def send(self, event: Event, /) -> None:
        """Send one event."""
        ...


class EngineLoop:
    """Runs one engine until its port says `Stop` or ends."""

    def __init__(self, engine: Engine, port: Port, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._port = port
        self._clock = clock
        self._is_stopped = False
        self._stats_due = 0.0

    def run(self) -> None:
        """Serve; returns after `Stop` or the end of the port, with the engine still open."""
        try:
            while True:
                self._take(self._port.receive(wait=not self._engine.has_unfinished))
                if self._is_stopped:
                    return
                if self._engine.has_unfinished:
                    self._step()
        except EOFError:
            return

    def _take(self, commands: Sequence[Command]) -> None:
        accepted: list[str] = []
        refused: list[tuple[str, Exception]] = []
        for command in commands:
            match command:
                case Add():
                    error = self._add(command)
                    if error is None:
                        accepted.append(command.request_id)
                    else:
                        refused.append((command.request_id, error))
                case Abort(request_id):
                    self._engine.abort(request_id)
                case ResetPrefixCache():
                    self._engine.reset_prefix_cache()
                case AskLife(request_id):
                    life = self._engine.life_of(request_id)
                    self._port.send(LifeTold(request_id, life))
                case Stop():
                    self._is_stopped = True
        if accepted or refused:
            self._port.send(Answered(accepted, refused))

    def _add(self, command: Add) -> Exception | None:
        prompt = {"prompt_token_ids": command.prompt_token_ids, "cache_salt": command.cache_salt}
        try:
            self._engine.add(
                prompt,  # type: ignore[arg-type]
                command.params,
                request_id=command.request_id,
                priority=command.priority,
                pooling=command.pooling,
            )
        except OctavoError as error:
            return error
        return None

    def _step(self) -> None:
        engine, start = self._engine, self._clock()
        deltas = engine.step(self._announce)
        end = self._clock()
        stats = None
        if end >= self._stats_due or not engine.has_unfinished:
            stats, self._stats_due = engine.stats(), end + STATS_SECONDS
        lives = engine.lives.take_ended()
        self._port.send(Stepped(end - start, deltas, engine.prompt_progress(), stats, lives))

    def _announce(self, seconds: float) -> None:
        if seconds > LONG_STEP_SECONDS:
            self._port.send(Expecting(seconds))


def describe_ready(started: StartedEngine) -> Ready:
    """Return what a client needs to know of an engine that takes requests."""
    intake = started.engine.intake
    return Ready(
        reasons=list(started.reasons),
        vocab_size=intake.vocab_size,
        max_model_len=intake.max_model_len,
        max_pool_tokens=intake.max_pool_tokens,
        stats=started.engine.stats(),
    )
