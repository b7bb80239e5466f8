"""Predicted against measured time of whole steps.

Decides which steps: decoding, chunks of prompts, and both together, at several contexts. The
prediction is what `octavo plan` and the simulator use.

Invariant: the cost model sees the same chunks that the executor runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.cost.steps import StepTimes
from octavo.executors.executor import Executor
from octavo.planning.steps import num_blocks, step_seconds
from octavo.planning.study.experiment import (
    Axis,
    Experiment,
    Figure,
    Series,
    Tick,
    number,
    tabulate,
    ticking,
)
from octavo.planning.study.workbench import Workbench
from octavo.program.program import Chunk

DECODE, PROMPT, MIXED = "decode", "prompt", "decode and prompt"


@dataclass(frozen=True, slots=True)
class Size:
    """batches, contexts: of decoding. chunks: tokens of a prompt, that come after `before`."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    before: tuple[int, ...]
    num_runs: int


FULL = Size((1, 2, 4, 8, 16, 32, 64), (64, 256, 1024), (32, 64, 192), (0, 512), 3)
QUICK = Size((1, 8), (64, 256), (32,), (0,), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step. Times in seconds."""

    kind: str
    about: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How much more than measured was predicted, as a share."""
        return self.predicted / self.measured - 1


def steps_of(size: Size) -> Iterator[tuple[str, list[Chunk]]]:
    """Yield kinds and chunks of the steps."""
    for context in size.contexts:
        for batch in size.batches:
            yield DECODE, [Chunk(1, context)] * batch
    for before in size.before:
        for rows in size.chunks:
            yield PROMPT, [Chunk(rows, before + rows)]
            yield MIXED, [*[Chunk(1, size.contexts[0])] * 8, Chunk(rows, before + rows)]


def measure(executor: Executor, times: StepTimes, kind: str, chunks: list[Chunk], runs: int) -> Row:
    """Time one step and predict it."""
    return Row(
        kind=kind,
        about=_about(chunks),
        predicted=times.of_chunks(chunks, len(chunks)),
        measured=step_seconds(executor, chunks, runs),
    )


def _about(chunks: Sequence[Chunk]) -> str:
    decodes = [chunk for chunk in chunks if chunk.rows == 1]
    parts = [f"{len(decodes)} at {decodes[0].context:,}"] if decodes else []
    parts += [f"{c.rows:,} up to {c.context:,}" for c in chunks if c.rows > 1]
    return " + ".join(parts)


def experiment(bench: Workbench, times: StepTimes, size: Size, tick: Tick) -> Experiment:
    """Time steps and compare with their predictions."""
    executor = bench.executor
    steps = [
        (kind, chunks)
        for kind, chunks in steps_of(size)
        if max(chunk.context for chunk in chunks) < bench.max_tokens
        and num_blocks(chunks, executor.block_size) <= executor.num_blocks
    ]
    rows = [
        measure(executor, times, kind, chunks, size.num_runs)
        for kind, chunks in ticking(steps, tick)
    ]
    machine = times.machine
    return Experiment(
        title="Predicted against measured step time",
        method="Steps with one chunk per sequence are timed on the executor and priced by the "
        f"cost model with the limits of {machine.title}, {machine.source}. Measured is the median "
        f"of {size.num_runs} runs.",
        finding=_finding(rows),
        figures=_figures(rows),
        table=tabulate(
            rows,
            {
                "step": lambda row: row.kind,
                "sequences": lambda row: row.about,
                "measured (ms)": lambda row: 1e3 * row.measured,
                "predicted (ms)": lambda row: 1e3 * row.predicted,
                "error (%)": lambda row: 100 * row.error,
            },
        ),
    )


def _finding(rows: Sequence[Row]) -> str:
    errors = np.abs([row.error for row in rows])
    mean = float(np.exp(np.mean(np.log([row.predicted / row.measured for row in rows]))))
    side = "long" if mean >= 1 else "short"
    return (
        f"Of {len(rows)} steps, half are predicted within {number(100 * float(np.median(errors)))} "
        f"% and 95 % within {number(100 * float(np.percentile(errors, 95)))} %. In the mean a "
        f"prediction is {number(100 * abs(mean - 1))} % too {side}."
    )


def _figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    measured = [1e3 * row.measured for row in rows]
    ends = (min(measured) / 1.5, 1.5 * max(measured))
    kinds = tuple(dict.fromkeys(row.kind for row in rows))
    guides = (("predicted as measured", 1.0), ("25 % more", 1.25), ("25 % less", 0.75))
    return (
        Figure(
            title="Steps",
            x=Axis(title="measured", unit="ms", is_log=True),
            y=Axis(title="predicted", unit="ms", is_log=True),
            series=(
                *(
                    Series(name=name, x=ends, y=tuple(f * end for end in ends), is_guide=True)
                    for name, f in guides
                ),
                *(_series(kind, [row for row in rows if row.kind == kind]) for kind in kinds),
            ),
        ),
    )


def _series(kind: str, rows: Sequence[Row]) -> Series:
    return Series(
        name=kind,
        x=tuple(1e3 * row.measured for row in rows),
        y=tuple(1e3 * row.predicted for row in rows),
        kind="points",
        notes=tuple(row.about for row in rows),
    )
