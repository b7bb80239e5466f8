"""From settings to work: what `octavo bench serve` is asked for becomes sessions with arrivals.

Decides how many sessions there are, and how work and pace are told in words. Knows no server.

Invariant: what is sent before the measured work shares nothing with it but the shared prefix.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from octavo.errors import InvalidParameterError
from octavo.planning.load.config import LoadConfig
from octavo.planning.load.traces import read_trace
from octavo.planning.load.work import (
    IdRange,
    Replay,
    Session,
    Shape,
    Tokens,
    at_times,
    gamma_arrivals,
)

_MIN_REQUESTS = 8
_REQUESTS_PER_STREAM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Work that is ready to be sent.

    warm: sessions whose first turns are sent before, and the prefix that is sent then. pace,
    lengths: in words. num_left_out: lines of the trace that were too long.
    """

    sessions: list[Session]
    warm: list[Session]
    prefix: Tokens
    pace: str
    lengths: str
    num_left_out: int = 0

    @property
    def num_requests(self) -> int:
        """Requests of all sessions."""
        return sum(len(session.turns) for session in self.sessions)


def make_plan(config: LoadConfig) -> Plan:
    """Return the work that the settings ask for; reads the trace, if there is one."""
    plan = _shaped(config) if config.trace is None else _traced(config, Path(config.trace))
    if config.request_rate is None:
        return plan
    arrivals = gamma_arrivals(
        len(plan.sessions), config.request_rate, config.burstiness, config.seed
    )
    limit = f", at most {config.concurrency:,} at once" if config.concurrency else ""
    return replace(
        plan,
        sessions=at_times(plan.sessions, arrivals),
        pace=f"{config.request_rate:g} per second, burstiness {config.burstiness:g}{limit}",
    )


def _streams(config: LoadConfig) -> str:
    number = config.concurrency or 1
    return f"{number:,} stream" + ("" if number == 1 else "s")


def _shaped(config: LoadConfig) -> Plan:
    ids, seed = _ids(config), config.seed
    shape = Shape(
        prompt_tokens=config.prompt_tokens,
        output_tokens=config.output_tokens,
        shared_prefix=config.shared_prefix,
        turns=config.turns,
    )
    default = max(_MIN_REQUESTS, _REQUESTS_PER_STREAM * (config.concurrency or 1))
    prefix = f"{shape.shared_prefix:,} shared + " if shape.shared_prefix else ""
    turns = f", {shape.turns:,} turns" if shape.turns > 1 else ""
    return Plan(
        sessions=shape.sessions(config.requests or default, ids, seed),
        warm=shape.sessions(config.num_warmups, ids, seed, kind=5),
        prefix=shape.prefix(ids, seed),
        pace=_streams(config),
        lengths=f"{prefix}{shape.prompt_tokens:,} / {shape.output_tokens:,} tokens{turns}",
    )


def _ids(config: LoadConfig) -> IdRange:
    try:
        low, high = (int(part) for part in config.token_ids.split("-"))
    except ValueError:
        allowed = "two numbers, as in 1000-40000"
        raise InvalidParameterError("token_ids", config.token_ids, allowed) from None
    return IdRange(low, high)


def _replay(config: LoadConfig) -> Replay:
    return Replay(
        speed=config.trace_speed,
        length_scale=config.trace_length_scale,
        max_tokens=config.trace_max_tokens,
        limit=config.requests,
    )


def _traced(config: LoadConfig, path: Path) -> Plan:
    replay, ids = _replay(config), _ids(config)
    sessions, num_left_out = replay.sessions(read_trace(path), ids, config.seed)
    pace = f"as {path.name} says"
    pace += f", {config.trace_speed:g} times as fast" if config.trace_speed != 1 else ""
    if config.closed:
        sessions, pace = [Session(s.turns) for s in sessions], _streams(config)
    scaled = f" x {config.trace_length_scale:g}" if config.trace_length_scale != 1 else ""
    return Plan(
        sessions=sessions,
        # Another kind than the trace's own prompts, so that the cache carries nothing over.
        warm=Shape(prompt_tokens=len(sessions[0].turns[0].tokens)).sessions(
            config.num_warmups, ids, config.seed, kind=5
        ),
        prefix=ids.draw(0),
        pace=pace,
        lengths=f"of {path.name}{scaled}",
        num_left_out=num_left_out,
    )
