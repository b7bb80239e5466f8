"""Steps made by hand, on the tiny model."""

import numpy as np
import pytest

from octavo.planning.steps import num_blocks, operation_seconds, step_of, step_seconds
from octavo.program.program import Chunk
from tests.executors.native import needs_library
from tests.planning.study.benches import real, tiny_subject

MIXED = [Chunk(1, 40), Chunk(1, 7), Chunk(30, 64)]


def test_a_step_has_the_chunks_it_was_asked_for() -> None:
    batch = step_of(MIXED, 32)
    assert np.diff(batch.chunk_starts).tolist() == [1, 1, 30]
    assert batch.context_lengths.tolist() == [40, 7, 64]
    assert batch.positions.tolist() == [39, 6, *range(34, 64)]
    assert batch.logit_rows.tolist() == [0, 1, 31]
    assert [row.position for row in batch.samples] == [40, 7, 64]


def test_no_two_chunks_share_a_block() -> None:
    batch = step_of(MIXED, 32)
    used = [
        block
        for table, chunk in zip(batch.block_tables.tolist(), MIXED, strict=True)
        for block in table[: -(-chunk.context // 32)]
    ]
    assert sorted(used) == list(range(num_blocks(MIXED, 32))) == list(range(5))


def test_an_executor_takes_the_step_and_draws_for_each_chunk() -> None:
    with real() as bench:
        batch = step_of(MIXED, bench.executor.block_size)
        assert len(bench.executor.submit(batch).result().token_ids) == 3
        assert step_seconds(bench.executor, MIXED, 2) > 0


def test_a_step_beyond_the_pool_is_refused_by_the_executor() -> None:
    with real() as bench:
        batch = step_of([Chunk(1, 1000)] * 5, bench.executor.block_size)
        with pytest.raises(ValueError, match="block"):
            bench.executor.submit(batch).result()


@needs_library
def test_every_operation_but_the_draw_is_timed() -> None:
    with real() as bench:
        executor = bench.executor
        seconds = operation_seconds(executor, MIXED, 1)  # type: ignore[arg-type]
    prepared = tiny_subject().prepared("group", quantization=None, kv_element=2.0)
    kinds = [type(op).__name__ for op in prepared.program.operations]
    assert len(seconds) == len(kinds) - kinds.count("Split") - 1
    assert all(each >= 0 for each in seconds)
    assert sum(seconds) > 0


@needs_library
def test_timing_operations_leaves_the_same_pages_as_the_step() -> None:
    blocks = range(num_blocks(MIXED, 32))
    with real() as bench:
        executor = bench.executor
        batch = step_of(MIXED, executor.block_size)
        executor.submit(batch).result()
        expected = executor.export_blocks(blocks)
    with real() as bench:
        assert bench.executor.export_blocks(blocks) != expected
        bench.executor.time_operations(batch)  # type: ignore[attr-defined]
        assert bench.executor.export_blocks(blocks) == expected


@needs_library
def test_timing_a_step_beyond_the_pool_is_refused() -> None:
    with real() as bench:
        batch = step_of([Chunk(1, 1000)] * 5, bench.executor.block_size)
        with pytest.raises(ValueError, match="block"):
            bench.executor.time_operations(batch)  # type: ignore[attr-defined]


@needs_library
def test_timing_a_step_of_more_logits_than_are_kept_is_refused() -> None:
    with real() as bench:
        batch = step_of([Chunk(1, 3)] * 65, bench.executor.block_size)
        with pytest.raises(ValueError, match="at most 64 rows of logits"):
            bench.executor.time_operations(batch)  # type: ignore[attr-defined]
