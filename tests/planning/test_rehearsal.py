"""A made-up program's real steps, counted on a clock that a test sets."""

from collections.abc import Callable
from itertools import accumulate, count

import numpy as np
import pytest

from octavo.cost.accounting import account
from octavo.executors.preparing import prepare
from octavo.native import library
from octavo.planning.rehearsal import (
    POINTS,
    PROGRAMS,
    Noise,
    chunks_of,
    program_of,
    rehearse,
)
from octavo.program.program import Chunk
from octavo.weights.quants import dequantize
from octavo.weights.source import TensorType
from tests.executors.native import needs_library
from tests.program.networks import network

FEW = ((2, 40, 0, 0), (0, 0, 5, 30), (1, 33, 4, 0))


def ticking(step: float = 1.0) -> Callable[[], float]:
    ticks = count()
    return lambda: next(ticks) * step


def test_a_point_is_its_streams_and_a_prompt() -> None:
    assert chunks_of((2, 40, 0, 0)) == [Chunk(1, 40), Chunk(1, 40)]
    assert chunks_of((0, 0, 5, 30)) == [Chunk(5, 35)]
    assert chunks_of((1, 33, 4, 0)) == [Chunk(1, 33), Chunk(4, 4)]


def test_every_point_fits_the_program() -> None:
    longest = max(chunk.context for point in POINTS for chunk in chunks_of(point))
    assert all(longest <= program_of(shape).max_context for _, shape in PROGRAMS)


@pytest.mark.parametrize("dtype", [dtype for dtype, _ in PROGRAMS])
def test_noise_is_finite_and_of_ordinary_size(dtype: str) -> None:
    program = network()
    noise = Noise(program, dtype)
    name = next(name for name, shape in program.parameters.items() if len(shape) == 2)
    rows = noise.stored_rows(name)
    assert len(rows) == program.parameters[name][0]
    floats = dequantize(np.ascontiguousarray(rows).reshape(-1), TensorType(dtype))
    assert np.isfinite(floats).all()
    assert 1e-4 < np.abs(floats).mean() < 1


@needs_library
def test_steps_are_priced_as_what_ran_and_the_engine_is_told_apart() -> None:
    isa = library.instruction_sets()[-1]
    found = rehearse(library, isa, 1, ticking(), FEW)
    assert len(found.steps) == len(PROGRAMS) * len(FEW)
    # Between the two moments that the executor looks at the clock, it ticks once.
    assert {step.measured for step in found.steps} == {1.0}
    halves = found.steps[:3], found.steps[3:]
    for (dtype, shape), steps in zip(PROGRAMS, halves, strict=True):
        program = program_of(shape)
        prepared = prepare(program, Noise(program, dtype).dtype, "group")
        for point, step in zip(FEW, steps, strict=True):
            chunks = chunks_of(point)
            assert step.costs == account(prepared, chunks, len(chunks))
            assert step.logit_rows == len(chunks)
    assert found.repeated == 1.0
    assert found.engine > 0  # the engine looks at the clock too
    assert found.engine_row == 0  # but not for each stream


@needs_library
def test_of_two_rounds_the_better_one_counts_and_their_ratio_is_told() -> None:
    # Two runs of each step, and two looks at the clock for each.
    first_round = 2 * 2 * len(PROGRAMS) * len(FEW)
    ticks = accumulate(3.0 if number < first_round else 1.0 for number in count())
    found = rehearse(library, library.instruction_sets()[-1], 1, lambda: next(ticks), FEW)
    assert {step.measured for step in found.steps} == {1.0}
    assert found.repeated == 3.0
