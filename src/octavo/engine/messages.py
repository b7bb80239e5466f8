"""What crosses between a server and the process that computes: typed, one frame per message.

Decides the form of commands and events on the wire. Knows neither sockets nor the engine's inside.

Invariant: what was encoded decodes to an equal value; an exception keeps its type if it is one of
`octavo.errors`, and becomes an `OctavoError` if not.
"""

from typing import Any

import msgspec

from octavo import errors
from octavo.engine.frames import framed
from octavo.engine.lives import Life
from octavo.engine.outputs import OutputDelta, PromptProgress
from octavo.engine.stats import EngineStats
from octavo.request import Pooling, SamplingParams

# --- commands -----------------------------------------------------------------------------------


class Add(msgspec.Struct, tag=True, frozen=True):
    """Queue a request; `Answered` says whether it was accepted."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    pooling: Pooling | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request, before the next step is planned."""

    request_id: str


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Forget what the cache holds."""


class AskLife(msgspec.Struct, tag=True, frozen=True):
    """Tell the life so far of a request; `LifeTold` answers."""

    request_id: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the loop."""


Command = Add | Abort | ResetPrefixCache | AskLife | Stop


# --- events -------------------------------------------------------------------------------------


class Loading(msgspec.Struct, tag=True, frozen=True):
    """What the engine is busy with before it is ready."""

    stage: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine takes requests. `reasons` says how open settings were resolved."""

    reasons: list[str]
    vocab_size: int
    max_model_len: int
    max_pool_tokens: int
    stats: EngineStats


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start."""

    error: Exception


class Answered(msgspec.Struct, tag=True, frozen=True):
    """Which requests were accepted, and which refused, since the last step."""

    accepted: list[str]
    refused: list[tuple[str, Exception]]


class Expecting(msgspec.Struct, tag=True, frozen=True):
    """A long step begins, which is predicted to take `seconds`: silence until then is no hang."""

    seconds: float


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """One step: the heartbeat, and everything it brought. `seconds` is how long it took.

    stats: now and then, and whenever nothing is left to do. lives: of requests that ended.
    """

    seconds: float
    deltas: list[OutputDelta]
    progress: list[PromptProgress]
    stats: EngineStats | None = None
    lives: list[Life] = []


class LifeTold(msgspec.Struct, tag=True, frozen=True):
    """The life so far of a request; None if no such request is open."""

    request_id: str
    life: Life | None


Event = Loading | Ready | StartFailed | Answered | Expecting | Stepped | LifeTold


# --- on the wire --------------------------------------------------------------------------------


class _Failure(msgspec.Struct, frozen=True):
    """An exception: the name of its class, its message and its further attributes."""

    kind: str
    message: str
    attributes: dict[str, Any]


def _to_failure(value: Any) -> _Failure:
    if isinstance(value, Exception):
        return _Failure(type(value).__name__, str(value), dict(vars(value)))
    raise NotImplementedError(f"{type(value).__name__} does not cross processes")


def _to_exception(kind: type, value: Any) -> Exception:
    failure = msgspec.convert(value, _Failure)
    found = getattr(errors, failure.kind, None)
    if not (isinstance(found, type) and issubclass(found, errors.OctavoError)):
        return errors.OctavoError(f"{failure.kind}: {failure.message}".rstrip(": "))
    # Their constructors make the message from parts; here it is made already.
    error: Exception = found.__new__(found)
    error.args = (failure.message,)
    vars(error).update(failure.attributes)
    return error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_failure)
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event, dec_hook=_to_exception)


def encode(message: Command | Event) -> bytes:
    """Return one frame."""
    return framed(_ENCODER.encode(message))


def decode_command(content: bytes | memoryview) -> Command:
    """Return the command in a frame's content."""
    return _COMMANDS.decode(content)


def decode_event(content: bytes | memoryview) -> Event:
    """Return the event in a frame's content."""
    return _EVENTS.decode(content)
