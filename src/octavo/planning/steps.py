"""Steps made by hand: any chunks, on an idle executor, to time them as wholes or in parts.

Decides the arrays of a step whose tokens mean nothing. Every chunk has blocks of its own, so that
nothing is shared.

Invariant: a step has the chunks it was asked for, and draws one token for each that draws.
"""

import statistics
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from octavo.executors.executor import Batch, Executor, SampleRow
from octavo.program.program import Chunk
from octavo.request import Request, SamplingParams

_REQUEST = Request(
    request_id="step",
    prompt_token_ids=[0],
    params=SamplingParams(temperature=0.0),
    max_tokens=1,
    seed=0,
)


class TimesOperations(Protocol):
    """An executor that can run a step one operation at a time."""

    block_size: int

    def time_operations(self, batch: Batch) -> list[float]:
        """Return the seconds of each operation but the draw."""
        ...


def num_blocks(chunks: Sequence[Chunk], block_size: int) -> int:
    """Return how many blocks a step of these chunks needs."""
    return sum(-(-chunk.context // block_size) for chunk in chunks)


def step_of(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Return a step as arrays; every chunk draws a token greedily."""
    tokens = np.random.default_rng(0)
    sizes = [-(-chunk.context // block_size) for chunk in chunks]
    tables = np.zeros((len(chunks), max(sizes)), np.int32)
    first = 0
    for row, size in enumerate(sizes):
        tables[row, :size] = range(first, first + size)
        first += size
    starts = np.cumsum([0] + [chunk.rows for chunk in chunks]).astype(np.int32)
    positions = [np.arange(chunk.context - chunk.rows, chunk.context) for chunk in chunks]
    return Batch(
        token_ids=tokens.integers(0, 256, int(starts[-1])).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        chunk_starts=starts,
        block_tables=tables,
        context_lengths=np.array([chunk.context for chunk in chunks], np.int32),
        copies=np.zeros((0, 2), np.int32),
        logit_rows=starts[1:] - 1,
        samples=tuple(
            SampleRow(
                logit_row=row, request=_REQUEST, index=0, position=chunk.context, num_output=1
            )
            for row, chunk in enumerate(chunks)
        ),
    )


def step_seconds(executor: Executor, chunks: Sequence[Chunk], num_runs: int) -> float:
    """Return the median seconds of a step, after one that does not count."""
    batch = step_of(chunks, executor.block_size)
    runs = [executor.submit(batch).result().duration for _ in range(1 + num_runs)]
    return statistics.median(runs[1:])


def operation_seconds(
    executor: TimesOperations, chunks: Sequence[Chunk], num_runs: int
) -> list[float]:
    """Return the least seconds of each operation of a step, after a run that does not count."""
    batch = step_of(chunks, executor.block_size)
    runs = [executor.time_operations(batch) for _ in range(1 + num_runs)]
    return cast(list[float], np.min(runs[1:], axis=0).tolist())
