"""A row without logits ends with the last attention, and nobody can tell from the others."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from octavo.executors.cpu import HEAD_ROWS
from octavo.executors.executor import Batch, PromptRow, StateSpan, StepResult
from octavo.executors.reference import ReferenceExecutor
from octavo.executors.sampling import sample_tiles
from octavo.native import library
from octavo.program.program import Program
from tests.executors.checkpoints import Piece, batch
from tests.executors.native import (
    SETS,
    SMALL,
    RandomWeights,
    bits,
    native,
    network,
    tables,
    token_ids,
)

LENGTH = 200
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "float weights": ("BF16", {"bias": True, "window": 60}),
    "4-bit weights": ("Q4_1", {"width": 96, "inner": 160, "kind": "gelu_tanh"}),
    "one layer": ("Q8_0", {"layers": 1}),
}
RUNS = ["reference", *(SETS if library else [])]
ROWS = {
    "the last": [LENGTH - 1],
    "some": [3, LENGTH - 1, 77],
    "as many as a slice": range(HEAD_ROWS),
    "one more than a slice": range(HEAD_ROWS + 1),
    "all, backwards": range(LENGTH - 1, -1, -1),
}


@cache
def program_of(shape: str, *, selects_late: bool) -> Program:
    return network(vocab=208, selects_late=selects_late, **SHAPES[shape][1])


def executor(run: str, shape: str, *, selects_late: bool) -> Any:
    program = program_of(shape, selects_late=selects_late)
    weights = RandomWeights(program, SHAPES[shape][0])
    if run == "reference":
        return ReferenceExecutor(program, weights, clock=lambda: 0.0, **SMALL)
    return native(program, weights, run, num_threads=2)


def both(run: str, shape: str) -> tuple[Any, Any]:
    """Executors that select rows in the last layer, and after it."""
    return tuple(executor(run, shape, selects_late=late) for late in (False, True))


def prompt(count: int = LENGTH, **asked: Any) -> Batch:
    (table,) = tables([LENGTH], 32)
    return batch(Piece(token_ids(LENGTH), 0, count, table), **asked)


def known(count: int) -> tuple[PromptRow, ...]:
    return tuple(PromptRow(row, "known", row + 1, 7 * row % 208, 2) for row in range(count))


def with_states(step: Batch, rows: Sequence[int]) -> Batch:
    spans = (StateSpan("pooled", 0, len(rows)),)
    return replace(step, state_rows=np.array(rows, np.int32), state_spans=spans)


everywhere = pytest.mark.parametrize("run", RUNS)
shapes = pytest.mark.parametrize("shape", SHAPES)
rows_wanted = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)


@rows_wanted
@shapes
@everywhere
def test_logits_have_the_bits_of_rows_that_go_all_the_way(
    run: str, shape: str, rows: Sequence[int]
) -> None:
    early, late = both(run, shape)
    assert bits(early.logits(prompt(rows=rows))) == bits(late.logits(prompt())[list(rows)])


@rows_wanted
@shapes
@everywhere
def test_log_probabilities_and_states_are_those_of_rows_that_go_all_the_way(
    run: str, shape: str, rows: Sequence[int]
) -> None:
    """The states of some rows are wanted of the same step."""
    early, late = both(run, shape)
    pooled = [5, *range(100, 180), 199]
    step = prompt(rows=rows, prompt_rows=known(len(rows)))
    found: StepResult = early.submit(with_states(step, pooled)).result()
    expected = sample_tiles(step, [(0, late.logits(prompt())[list(rows)])])
    assert None not in found.prompt_logprobs
    assert found.prompt_logprobs == expected.prompt_logprobs
    whole = late.submit(with_states(prompt(rows=()), range(LENGTH))).result()
    assert found.states is not None
    assert bits(found.states) == bits(whole.states[pooled])


@shapes
@everywhere
def test_states_need_no_logits(run: str, shape: str) -> None:
    early, late = both(run, shape)
    found = early.submit(with_states(prompt(rows=()), range(LENGTH))).result()
    beside = prompt(rows=ROWS["some"], prompt_rows=known(3))
    expected = late.submit(with_states(beside, range(LENGTH))).result()
    assert bits(found.states) == bits(expected.states)


@shapes
@everywhere
def test_a_chunk_without_logits_leaves_the_pages_of_one_with_them(run: str, shape: str) -> None:
    """Alone, and beside a chunk that wants some."""
    early, late = both(run, shape)
    expected = late.logits(prompt())
    early.submit(prompt(50, rows=())).result()
    mine, other = tables([LENGTH, 40], 32)
    beside = Piece(token_ids(40, seed=3), 0, 40, other)
    step = batch(Piece(token_ids(LENGTH), 50, 130, mine), beside, rows=[130 + 39, 130 + 7])
    assert bits(early.logits(step)) == bits(late.logits(batch(beside))[[39, 7]])
    rest = batch(Piece(token_ids(LENGTH), 180, 20, mine), rows=[19, 0])
    assert bits(early.logits(rest)) == bits(expected[[199, 180]])
