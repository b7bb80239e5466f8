"""Continuous against static batching: throughput and latency of the same requests.

Decides the requests: short prompts and answers of very different lengths, all there at once. A
static batch starts when the one before it has ended; otherwise the engine is the same.

Invariant: both ways generate the same tokens in the same number of seats.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from octavo.engine.engine import Engine
from octavo.planning.study.experiment import (
    Axis,
    Experiment,
    Figure,
    Series,
    Table,
    Tick,
    number,
    tabulate,
    ticking,
    times,
)
from octavo.planning.study.workbench import Clock, Job, Served, Workbench, prompts, serve

CONTINUOUS, STATIC = "continuous", "static"
WAYS = (CONTINUOUS, STATIC)


@dataclass(frozen=True, slots=True)
class Size:
    """seats: requests that run at once. rounds: requests per seat. longest: answer, in tokens."""

    seats: tuple[int, ...]
    rounds: int
    num_prompt: int
    longest: int


FULL = Size((4, 8, 16), 3, 8, 48)
QUICK = Size((4, 8), 3, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way with a number of seats. Times in seconds from the start, one per request, sorted.

    filled: share of the seats in which a request ran, over all steps. busy: seats in use by time.
    """

    way: str
    seats: int
    tokens_per_second: float
    first_tokens: tuple[float, ...]
    ends: tuple[float, ...]
    filled: float
    busy: tuple[tuple[float, int], ...]

    @property
    def mean_end(self) -> float:
        """Mean latency."""
        return sum(self.ends) / len(self.ends)


def drawn_jobs(engine: Engine, count: int, size: Size) -> list[Job]:
    """Return requests whose answers are mostly short and sometimes long."""
    generator = np.random.default_rng(count)
    lengths = np.clip(generator.exponential(size.longest / 3, count), 2, size.longest)
    texts = prompts(engine, count, size.num_prompt, f"batching/{count}")
    return [Job(text, int(length)) for text, length in zip(texts, lengths, strict=True)]


def measure(engine: Engine, jobs: Sequence[Job], seats: int, way: str, clock: Clock) -> Row:
    """Answer all jobs one way."""
    started = clock()
    served = serve(engine, jobs, clock, seats=seats, is_static=way == STATIC)
    seconds = clock() - started
    return Row(
        way=way,
        seats=seats,
        tokens_per_second=sum(job.num_output for job in jobs) / seconds,
        first_tokens=_since(started, (m.first_token_time for m in served.metrics)),
        ends=_since(started, (m.finished_time for m in served.metrics)),
        filled=sum(count for _, count in served.busy) / (seats * len(served.busy)),
        busy=_timeline(served, started, seconds),
    )


def _since(started: float, moments: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(sorted(moment - started for moment in moments if moment is not None))


def _timeline(served: Served, started: float, seconds: float) -> tuple[tuple[float, int], ...]:
    """Return when the number of busy seats changes."""
    changes: list[tuple[float, int]] = []
    for moment, count in served.busy:
        if not changes or changes[-1][1] != count:
            changes.append((moment - started, count))
    return (*changes, (seconds, 0))


def experiment(bench: Workbench, size: Size, tick: Tick) -> Experiment:
    """Answer the same requests both ways, with several numbers of seats."""
    engine = bench.engine()
    jobs = {seats: drawn_jobs(engine, size.rounds * seats, size) for seats in size.seats}
    rows = [
        measure(engine, jobs[seats], seats, way, bench.clock)
        for seats, way in ticking([*product(size.seats, WAYS)], tick, lambda run: run[0])
    ]
    return Experiment(
        title="Continuous against static batching",
        method=f"Requests with prompts of {size.num_prompt:,} tokens and answers of 2 to "
        f"{size.longest:,} are all there at once, {size.rounds} for each seat. In a static batch "
        "a seat stays empty until the longest answer beside it has ended.",
        finding=_finding(*_pair(rows, size.seats[-1])),
        figures=_figures(rows),
        table=_table(rows),
    )


def _pair(rows: Sequence[Row], seats: int) -> tuple[Row, Row]:
    continuous, static = (
        next(row for row in rows if row.seats == seats and row.way == way) for way in WAYS
    )
    return continuous, static


def _finding(continuous: Row, static: Row) -> str:
    rate, other = continuous.tokens_per_second, static.tokens_per_second
    return (
        f"With {continuous.seats} seats, continuous batching generates {number(rate)} tokens per "
        f"second and static batching {number(other)}: {times(rate, other)} as many, with "
        f"{number(100 * continuous.filled)} % of the seats filled against "
        f"{number(100 * static.filled)} %. A request takes {number(continuous.mean_end)} s in the "
        f"mean against {number(static.mean_end)} s."
    )


def _figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    most = max(row.seats for row in rows)
    pair = _pair(rows, most)
    seats = tuple(dict.fromkeys(row.seats for row in rows))
    throughput = tuple(
        Series(
            name=way,
            x=tuple(f"{count}" for count in seats),
            y=tuple(row.tokens_per_second for row in rows if row.way == way),
            kind="bars",
        )
        for way in WAYS
    )
    ends = tuple(
        Series(
            name=row.way,
            x=(0.0, *row.ends),
            y=tuple(100 * done / len(row.ends) for done in range(len(row.ends) + 1)),
            kind="steps",
        )
        for row in pair
    )
    busy = tuple(
        Series(
            name=row.way,
            x=tuple(moment for moment, _ in row.busy),
            y=tuple(float(count) for _, count in row.busy),
            kind="steps",
        )
        for row in pair
    )
    since = Axis(title="time since the start", unit="s")
    return (
        Figure(
            title="Throughput",
            x=Axis(title="seats", unit="requests at once"),
            y=Axis(title="generated", unit="tokens/s"),
            series=throughput,
        ),
        Figure(
            title=f"Latency with {most} seats",
            x=since,
            y=Axis(title="requests answered", unit="%"),
            series=ends,
        ),
        Figure(
            title=f"Seats in use, of {most}",
            x=since,
            y=Axis(title="seats in use", unit="requests"),
            series=busy,
        ),
    )


def _table(rows: Sequence[Row]) -> Table:
    return tabulate(
        rows,
        {
            "seats": lambda row: row.seats,
            "batching": lambda row: row.way,
            "tokens/s": lambda row: row.tokens_per_second,
            "seats filled (%)": lambda row: 100 * row.filled,
            "first token, mean (s)": lambda row: sum(row.first_tokens) / len(row.first_tokens),
            "latency, mean (s)": lambda row: row.mean_end,
            "latency, 95th percentile (s)": lambda row: float(np.percentile(row.ends, 95)),
        },
    )
