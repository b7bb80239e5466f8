"""The same request gives the same bits, however it is cut, batched, stored or followed."""

from itertools import pairwise

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from octavo.executors.reference import ReferenceExecutor
from octavo.program.program import Builder, KVGroup
from tests.executors.checkpoints import Piece, batch, executor, load

NAMES = ["llama", "llama31-rope", "qwen3", "mistral", "gemma3"]
LENGTH = 300  # past the first attention segment of 256
IDS = np.random.default_rng(7).integers(0, 300, LENGTH)
OTHERS = [np.random.default_rng(seed).integers(0, 300, 90) for seed in range(3)]
CUTS = {
    "one by one": [0, 225, *range(226, 271), LENGTH],
    "sevens": [*range(0, LENGTH, 7), LENGTH],
    "sixteens": [*range(0, LENGTH, 16), LENGTH],
    "at the segment": [0, 256, LENGTH],
    "uneven": [0, 1, 40, 257, 299, LENGTH],
}


def table(first: int, block_size: int = 16) -> range:
    return range(first, first + -(-LENGTH // block_size))


def whole(name: str, **settings) -> np.ndarray:
    return executor(name, **settings).logits(batch(Piece(IDS, 0, LENGTH, table(0))))


def bits(logits: np.ndarray) -> bytes:
    return np.ascontiguousarray(logits).tobytes()


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_chunks_do_not_matter(name, cuts):
    run = executor(name, kv_dtype="bfloat16")
    pieces = [Piece(IDS, a, b - a, table(3)) for a, b in pairwise(cuts)]
    parts = [run.logits(batch(piece)) for piece in pieces]
    assert bits(np.concatenate(parts)) == bits(whole(name, kv_dtype="bfloat16"))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_rest_of_the_batch_does_not_matter(name, kv_dtype):
    run = executor(name, kv_dtype=kv_dtype)
    alone = whole(name, kv_dtype=kv_dtype)
    first, second, third = (
        Piece(ids, 0, 90, range(40 + 6 * i, 46 + 6 * i)) for i, ids in enumerate(OTHERS)
    )
    step = batch(first, Piece(IDS, 0, 290, table(0)), second)
    assert bits(run.logits(step)[90:380]) == bits(alone[:290])
    for position in range(290, LENGTH):
        step = batch(third, Piece(IDS, position, 1, table(0)), first._replace(count=position - 280))
        assert bits(run.logits(step)[90]) == bits(alone[position])


@pytest.mark.parametrize("block_size", [1, 32, 64, 256])
@pytest.mark.parametrize("name", NAMES)
def test_block_size_does_not_matter(name, block_size):
    run = executor(name, block_size=block_size, num_blocks=2 * LENGTH)
    backwards = list(table(2, block_size))[::-1]
    logits = [
        run.logits(batch(Piece(IDS, start, 100, backwards))) for start in range(0, LENGTH, 100)
    ]
    assert bits(np.concatenate(logits)) == bits(whole(name))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_stale_content_of_blocks_does_not_matter(name, kv_dtype):
    run = executor(name, kv_dtype=kv_dtype)
    run.pages.array["numbers"] = np.nan if kv_dtype == "float32" else 0x7FC0
    parts = [run.logits(batch(Piece(IDS, start, 50, table(4)))) for start in range(0, LENGTH, 50)]
    assert bits(np.concatenate(parts)) == bits(whole(name, kv_dtype=kv_dtype))


def test_threads_of_the_caller_do_not_matter():
    """With products so large that BLAS would part them among threads."""
    b = Builder()
    x = b.linear(b.embed("table", 300, 512), "up", 4099)
    head = b.linear(b.select_rows(b.linear(x, "down", 512)), "head", 2047)
    program = b.sample(head, KVGroup(1, 1, 4), max_context=LENGTH)
    rng = np.random.default_rng(5)
    weights = {
        name: rng.standard_normal(shape, np.float32) for name, shape in program.parameters.items()
    }
    run = ReferenceExecutor(program, weights.__getitem__, num_blocks=20, clock=lambda: 0.0)
    results = []
    for num_threads in (1, 2):
        with threadpool_limits(num_threads):
            results.append(bits(run.logits(batch(Piece(IDS, 0, 20, table(0))))))
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_fused_program_computes_the_same_bits(name, dtype):
    assert bits(whole(name, dtype=dtype)) == bits(whole(name, dtype=dtype, fused=False))


def test_rows_wanted_do_not_matter():
    alone = whole("llama")
    wanted = [299, 0, *range(10, 60), 256]
    step = batch(Piece(IDS, 0, LENGTH, table(0)), rows=wanted)
    assert bits(executor("llama").logits(step)) == bits(alone[wanted])


def test_rows_that_overflow_stay_among_themselves():
    weights = dict(load("llama")[1])
    weights["embedding"] = weights["embedding"].copy()
    poisoned = int(np.setdiff1d(np.arange(300), IDS)[0])
    weights["embedding"][poisoned] = np.nan
    run = executor("llama", weights)
    other = Piece(np.full(40, poisoned), 0, 40, range(60, 63))
    logits = run.logits(batch(other, Piece(IDS, 0, LENGTH, table(0)), other))
    clean = np.delete(np.arange(300), poisoned)  # the head is tied to the embedding
    assert bits(logits[40 : 40 + LENGTH][:, clean]) == bits(whole("llama")[:, clean])
