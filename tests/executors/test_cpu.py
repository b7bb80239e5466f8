"""The native executor computes what the reference does on the same weights, on every shape."""

import json
from typing import Any

import numpy as np
import pytest

from octavo.models.registry import WeightReader, build_program, read_huggingface_config
from octavo.program.program import Builder, KVGroup, Program
from octavo.weights.safetensors import open_safetensors
from octavo.weights.source import TensorType
from tests.executors.checkpoints import NAMES, TINY, Piece, batch, golden
from tests.executors.native import (
    SCALES,
    SETS,
    OneMatrix,
    RandomWeights,
    Table,
    bits,
    distance,
    native,
    needs_library,
    network,
    packed_values,
    reference,
    tables,
    token_ids,
)

pytestmark = needs_library
every_set = pytest.mark.parametrize("isa", SETS)

# How far logits may be from the reference's, over the largest one, with float32 pages and the
# reference on the very weights that were packed. What is left is
#   bf16: the order of float32 sums. Each product of n terms rounds by about sqrt(n) * 2^-24; some
#     twenty products of 32 to 512 terms, one after another, and softmax: 1e-6; ten times that.
#     Measured: 3.7e-6.
#   bf16 on amx and avx512_bf16: they round activations to bfloat16 as well, by up to 2^-9 each,
#     half of that on average, so a product is off by 0.1 % of its deviation. A score of 10 is then
#     off by 0.01 to 0.02, and so are the weights of softmax and what follows; twice that for the
#     worst of thousands of logits. Measured: 3.1e-2. (A single product is exact: see below.)
#   int: activations are int8 per group of 32. A step is largest / 127, the error of one element
#     1 / sqrt(12) of that; the largest of 32 normal numbers is 2.1 deviations, so a product is
#     off by 0.5 % of its own deviation. Sqrt(12) products, three times that, and attention or a
#     norm over few elements may double it. Measured: 5.2e-2, where random K types are lopsided.
#   int with one scale per output: activations have 16 bits, so a step is at most the largest of a
#     row / 8,000 (the groups' sums must fit into 16 bits too), an element's error 1e-4 of its
#     deviation and a product's as much of its own; twenty times that as above. Measured: 2.4e-3.
#   int8 pages: both sides round keys and values alike, but for numbers so near a tie that float
#     sums part them: one step of 1 / 127 in one of thousands of numbers. Queries and weights are
#     whole numbers of 16 bits: 3e-5 of the largest. Measured: 5.1e-4.
FLOAT_SUMS, BF16_TILES, INT8_ACTIVATIONS = 1e-5, 5e-2, 1e-1
INT16_ACTIVATIONS, INT8_PAGES = 5e-3, 2e-3


def tolerance(isa: str, dtype: str, scales: str = "group") -> float:
    if dtype in ("F32", "F16", "BF16"):
        return BF16_TILES if isa in ("amx", "avx512_bf16") else FLOAT_SUMS
    return INT16_ACTIVATIONS if scales == "channel" else INT8_ACTIVATIONS


# --- whole networks ------------------------------------------------------------------------------


class Golden:
    """The weights of a tiny checkpoint as its file has them."""

    def __init__(self, name: str) -> None:
        config = read_huggingface_config(json.loads((TINY / name / "config.json").read_text()))
        self.program = build_program(config)
        self.weights = WeightReader(config, self.program, open_safetensors(TINY / name))


@pytest.mark.parametrize("name", NAMES)
def test_every_tiny_checkpoint_agrees_with_the_reference_on_its_packed_weights(name):
    model, ids = Golden(name), token_ids(300, 300)
    step = batch(Piece(ids, 0, 300, range(10)))
    expected = reference(model.program, model.weights).logits(step)
    for isa in SETS:
        found = native(model.program, model.weights, isa).logits(step)
        assert distance(found, expected) < tolerance(isa, "BF16"), isa


@every_set
def test_rounding_weights_to_bfloat16_is_all_that_parts_it_from_transformers(isa):
    """Weights that are bfloat16 in their file: the golden logits of Hugging Face transformers."""
    name = "llama-bf16-sharded"
    model, values = Golden(name), golden(name)
    ids = values["prompt0_ids"]
    run = native(model.program, model.weights, isa)
    logits = run.logits(batch(Piece(ids, 0, len(ids), range(20))))
    found = logits[values["prompt0_prefill_positions"]]
    assert distance(found, values["prompt0_prefill_logits"]) < max(tolerance(isa, "BF16"), 1e-4)


