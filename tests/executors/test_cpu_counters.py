"""The library counts what the cost model says, for tidy and ragged batches."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from octavo.cost.accounting import account
from octavo.executors.cpu import HEAD_ROWS, CPUExecutor
from octavo.executors.executor import Batch, PromptRow
from octavo.executors.pages import KVType, element_size
from octavo.executors.preparing import prepare
from octavo.program.ops import Attention, Linear
from octavo.program.program import Chunk
from tests.executors.checkpoints import Piece, batch
from tests.executors.native import RandomWeights, native, needs_library, network, tables, token_ids

pytestmark = needs_library

# (first position, rows) of each chunk.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one token": [(0, 1)],
    "four streams": [(255, 1)] * 4,
    "ragged streams": [(0, 1), (1, 1), (255, 1), (256, 1), (600, 1)],
    "a prompt": [(0, 512)],
    "the end of a prompt": [(511, 89)],
    "prompts beside streams": [(0, 33), (300, 1), (77, 300), (512, 1), (40, 7)],
}
# A vocabulary of whole panels: of a ragged one, the padding is shared out among the rows.
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"vocab": 208},
    "ragged": {"vocab": 208, "width": 51, "inner": 77, "bias": True},
    "windows": {"vocab": 208, "window": 100, "heads": 3, "kv_heads": 1},
    "QK norm": {"vocab": 208, "qk_norm": True, "window": 256},
}


def step(chunks: list[tuple[int, int]], *, logit_rows: int) -> Batch:
    found = tables([start + count for start, count in chunks], 32)
    pieces = [
        Piece(token_ids(700), start, count, table)
        for (start, count), table in zip(chunks, found, strict=True)
    ]
    return batch(*pieces, rows=range(logit_rows))


def counted(run: CPUExecutor, work: Batch) -> np.ndarray:
    before = run.counted()
    run.logits(work)
    return np.subtract(run.counted(), before)


def priced(run: CPUExecutor, weights: RandomWeights, kv: KVType, work: Batch) -> np.ndarray:
    program = run.program
    element = element_size(kv, program.kv_groups[0].head_dim)
    prepared = prepare(program, weights.dtype, "group", kv_element=element)
    rows = np.diff(work.chunk_starts).tolist()
    chunks = [Chunk(*pair) for pair in zip(rows, work.context_lengths.tolist(), strict=True)]
    costs = account(prepared, chunks, len(work.logit_rows))
    products = (Linear, Attention)
    return np.array(
        [
            sum(cost.flops for cost in costs if isinstance(cost.operation, products)),
            sum(cost.traffic.weights for cost in costs),
            sum(cost.traffic.kv_read for cost in costs),
            sum(cost.traffic.kv_written for cost in costs),
        ]
    )


@pytest.mark.parametrize("chunks", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_library_counts_what_is_priced(
    shape: dict[str, Any], chunks: list[tuple[int, int]]
) -> None:
    program = network(**shape)
    weights = RandomWeights(program)
    run = native(program, weights, "generic", num_threads=2)
    work = step(chunks, logit_rows=min(sum(rows for _, rows in chunks), 5))
    expected = priced(run, weights, "float32", work)
    assert counted(run, work).tolist() == expected.tolist()


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", ["BF16", "Q8_0", "Q4_1"])
def test_formats_of_weights_and_pages_are_counted_as_packed(dtype: str, kv: KVType) -> None:
    program = network(vocab=208)
    weights = RandomWeights(program, dtype)
    run = native(program, weights, "generic", kv_dtype=kv)
    work = step(BATCHES["prompts beside streams"], logit_rows=5)
    assert counted(run, work).tolist() == priced(run, weights, kv, work).tolist()


def test_streams_that_share_blocks_count_each_for_itself() -> None:
    program = network(vocab=208)
    weights = RandomWeights(program)
    run = native(program, weights, "generic", num_threads=2)
    (table,) = tables([700], 32)
    pieces = [Piece(token_ids(700), start, 1, table) for start in (600, 601, 690)]
    work = batch(*pieces, rows=[0, 1, 2])
    expected = priced(run, weights, "float32", work)
    assert counted(run, work).tolist() == expected.tolist()


def test_without_logits_the_head_counts_nothing() -> None:
    program = network(vocab=208)
    weights = RandomWeights(program)
    run = native(program, weights, "generic")
    work = step([(0, 40)], logit_rows=0)
    assert counted(run, work).tolist() == priced(run, weights, "float32", work).tolist()


def test_the_vocabularys_weights_alone_count_again_for_every_slice_of_rows() -> None:
    program = network(vocab=208)
    weights = RandomWeights(program)
    run = native(program, weights, "generic")
    rows = 2 * HEAD_ROWS + 1
    work = step([(0, rows)], logit_rows=rows)
    known = tuple(PromptRow(row, "p", row + 1, 7, 0) for row in range(rows))
    run.submit(replace(work, prompt_rows=known)).result()
    expected = priced(run, weights, "float32", work)
    head = prepare(program, weights.dtype, "group").weight_bytes["head"]
    assert list(run.counted()) == (expected + np.array([0, 2 * head, 0, 0])).tolist()
