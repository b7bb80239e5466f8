"""However the attention of a step is cut or shared, a row has the bits that it has alone."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.executors.checkpoints import Piece, batch
from tests.executors.native import SETS, RandomWeights, bits, native, needs_library, network

pytestmark = needs_library

LENGTH, BLOCK = 1190, 32
SHAPES: dict[str, dict[str, Any]] = {
    "groups of 3": {"heads": 6, "kv_heads": 2},
    "a group of 9": {"heads": 9, "kv_heads": 1, "head_dim": 48},
    "a window of 300": {"heads": 4, "kv_heads": 2, "window": 300},
}


@cache
def program_of(shape: str) -> Any:
    return network(**{"layers": 2, "width": 32, "inner": 32, "vocab": 40, **SHAPES[shape]})


def run_of(shape: str, isa: str, **settings: Any) -> Any:
    program = program_of(shape)
    limits = {"kv_dtype": "bfloat16", "num_blocks": 400}
    return native(program, RandomWeights(program), isa, **(limits | settings))


every_shape = pytest.mark.parametrize("shape", SHAPES)
every_set = pytest.mark.parametrize("isa", SETS)
every_format = pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])


class Family:
    """Sequences that share beginnings: a parent, and children that leave it at whole blocks."""

    def __init__(self, seed: int, block_size: int = BLOCK) -> None:
        self.rng = np.random.default_rng(seed)
        self.block_size = block_size
        self.free = self.rng.permutation(400).tolist()
        self.members: list[tuple[np.ndarray, list[int]]] = []

    def add(self, length: int, shared: int = 0, parent: int = 0) -> None:
        """A sequence whose first `shared` blocks are those of member `parent`."""
        ids = self.rng.integers(0, 40, length)
        table: list[int] = []
        if shared:
            known, blocks = self.members[parent]
            table = blocks[:shared]
            ids[: shared * self.block_size] = known[: shared * self.block_size]
        while len(table) * self.block_size < length:
            table = [*table, self.free.pop()]
        self.members.append((ids, table))

    def pieces(self, counts: list[int]) -> list[Piece]:
        """The last `count` tokens of each."""
        return [
            Piece(ids, len(ids) - count, count, table)
            for (ids, table), count in zip(self.members, counts, strict=True)
        ]

    def fill(self, run: Any) -> None:
        """Compute all members, one after another."""
        for ids, table in self.members:
            run.logits(batch(Piece(ids, 0, len(ids), table), rows=[0]))


def rows_together_and_alone(run: Any, pieces: list[Piece]) -> tuple[bytes, bytes]:
    together = bits(run.logits(batch(*pieces)))
    return together, b"".join(bits(run.logits(batch(piece))) for piece in pieces)


@every_shape
@every_set
@every_format
@pytest.mark.parametrize("count", [1, 3, 40])
def test_any_number_of_threads_gives_a_long_sequence_the_same_bits(shape, isa, count, kv_dtype):
    family = Family(1)
    family.add(LENGTH)
    found = set()
    for num_threads in (1, 2, 3, 16):
        run = run_of(shape, isa, num_threads=num_threads, kv_dtype=kv_dtype)
        family.fill(run)
        found.add(bits(run.logits(batch(*family.pieces([count])))))
    assert len(found) == 1


@every_shape
@every_set
@every_format
def test_a_shared_beginning_is_read_together_with_the_bits_of_each_alone(shape, isa, kv_dtype):
    """Decoded rows, drafts of 3, a prompt's 20 rows, some that share less, some nothing."""
    family = Family(2)
    family.add(1100)
    for length, shared in ((1050, 32), (1190, 32), (1100, 27), (600, 16), (700, 15), (515, 16)):
        family.add(length, shared)
    family.add(1000, 24, parent=2)
    family.add(800)
    family.add(1100, 34)  # ends where its own block begins
    family.add(40)
    run = run_of(shape, isa, num_threads=2, kv_dtype=kv_dtype)
    family.fill(run)
    together, alone = rows_together_and_alone(
        run, family.pieces([1, 1, 3, 1, 20, 1, 2, 1, 1, 1, 1])
    )
    assert together == alone


@every_set
@pytest.mark.parametrize("block_size", [16, 256])
def test_blocks_of_any_size_are_shared_by_whole_segments(isa, block_size):
    family = Family(3, block_size)
    family.add(1100)
    for length in (1000, 1100, 900):
        family.add(length, 768 // block_size)
    run = run_of("groups of 3", isa, num_threads=3, block_size=block_size)
    family.fill(run)
    together, alone = rows_together_and_alone(run, family.pieces([1, 2, 1, 1]))
    assert together == alone


@pytest.mark.parametrize("seed", range(6))
def test_random_families_have_the_bits_of_each_alone(seed):
    rng = np.random.default_rng(seed)
    shape = list(SHAPES)[seed % 3]
    family = Family(seed)
    family.add(int(rng.integers(300, 1190)))
    for _ in range(int(rng.integers(2, 9))):
        parent = int(rng.integers(len(family.members)))
        most = len(family.members[parent][0]) // BLOCK
        shared = int(rng.integers(0, most + 1))
        length = min(1190, shared * BLOCK + int(rng.integers(1, 400)))
        if length > shared * BLOCK:
            family.add(length, shared, parent)
    counts = [
        min(int(rng.choice([1, 1, 1, 5, 8, 9])), 1 + (len(ids) - 1) % BLOCK)
        for ids, _ in family.members
    ]
    for isa in SETS:
        run = run_of(shape, isa, num_threads=1 + seed % 3)
        family.fill(run)
        together, alone = rows_together_and_alone(run, family.pieces(counts))
        assert together == alone, isa
