"""Paged against contiguous memory: how much of it holds nothing, and how many requests run at once.

Decides the traffic: lengths like those of conversations, all waiting from the start. The scheduler
and the block manager are the real ones; nothing is computed, so the model plays no part.

Invariant: every kind of memory has the same number of slots and serves the same requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.scheduler import Scheduler
from octavo.planning.load.traces import TraceLine
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
from octavo.planning.study.traffic import ContiguousMemory, PagedMemory, run

# Of the drawn lengths: median, sigma of the logarithm, most. About Azure's conversations of 2023.
_PROMPTS = (1000, 0.9, 4096)
_ANSWERS = (150, 0.8, 1024)
# Contiguous buffers. Nobody knows the final length before, so the longest is what they must have.
LONGEST = "longest length"
FINAL = "final length"


@dataclass(frozen=True, slots=True)
class Size:
    """num_slots: of the pool, in tokens."""

    num_requests: int
    num_slots: int
    block_sizes: tuple[int, ...]


FULL = Size(600, 131_072, (16, 32, 64, 128))
QUICK = Size(150, 65_536, (32, 128))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of memory. waste: share of the slots in use that hold nothing, over time.

    running: mean of the requests that run at once while others wait.
    """

    memory: str
    waste: float
    running: float
    num_steps: int
    num_preemptions: int


def drawn_lines(count: int, seed: int) -> list[TraceLine]:
    """Return requests with log-normal lengths."""
    generator = np.random.default_rng(seed)

    def lengths(median: float, sigma: float, most: int) -> list[int]:
        drawn = median * np.exp(sigma * generator.standard_normal(count))
        return [int(length) for length in np.clip(drawn, 1, most)]

    pairs = zip(lengths(*_PROMPTS), lengths(*_ANSWERS), strict=True)
    return [TraceLine(0.0, prompt, answer) for prompt, answer in pairs]


def build_memory(kind: str, num_slots: int, longest: int) -> PagedMemory | ContiguousMemory:
    """Build what `kind` names: "blocks of 32" or a contiguous one, of `longest` slots each."""
    if kind.startswith("blocks of "):
        size = int(kind.removeprefix("blocks of "))
        # Lengths alone are known, so nothing could be shared.
        return PagedMemory(num_slots // size, size, enable_prefix_caching=False)
    return ContiguousMemory(num_slots, None if kind == FINAL else longest)


def measure(kind: str, num_slots: int, lines: Sequence[TraceLine]) -> Row:
    """Serve all lines in one kind of memory."""
    longest = max(line.num_prompt_tokens + line.num_output_tokens for line in lines)
    memory = build_memory(kind, num_slots, longest)
    scheduler = Scheduler(
        memory,  # type: ignore[arg-type]
        max_num_batched_tokens=65_536,
        max_num_seqs=8192,
    )
    usage = run(scheduler, lines, as_backlog=True)
    return Row(
        memory=kind,
        waste=usage.mean_share,
        running=usage.mean_running,
        num_steps=usage.num_steps,
        num_preemptions=scheduler.counters.num_preemptions,
    )


def experiment(size: Size, tick: Tick) -> Experiment:
    """Serve the same requests in every kind of memory."""
    lines = drawn_lines(size.num_requests, seed=1)
    kinds = [*(f"blocks of {each}" for each in size.block_sizes), FINAL, LONGEST]
    rows = [measure(kind, size.num_slots, lines) for kind in ticking(kinds, tick)]
    return Experiment(
        title="Paged against contiguous memory",
        method=f"{size.num_requests:,} requests with lengths like those of conversations wait for "
        f"a pool of {size.num_slots:,} tokens. The real scheduler and block manager serve them; "
        "nothing is computed. A contiguous buffer has the longest length that a request may have, "
        "or, as a bound that nobody can reach, the length that it will have.",
        finding=_finding(rows),
        figures=_figures(rows),
        table=tabulate(
            rows,
            {
                "memory": lambda row: row.memory,
                "empty slots (%)": lambda row: 100 * row.waste,
                "requests at once": lambda row: row.running,
                "steps": lambda row: row.num_steps,
                "preemptions": lambda row: row.num_preemptions,
            },
        ),
    )


def _finding(rows: Sequence[Row]) -> str:
    longest = next(row for row in rows if row.memory == LONGEST)
    paged = next((row for row in rows if row.memory == "blocks of 32"), rows[0])
    return (
        f"With {paged.memory} tokens, {number(100 * paged.waste)} % of the slots in use are empty "
        f"and {number(paged.running)} requests run at once; with contiguous buffers of the longest "
        f"length, {number(100 * longest.waste)} % and {number(longest.running)}: "
        f"{times(paged.running, longest.running)} the requests in the same memory."
    )


def _figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    kinds = tuple(row.memory for row in rows)
    memory = Axis(title="memory", unit="kind")
    waste = tuple(100 * row.waste for row in rows)
    running = tuple(row.running for row in rows)
    return (
        Figure(
            title="Waste",
            x=memory,
            y=Axis(title="slots in use that are empty", unit="%"),
            series=(Series(name="empty slots", x=kinds, y=waste, kind="bars"),),
        ),
        Figure(
            title="Requests at once",
            x=memory,
            y=Axis(title="running, mean", unit="requests"),
            series=(Series(name="requests", x=kinds, y=running, kind="bars"),),
        ),
    )
