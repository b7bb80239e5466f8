"""Shared prefixes: memory and time to first token, with and without sharing blocks.

Decides the requests: one alone, then several at once that begin as it did and go on by themselves.

Invariant: both engines get the same prompts and generate as many tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from octavo.engine.engine import Engine
from octavo.planning.study.experiment import (
    Axis,
    Experiment,
    Figure,
    Series,
    Tick,
    number,
    tabulate,
    ticking,
    times,
)
from octavo.planning.study.workbench import Clock, Job, Workbench, prompts, serve


@dataclass(frozen=True, slots=True)
class Size:
    """prefixes: shared tokens. num_requests: that share them. num_own: tokens after them."""

    prefixes: tuple[int, ...]
    num_requests: int
    num_own: int
    num_output: int

    def fitting(self, max_tokens: int) -> tuple[int, ...]:
        """Return the prefixes that a model with so much context can hold."""
        return tuple(p for p in self.prefixes if p + self.num_own + self.num_output <= max_tokens)


FULL = Size((0, 64, 128, 320), 4, 16, 8)
QUICK = Size((0, 64, 128), 3, 8, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One length of the prefix. ttft: mean seconds to the first token. num_bytes: most in use."""

    num_shared: int
    is_sharing: bool
    ttft: float
    num_bytes: int
    num_reused: int


def measure(
    engine: Engine, num_shared: int, size: Size, kv_bytes_per_token: int, clock: Clock
) -> Row:
    """Answer one request alone, then the others at once."""
    texts = prompts(engine, size.num_requests + 1, size.num_own, "prefixes", num_shared)
    jobs = [Job(text, size.num_output) for text in texts]
    serve(engine, jobs[:1], clock)
    before = engine.stats().num_reused_tokens
    served = serve(engine, jobs[1:], clock)
    stats = engine.stats()
    waits = [(m.first_token_time or 0.0) - m.arrival_time for m in served.metrics]
    return Row(
        num_shared=num_shared,
        is_sharing=engine.scheduler.blocks.enable_prefix_caching,
        ttft=sum(waits) / len(waits),
        num_bytes=served.most_blocks * stats.block_size * kv_bytes_per_token,
        num_reused=stats.num_reused_tokens - before,
    )


def experiment(bench: Workbench, kv_bytes_per_token: int, size: Size, tick: Tick) -> Experiment:
    """Answer the same requests with and without sharing."""
    engines = [bench.engine(enable_prefix_caching=is_sharing) for is_sharing in (True, False)]
    runs = [*product(engines, size.fitting(bench.max_tokens))]
    rows = [
        measure(engine, num_shared, size, kv_bytes_per_token, bench.clock)
        for engine, num_shared in ticking(runs, tick, lambda run: run[1] + size.num_own)
    ]
    return Experiment(
        title="Shared prefixes",
        method=f"{size.num_requests} requests arrive at once. Their prompts begin with the same "
        f"tokens, which an earlier request had too, and end in {size.num_own} of their own.",
        finding=_finding(rows, size.num_requests),
        figures=_figures(rows),
        table=tabulate(
            rows,
            {
                "shared tokens": lambda row: row.num_shared,
                "blocks": lambda row: "shared" if row.is_sharing else "not shared",
                "first token, mean (ms)": lambda row: 1e3 * row.ttft,
                "keys and values (MB)": lambda row: row.num_bytes / 1e6,
                "prompt tokens from the cache": lambda row: row.num_reused,
            },
        ),
    )


def _finding(rows: Sequence[Row], num_requests: int) -> str:
    most = max(row.num_shared for row in rows)
    sharing, plain = (
        next(row for row in rows if row.num_shared == most and row.is_sharing is kind)
        for kind in (True, False)
    )
    return (
        f"{num_requests} requests with {most:,} tokens in common take "
        f"{number(sharing.num_bytes / 1e6)} MB and {number(1e3 * sharing.ttft)} ms to the first "
        f"token where blocks are shared, {number(plain.num_bytes / 1e6)} MB and "
        f"{number(1e3 * plain.ttft)} ms where they are not: "
        f"{times(plain.num_bytes, sharing.num_bytes)} the memory and "
        f"{times(plain.ttft, sharing.ttft)} the wait."
    )


def _figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    lengths = tuple(dict.fromkeys(row.num_shared for row in rows))
    shared = Axis(title="shared beginning", unit="tokens", ticks=lengths)
    names = {True: "blocks shared", False: "not shared"}

    def series(value: str, unit: float) -> tuple[Series, ...]:
        return tuple(
            Series(
                name=name,
                x=tuple(row.num_shared for row in rows if row.is_sharing is kind),
                y=tuple(unit * getattr(row, value) for row in rows if row.is_sharing is kind),
            )
            for kind, name in names.items()
        )

    return (
        Figure(
            title="Time to first token",
            x=shared,
            y=Axis(title="time to first token, mean", unit="ms"),
            series=series("ttft", 1e3),
        ),
        Figure(
            title="Memory",
            x=shared,
            y=Axis(title="keys and values in use", unit="MB"),
            series=series("num_bytes", 1e-6),
        ),
    )
