"""Generating with the KV cache and without it: flops from the program, seconds from a clock.

Without a cache every token recomputes all tokens before it, so the projections (every product with
a weight) grow with the square of the answer's length; with it they grow linearly. Attention is its
own term: quadratic with a cache, cubic without.

Invariant: flops are those that the program counts, and the two ways must generate the same tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.engine.engine import Engine
from octavo.planning.study.experiment import (
    Axis,
    Experiment,
    Figure,
    Series,
    Table,
    Tick,
    counted,
    number,
    tabulate,
    ticking,
    times,
)
from octavo.planning.study.workbench import Clock, Job, Workbench, prompts, serve
from octavo.program.ops import Attention, Linear, Operation
from octavo.program.program import Chunk, Program


@dataclass(frozen=True, slots=True)
class Size:
    """num_prompt: tokens of the prompt. lengths: of the answers."""

    num_prompt: int
    lengths: tuple[int, ...]


FULL = Size(48, (4, 8, 16, 32))
QUICK = Size(32, (2, 4, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of generating. flops: 10^9, of projections, attention and the rest."""

    flops: dict[str, float]
    seconds: float

    @property
    def total(self) -> float:
        """All 10^9 flops."""
        return sum(self.flops.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One answer length, both ways. is_same: whether they generated the same tokens."""

    num_new: int
    cached: Way
    uncached: Way
    is_same: bool


def gigaflops(program: Program, steps: Iterable[Chunk]) -> dict[str, float]:
    """Return 10^9 flops of projections, attention and the rest; each step draws one token."""
    sums = {"projections": 0, "attention": 0, "rest": 0}
    for step in steps:
        for op in program.body:
            sums[_kind(op)] += op.flops(*step)
        for op in program.head:
            sums[_kind(op)] += op.flops(1)
    return {kind: count / 1e9 for kind, count in sums.items()}


def _kind(op: Operation) -> str:
    if isinstance(op, Linear):
        return "projections"
    return "attention" if isinstance(op, Attention) else "rest"


def cached_steps(num_prompt: int, num_new: int) -> list[Chunk]:
    """Return the chunks computed with a cache: the prompt, then one token at a time."""
    return [Chunk(num_prompt, num_prompt)] + [Chunk(1, num_prompt + i) for i in range(1, num_new)]


def uncached_steps(num_prompt: int, num_new: int) -> list[Chunk]:
    """Return the chunks computed without one: everything so far, for each token."""
    return [Chunk(num_prompt + i, num_prompt + i) for i in range(num_new)]


def run_cached(
    engine: Engine, ids: list[int], num_new: int, clock: Clock
) -> tuple[list[int], float]:
    """Generate through the cache; return the tokens and the seconds."""
    started = clock()
    served = serve(engine, [Job(ids, num_new)], clock)
    return [token.token_id for token in served.tokens], clock() - started


def run_uncached(
    engine: Engine, ids: list[int], num_new: int, clock: Clock
) -> tuple[list[int], float]:
    """Generate each token by a request of its own, which shares nothing with the ones before.

    That needs an engine without prefix caching.
    """
    started = clock()
    tokens: list[int] = []
    for _ in range(num_new):
        served = serve(engine, [Job(ids + tokens, 1)], clock)
        tokens += [token.token_id for token in served.tokens]
    return tokens, clock() - started


def compare(engine: Engine, program: Program, ids: list[int], num_new: int, clock: Clock) -> Row:
    """Generate both ways and return their flops and seconds."""
    with_cache, cached_seconds = run_cached(engine, ids, num_new, clock)
    without, uncached_seconds = run_uncached(engine, ids, num_new, clock)
    return Row(
        num_new=num_new,
        cached=Way(
            flops=gigaflops(program, cached_steps(len(ids), num_new)), seconds=cached_seconds
        ),
        uncached=Way(
            flops=gigaflops(program, uncached_steps(len(ids), num_new)), seconds=uncached_seconds
        ),
        is_same=with_cache == without,
    )


def experiment(bench: Workbench, program: Program, size: Size, tick: Tick) -> Experiment:
    """Generate answers of several lengths both ways."""
    engine = bench.engine()
    (ids,) = prompts(engine, 1, size.num_prompt, "cache")

    def work(num_new: int) -> int:
        """Without a cache it grows with the square of what has been generated."""
        return sum(range(size.num_prompt, size.num_prompt + num_new))

    rows = [
        compare(engine, program, ids, num_new, bench.clock)
        for num_new in ticking(size.lengths, tick, work)
    ]
    return Experiment(
        title="With and without the KV cache",
        method=f"An answer to a prompt of {size.num_prompt:,} tokens is generated token by token: "
        "with the cache, which computes each token once, and without it, which computes "
        "everything so far for each token. Flops are counted by the program.",
        finding=_finding(size.num_prompt, rows[-1], all(row.is_same for row in rows)),
        figures=_figures(rows),
        table=_table(rows),
    )


def _finding(num_prompt: int, row: Row, is_same: bool) -> str:
    cached, uncached = row.cached, row.uncached
    same = "The tokens are the same." if is_same else "The tokens differ, which is a fault."
    return (
        f"{counted(row.num_new, 'token')} after {num_prompt:,} take {number(cached.total)} GFLOP "
        f"and {number(cached.seconds)} s with the cache, {number(uncached.total)} GFLOP and "
        f"{number(uncached.seconds)} s without it: {times(uncached.total, cached.total)} the work "
        f"and {times(uncached.seconds, cached.seconds)} the time. {same}"
    )


def _figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    lengths = tuple(row.num_new for row in rows)
    tokens = Axis(title="length of the answer", unit="tokens", is_log=True, ticks=lengths)
    ways = (("with the cache", "cached"), ("without", "uncached"))
    flops = tuple(
        Series(
            name=f"{kind}, {name}",
            x=lengths,
            y=tuple(getattr(row, way).flops[kind] for row in rows),
        )
        for kind in ("projections", "attention")
        for name, way in ways
    )
    seconds = tuple(
        Series(name=name, x=lengths, y=tuple(getattr(row, way).seconds for row in rows))
        for name, way in ways
    )
    return (
        Figure(
            title="Work",
            x=tokens,
            y=Axis(title="floating-point operations", unit="GFLOP", is_log=True),
            series=flops,
        ),
        Figure(
            title="Time",
            x=tokens,
            y=Axis(title="time of the answer", unit="s", is_log=True),
            series=seconds,
        ),
    )


def _table(rows: Sequence[Row]) -> Table:
    return tabulate(
        rows,
        {
            "tokens": lambda row: row.num_new,
            "projections, cache (GFLOP)": lambda row: row.cached.flops["projections"],
            "projections, none (GFLOP)": lambda row: row.uncached.flops["projections"],
            "attention, cache (GFLOP)": lambda row: row.cached.flops["attention"],
            "attention, none (GFLOP)": lambda row: row.uncached.flops["attention"],
            "time, cache (s)": lambda row: row.cached.seconds,
            "time, none (s)": lambda row: row.uncached.seconds,
            "ratio of times": lambda row: row.uncached.seconds / row.cached.seconds,
        },
    )