# Rows from which attention may go wrong: around blocks of 32, the tile of 16, and segments of 256.
EDGES = [0, 1, 15, 16, 17, 30, 31, 32, 33, 63, 64, 254, 255, 256, 257, 300, 511, 512, 513]
FAR_EDGES = [*EDGES, 1000, 1023, 1024, 1099]

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"layers": 3},
    **{f"heads of {n}": {"head_dim": n} for n in (64, 80, 96, 128, 256)},
    **{f"group of {n}": {"heads": n, "kv_heads": 1} for n in (1, 2, 3, 5, 7, 8, 16)},
    "9 over 3 heads": {"heads": 9, "kv_heads": 3},
    "odd widths": {"width": 51, "inner": 77, "vocab": 131, "bias": True},
    "odd widths, wider": {"width": 150, "inner": 33, "vocab": 17},
    **{f"window of {n}": {"window": n} for n in (1, 2, 31, 255, 256, 257, 511, 600)},
    "biases": {"bias": True, "kv_heads": 1},
    "QK norm, gelu, scaled": {
        "layers": 2,
        "qk_norm": True,
        "kind": "gelu_tanh",
        "scale": 8.0,
        "window": 40,
    },
}


FAR = ("plain", "group of 8", "window of 255", "window of 600", "QK norm, gelu, scaled")


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_and_edge_shapes_agree_at_every_edge(shape):
    program = network(**{"layers": 1, **SHAPES[shape]})
    weights = RandomWeights(program)
    (table,) = tables([1100], 32)
    rows = FAR_EDGES if shape in FAR else EDGES
    length = rows[-1] + 1
    step = batch(Piece(token_ids(1100, 17), 0, length, table[: -(-length // 32)]), rows=rows)
    expected = reference(program, weights).logits(step)
    for isa in SETS:  # with no row, position or block to spare
        sizes = {"max_rows": length, "max_positions": length, "num_blocks": max(table) + 1}
        found = native(program, weights, isa, **sizes).logits(step)
        assert distance(found, expected) < tolerance(isa, "BF16"), isa


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [kind.value for kind in TensorType])
def test_every_stored_type_agrees(dtype, scales):
    """K types need rows of 256; heads, groups and outputs are ragged."""
    shape = {"width": 256, "inner": 256, "heads": 4, "kv_heads": 1, "head_dim": 64, "vocab": 203}
    program = network(**shape, bias=True)
    weights = RandomWeights(program, dtype)
    step = batch(Piece(token_ids(40, 203), 0, 40, range(2)))
    expected = reference(program, weights, scales).logits(step)
    for isa in SETS:
        found = native(program, weights, isa, max_rows=40, scales=scales).logits(step)
        assert distance(found, expected) < tolerance(isa, dtype, scales), isa


@every_set
def test_bfloat16_pages_hold_what_the_references_do(isa):
    """Both round keys and values to nearest, so that only numbers near a tie fall apart."""
    program = network(head_dim=64)
    weights, ids = RandomWeights(program), token_ids(300)
    step = batch(Piece(ids, 0, 300, range(10)))
    found = native(program, weights, isa, kv_dtype="bfloat16").logits(step)
    expected = reference(program, weights, kv_dtype="bfloat16").logits(step)
    assert distance(found, expected) < max(tolerance(isa, "BF16"), 2.0**-8)


@pytest.mark.parametrize("shape", [name for name in SHAPES if not name.startswith("odd")])
def test_int8_pages_agree_with_the_references_at_every_edge(shape):
    program = network(**{"layers": 1, **SHAPES[shape]})
    weights, (table,) = RandomWeights(program), tables([520], 32)
    step = batch(Piece(token_ids(520, 17), 0, 514, table), rows=EDGES)
    expected = reference(program, weights, kv_dtype="int8").logits(step)
    for isa in SETS:
        sizes = {"max_rows": 514, "max_positions": 514, "num_blocks": max(table) + 1}
        found = native(program, weights, isa, kv_dtype="int8", **sizes).logits(step)
        assert distance(found, expected) < max(tolerance(isa, "BF16"), INT8_PAGES), isa


@every_set
@pytest.mark.parametrize("block_size", [16, 256])
def test_int8_pages_of_any_block_size_agree_without_a_block_to_spare(isa, block_size):
    program = network(head_dim=80, layers=1)
    weights = RandomWeights(program)
    blocks = list(range(-(-290 // block_size)))
    step = batch(Piece(token_ids(290), 0, 290, blocks))
    common = {"kv_dtype": "int8", "block_size": block_size, "num_blocks": len(blocks)}
    expected = reference(program, weights, **common).logits(step)
    found = native(program, weights, isa, **common).logits(step)
    assert distance(found, expected) < max(tolerance(isa, "BF16"), INT8_PAGES)


# --- one product, exactly ------------------------------------------------------------------------


def lookup_and_product(inputs: int, outputs: int, bias: bool) -> Program:
    """Logits are one matrix times a row of the table, with nothing else between them."""
    b = Builder()
    x = b.select_rows(b.embed("table", 64, inputs))
    return b.sample(b.linear(x, "head", outputs, bias=bias), KVGroup(1, 1, 16), 64)


def int8_groups(rows: np.ndarray) -> np.ndarray:
    """Activations as the native library rounds them, in float64."""
    groups = rows.reshape(len(rows), -1, 32).astype(np.float32)
    top = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(127) / top, np.float32(0))
    whole = np.rint(groups * inverse).astype(np.float64)
    return (whole * (top / np.float32(127))).reshape(rows.shape)


@every_set
@pytest.mark.parametrize("outputs", [1, 15, 33, 160])
@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K", "BF16"])
def test_a_product_is_exact_on_its_rounded_activations(dtype, outputs, isa):
    """Integer sums are exact, so only a float32 sum over groups is left: 1e-6."""
    program = lookup_and_product(512, outputs, bias=True)
    weights = OneMatrix(RandomWeights(program, dtype), RandomWeights(program, "BF16", seed=1))
    values = packed_values(program, weights)
    rows = values["table"]
    if dtype != "BF16":
        rows = int8_groups(rows)
    expected = rows @ values["head"].astype(np.float64).T + values["head_bias"]
    for count in (1, 3, 4, 5, 8, 9, 16, 17, 31, 50):
        run = native(program, weights, isa, max_rows=count)
        found = run.logits(batch(Piece(np.arange(count), 0, count, range(2))))
        assert distance(found, expected[:count]) < 2e-6, count


def int16_rows(rows: np.ndarray) -> np.ndarray:
    """Activations as the formats with one scale per output round them, in float64."""
    x = rows.astype(np.float64)
    sums = np.abs(x.reshape(len(x), -1, 32).sum(axis=2)).max(axis=1)
    scale = np.maximum.reduce(
        [
            np.abs(x).max(axis=1) / 32600,
            sums / 32600,
            np.abs(x).sum(axis=1) / (8.3e6 - x.shape[1]),
        ]
    )
    scale = np.where(scale > 0, scale, 1)[:, None]
    return np.rint(x / scale) * scale


@every_set
@pytest.mark.parametrize("outputs", [1, 15, 33, 160])
@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K"])
def test_a_product_with_one_scale_per_output_is_exact_on_its_rounded_activations(
    dtype, outputs, isa
):
    """All sums are exact; the scales are float32, and now and then a tie rounds the other way."""
    program = lookup_and_product(512, outputs, bias=True)
    weights = OneMatrix(RandomWeights(program, dtype), RandomWeights(program, "BF16", seed=1))
    values = packed_values(program, weights, "channel")
    expected = int16_rows(values["table"]) @ values["head"].astype(np.float64).T
    expected += values["head_bias"]
    whole = None
    for count in (50, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31):
        run = native(program, weights, isa, max_rows=count, scales="channel")
        found = run.logits(batch(Piece(np.arange(count), 0, count, range(2))))
        whole = found if whole is None else whole
        assert bits(found) == bits(whole[:count]), count
        assert distance(found, expected[:count]) < 1e-4, count


@pytest.mark.parametrize("inputs", [32, 96, 2048, 2080, 4128, 8192])
def test_long_sums_are_exact_too(inputs):
    """Around the 2,048 inputs that are multiplied out at a time; all of one sign, the worst.

    The sum of a group, up to 32,600, meets the last 8 bits of an offset without its own last 8:
    an error of up to 1 / 256, of 1 / 256 of a weight's 240 steps.
    """
    program = lookup_and_product(inputs, 40, bias=False)
    table = np.abs(np.random.default_rng(0).standard_normal((64, inputs), np.float32)) + 1
    for dtype in ("Q4_1", "Q8_0"):
        weights = OneMatrix(
            RandomWeights(program, dtype), Table(RandomWeights(program, "F32"), table)
        )
        values = packed_values(program, weights, "channel")
        expected = int16_rows(values["table"]) @ values["head"].astype(np.float64).T
        for isa in SETS:
            run = native(program, weights, isa, max_rows=40, scales="channel")
            found = run.logits(batch(Piece(np.arange(40), 0, 40, range(2))))
            assert distance(found, expected[:40]) < 5e-4, (dtype, isa)


@every_set
def test_a_row_that_is_no_number_spoils_no_other(isa):
    program = lookup_and_product(64, 20, bias=False)
    table = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    clean = table.copy()
    table[1, 5], table[3, 60] = np.nan, np.inf
    found = []
    for values in (clean, table):
        others = Table(RandomWeights(program, "F32"), values)
        weights = OneMatrix(RandomWeights(program, "Q8_0"), others)
        run = native(program, weights, isa, scales="channel")
        found.append(run.logits(batch(Piece(np.arange(6), 0, 6, range(1)))))
    good = [0, 2, 4, 5]
    assert bits(found[0][good]) == bits(found[1][good])
    assert not np.isfinite(found[1][[1, 3]]).any()


@every_set
def test_activations_of_zero_and_of_any_size_are_rounded_by_their_own_group(isa):
    program = lookup_and_product(64, 20, bias=False)
    table = np.zeros((64, 64), np.float32)
    table[1, :32], table[2, 32:], table[3] = 1e-30, 1e30, np.linspace(-2, 2, 64)
    table[4, ::2] = 2.0**-100
    others = Table(RandomWeights(program, "F32"), table)
    weights = OneMatrix(RandomWeights(program, "Q8_0"), others)
    values = packed_values(program, weights)
    expected = int8_groups(values["table"]) @ values["head"].astype(np.float64).T
    found = native(program, weights, isa).logits(batch(Piece(np.arange(5), 0, 5, range(1))))
    for row in range(5):
        error = np.abs(found[row] - expected[row]).max()
        assert error <= 2e-6 * np.abs(expected[row]).max(), row


# --- random batches ------------------------------------------------------------------------------


class RandomSteps:
    """Sequences that grow by random chunks, fork by copies, and end; six at most."""

    def __init__(self, seed: int, block_size: int, num_blocks: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.alive: list[tuple[list[int], list[int]]] = []  # ids and blocks of each sequence
        self.num_copies = self.num_steps = 0

    def step(self, vocab: int):
        """The next batch."""
        rng, copies, pieces = self.rng, [], []
        while len(self.alive) < int(rng.integers(1, 7)):
            self.alive.append(([], []))
        if len(self.alive) < 6 and rng.random() < 0.3:
            copies = self._fork()
        for ids, table in self.alive:
            if rng.random() < 0.3 and pieces:
                continue
            count = int(rng.choice([1, 1, 1, 2, 7, 16, 17, 40, 90]))
            start = len(ids)
            ids += rng.integers(0, vocab, count).tolist()
            while len(table) * self.block_size < len(ids):
                table.append(self.free.pop(int(rng.integers(len(self.free)))))
            pieces.append(Piece(np.array(ids), start, count, tuple(table)))
        rng.shuffle(pieces)  # type: ignore[arg-type]
        rows = sum(piece.count for piece in pieces)
        wanted = rng.choice(rows, int(rng.integers(0, rows + 1)), replace=False)
        self._retire()
        self.num_copies += len(copies)
        self.num_steps += 1
        return batch(*pieces, rows=wanted, copies=copies)

    def _fork(self) -> list[tuple[int, int]]:
        """A child has copies of all blocks of its parent."""
        ids, table = self.alive[int(self.rng.integers(len(self.alive)))]
        if not table:
            return []
        own = [self.free.pop() for _ in table]
        self.alive.append((list(ids), own))
        return list(zip(table, own, strict=True))

    def _retire(self) -> None:
        for sequence in list(self.alive):
            if len(sequence[0]) > 250 or self.rng.random() < 0.1:
                self.alive.remove(sequence)
                self.free += sequence[1]


def fuzz(seed: int, num_steps: int, dtype: str = "BF16") -> None:
    program = network(heads=6, kv_heads=2, window=37, width=48, inner=40, vocab=70, bias=True)
    weights = RandomWeights(program, dtype, seed)
    oracle = reference(program, weights, num_blocks=120)
    runs = {
        isa: native(program, weights, isa, num_blocks=120, num_threads=1 + n % 2)
        for n, isa in enumerate(SETS)
    }
    steps = RandomSteps(seed, 32, 120)
    for number in range(num_steps):
        step = steps.step(70)
        expected = oracle.logits(step)
        for isa, run in runs.items():
            found = run.logits(step)
            if len(expected):
                off = distance(found, expected)
                assert off < tolerance(isa, dtype), f"seed {seed}, step {number}, {isa}: {off}"
    assert steps.num_copies > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_agree(seed):
    fuzz(seed, 50)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_random_batches_agree(seed, dtype):
    fuzz(seed, 500, dtype)
