"""The same request gives the same bits on every instruction set, however it is cut or batched."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from octavo.executors.cpu import HEAD_ROWS
from octavo.program.program import Program
from tests.executors.checkpoints import Piece, batch
from tests.executors.native import (
    SETS,
    RandomWeights,
    bits,
    native,
    needs_library,
    network,
    tables,
    token_ids,
)

pytestmark = needs_library

LAW_LENGTH = 290  # past a segment and within a block
LAW_IDS = token_ids(LAW_LENGTH, seed=7)
CUTS = {
    "one by one": [0, 240, *range(241, LAW_LENGTH + 1)],
    "sevens": [*range(0, LAW_LENGTH, 7), LAW_LENGTH],
    "sixteens": [*range(0, LAW_LENGTH, 16), LAW_LENGTH],
    "at the segment": [0, 256, LAW_LENGTH],
    "uneven": [0, 1, 40, 257, 289, LAW_LENGTH],
}
LAWFUL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "4-bit, group of 3": ("Q4_1", "group", {"heads": 6, "kv_heads": 2, "window": 100}),
    "int8, group of 1": ("Q8_0", "group", {"heads": 4, "kv_heads": 4, "bias": True}),
    "bf16, group of 8": ("BF16", "group", {"heads": 8, "kv_heads": 1, "width": 72, "inner": 50}),
    "4-bit, one scale": ("Q4_1", "channel", {"heads": 6, "kv_heads": 2, "width": 96}),
    "int8, one scale": ("Q8_0", "channel", {"heads": 4, "kv_heads": 4, "bias": True}),
}
LAW_FORMATS = [*((isa, kv) for isa in SETS for kv in ("bfloat16", "int8")), (SETS[0], "float32")]


@dataclass(frozen=True)
class Lawful:
    """One network on one instruction set, and the logits of all rows in one step."""

    program: Program
    weights: Any
    isa: str
    kv_dtype: str
    scales: str

    def executor(self, **settings: Any) -> Any:
        common = {"kv_dtype": self.kv_dtype, "num_blocks": 64, "num_threads": 2}
        common["scales"] = self.scales
        return native(self.program, self.weights, self.isa, **(common | settings))

    def whole(self, **settings: Any) -> bytes:
        (table,) = tables([LAW_LENGTH], settings.get("block_size", 32), seed=3)
        return bits(self.executor(**settings).logits(batch(Piece(LAW_IDS, 0, LAW_LENGTH, table))))


@pytest.fixture(
    params=[(name, isa, kv) for name in LAWFUL for isa, kv in LAW_FORMATS],
    ids="-".join,
    scope="module",
)
def lawful(request) -> Iterator[tuple[Lawful, bytes]]:
    name, isa, kv_dtype = request.param
    dtype, scales, shape = LAWFUL[name]
    program = network(**shape)
    case = Lawful(program, RandomWeights(program, dtype), isa, kv_dtype, scales)
    return case, case.whole()


class TestLaw:
    @pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
    def test_chunks_do_not_matter(self, lawful, cuts):
        case, expected = lawful
        (table,) = tables([LAW_LENGTH], 32)
        run = case.executor()
        parts = [run.logits(batch(Piece(LAW_IDS, a, b - a, table))) for a, b in pairwise(cuts)]
        assert bits(np.concatenate(parts)) == expected

    def test_the_rest_of_the_batch_does_not_matter(self, lawful):
        case, expected = lawful
        alone = np.frombuffer(expected, np.float32).reshape(LAW_LENGTH, -1)
        mine, *others = tables([LAW_LENGTH, 90, 90, 90], 32, seed=1)
        first, second, third = (
            Piece(token_ids(90, seed=seed), 0, 90, table) for seed, table in enumerate(others)
        )
        run = case.executor()
        step = batch(first, Piece(LAW_IDS, 0, 280, mine), second)
        assert bits(run.logits(step)[90:370]) == bits(alone[:280])
        for position in range(280, LAW_LENGTH):
            step = batch(
                third, Piece(LAW_IDS, position, 1, mine), first._replace(count=position - 275)
            )
            assert bits(run.logits(step)[90]) == bits(alone[position])

    @pytest.mark.parametrize("block_size", [16, 64, 128, 256])
    def test_block_size_does_not_matter(self, lawful, block_size):
        case, expected = lawful
        assert case.whole(block_size=block_size) == expected

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_threads_do_not_matter(self, lawful, num_threads):
        case, expected = lawful
        assert case.whole(num_threads=num_threads) == expected

    def test_stale_content_of_blocks_does_not_matter(self, lawful):
        """NaN everywhere that the step does not write: other blocks, and the last one's tail."""
        case, expected = lawful
        run = case.executor()
        run.pages[...] = 0xFF
        (table,) = tables([LAW_LENGTH], 32)
        cuts = [0, 33, 100, 257, LAW_LENGTH]
        parts = [run.logits(batch(Piece(LAW_IDS, a, b - a, table))) for a, b in pairwise(cuts)]
        assert bits(np.concatenate(parts)) == expected

    def test_rows_that_are_wanted_do_not_matter(self, lawful):
        """More than one tile of logits, in any order."""
        case, expected = lawful
        wanted = [289, 0, *range(10, 10 + 2 * HEAD_ROWS), 256]
        (table,) = tables([LAW_LENGTH], 32)
        step = batch(Piece(LAW_IDS, 0, LAW_LENGTH, table), rows=wanted)
        alone = np.frombuffer(expected, np.float32).reshape(LAW_LENGTH, -1)
        assert bits(case.executor().logits(step)) == bits(alone[wanted])

    def test_blocks_that_went_elsewhere_and_back_do_not_matter(self, lawful):
        case, expected = lawful
        alone = np.frombuffer(expected, np.float32).reshape(LAW_LENGTH, -1)
        source, target = case.executor(), case.executor(num_blocks=40)
        source.logits(batch(Piece(LAW_IDS, 0, 288, range(9))))
        places = [31, 2, 17, 5, 39, 8, 0, 30, 12]
        target.import_blocks(places, source.export_blocks(range(9)))
        copied = [*places[:-1], 20, 21]
        step = batch(Piece(LAW_IDS, 288, 2, copied), copies=[(12, 19), (19, 20)])
        assert bits(target.logits(step)) == bits(alone[288:])


def test_a_different_instruction_set_shows_in_the_fingerprint_and_threads_do_not():
    program = network()
    weights = RandomWeights(program)
    prints = {isa: native(program, weights, isa).fingerprint for isa in SETS}
    assert len(set(prints.values())) == len(SETS)
    assert native(program, weights, SETS[0], num_threads=3).fingerprint == prints[SETS[0]]
    for setting in ({"kv_dtype": "bfloat16"}, {"weights_digest": "another"}):
        assert native(program, weights, SETS[0], **setting).fingerprint != prints[SETS[0]]
