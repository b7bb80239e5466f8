"""What is sent to a server, and when: sessions of turns, made of random token ids.

Decides lengths, what prompts share, and arrivals. Knows no server and no clock: the same settings
and seed give the same work, so every server sees the same.

Invariant: two prompts begin alike only where the work says that they share something.
"""

import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.planning.load.traces import TRACE_BLOCK, TraceLine

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class IdRange:
    """Token ids that prompts are drawn from: low to high, without high.

    Not the first, which are rare or special in most vocabularies.
    """

    low: int = 1000
    high: int = 40_000

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high < 2**31:
            allowed = "two numbers from 0, the second greater than the first"
            raise InvalidParameterError("token_ids", f"{self.low}-{self.high}", allowed)

    def draw(self, length: int, *seed: int) -> Tokens:
        """Return `length` ids that the numbers of the seed decide."""
        drawn = np.random.default_rng(seed).integers(self.low, self.high, length, dtype=np.int32)
        return np.asarray(drawn, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What a turn adds to its session's prompt, and how many tokens the answer has."""

    tokens: Tokens
    num_output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """One conversation, mostly of a single turn; each turn's prompt has all before it.

    arrival: seconds after the start when its first turn is due; None as soon as a stream is free.
    """

    turns: tuple[Turn, ...]
    arrival: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sessions of equal lengths, in tokens.

    prompt_tokens: new in each turn. shared_prefix: what all sessions begin with. turns: per
    session. A wrong number is an `InvalidParameterError`.
    """

    prompt_tokens: int = 128
    output_tokens: int = 128
    shared_prefix: int = 0
    turns: int = 1

    def __post_init__(self) -> None:
        for name, least in (
            ("prompt_tokens", 1),
            ("output_tokens", 1),
            ("shared_prefix", 0),
            ("turns", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidParameterError(name, getattr(self, name), f"at least {least}")

    def prefix(self, ids: IdRange, seed: int) -> Tokens:
        """Return the tokens that all sessions begin with."""
        return ids.draw(self.shared_prefix, seed, 0)

    def sessions(self, count: int, ids: IdRange, seed: int, kind: int = 1) -> list[Session]:
        """Return `count` sessions. kind: another one begins its sessions otherwise."""
        prefix = self.prefix(ids, seed)

        def turn(session: int, number: int) -> Turn:
            own = ids.draw(self.prompt_tokens, seed, kind, session, number)
            return Turn(own if number else np.concatenate([prefix, own]), self.output_tokens)

        return [
            Session(tuple(turn(session, number) for number in range(self.turns)))
            for session in range(count)
        ]


def gamma_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when `count` sessions are due, in seconds; the first at 0.

    Gaps are gamma distributed with mean 1 / rate and shape `burstiness`: 1 is a Poisson process,
    less comes in bursts, more is steadier, infinity is evenly spaced.
    """
    if not 0 < rate < math.inf:
        raise InvalidParameterError("request_rate", rate, "a number above 0, per second")
    if not burstiness > 0:
        raise InvalidParameterError("burstiness", burstiness, "a number above 0")
    if burstiness == math.inf:
        gaps = np.full(count, 1 / rate)
    else:
        random = np.random.default_rng((seed, 2))
        gaps = random.gamma(burstiness, 1 / (rate * burstiness), count)
    return [0.0, *np.cumsum(gaps)[: count - 1].tolist()][:count]


def at_times(sessions: Ordered[Session], arrivals: Ordered[float]) -> list[Session]:
    """Return the sessions with their arrivals."""
    return [Session(s.turns, t) for s, t in zip(sessions, arrivals, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a trace becomes sessions.

    speed: 2 sends twice as fast. length_scale: lengths are multiplied by it, and rounded up.
    max_tokens: longest prompt and answer together after scaling; longer lines are left out. limit:
    most lines that are kept.
    """

    speed: float = 1.0
    length_scale: float = 1.0
    max_tokens: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("speed", "length_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidParameterError(f"trace_{name}", getattr(self, name), "above 0")

    def sessions(
        self, lines: Ordered[TraceLine], ids: IdRange, seed: int
    ) -> tuple[list[Session], int]:
        """Return the sessions, and how many lines were left out for their length.

        Prompts share a block where the trace's hash ids say so, else nothing.
        """
        kept: list[Session] = []
        num_left_out = 0
        for number, line in enumerate(lines):
            if self.limit is not None and len(kept) == self.limit:
                break
            num_prompt, num_output = self._scaled(line)
            if self.max_tokens is not None and num_prompt + num_output > self.max_tokens:
                num_left_out += 1
                continue
            tokens = self._prompt(line, number, num_prompt, ids, seed)
            kept.append(Session((Turn(tokens, num_output),), line.arrival / self.speed))
        if not kept:
            raise BadRequestError(
                f"All {num_left_out:,} requests of the trace are longer than {self.max_tokens:,} "
                "tokens. Raise the limit or scale the lengths down."
            )
        start = kept[0].arrival or 0.0
        return at_times(kept, [(s.arrival or 0.0) - start for s in kept]), num_left_out

    def _scaled(self, line: TraceLine) -> tuple[int, int]:
        scale = self.length_scale
        return (
            math.ceil(line.num_prompt_tokens * scale),
            math.ceil(line.num_output_tokens * scale),
        )

    def _prompt(
        self, line: TraceLine, number: int, num_tokens: int, ids: IdRange, seed: int
    ) -> Tokens:
        if not line.block_hashes:
            return ids.draw(num_tokens, seed, 3, number)
        size = math.ceil(TRACE_BLOCK * self.length_scale)
        blocks = [ids.draw(size, seed, 4, abs(block)) for block in line.block_hashes]
        return np.concatenate(blocks)[:num_tokens]
