"""One product, on a tape of its own: the same bits on every instruction set and beside any rows."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest

from octavo.executors.packing import PackedMatrix
from octavo.native import library
from tests.executors.native import SETS, bits, needs_library, packed, stored

pytestmark = needs_library

FORMATS = {
    "int4": ("Q4_1", "channel"),
    "int8": ("Q8_0", "channel"),
    "int4_group": ("Q4_1", "group"),
    "int8_group": ("Q8_0", "group"),
    "bf16": ("BF16", "group"),
}
# Around tiles of 16 rows, what too few rows for tiles are, and blocks of 128 and of 512 rows.
FEW, MANY = range(1, 51), (127, 129, 144, 255, 511, 512, 513, 530)
# Around the 2,048 inputs that are multiplied out at a time; odd numbers of groups, of 16 too.
INPUTS = (32, 96, 576, 1536, 2048, 2080, 4128)
GUARD = 3  # columns between rows that are nobody's


@cache
def matrix(format_: str, inputs: int, outputs: int, seed: int = 0) -> PackedMatrix:
    dtype, scales = FORMATS[format_]
    made = packed(dtype, stored(dtype, (outputs, inputs), seed), scales)  # type: ignore[arg-type]
    assert made.format == format_
    return made


@cache
def activations(count: int, inputs: int) -> np.ndarray:
    """Rows of many sizes, of either sign and of one; the fourth is zero."""
    rng = np.random.default_rng(inputs)
    rows = rng.standard_normal((count, inputs), np.float32)
    rows *= np.exp2(rng.integers(-20, 20, (count, 1))).astype(np.float32)
    rows[2::7] = np.abs(rows[2::7])
    rows[3] = 0
    return rows


def product(
    isa: str,
    rows: np.ndarray,
    matrices: Iterable[PackedMatrix],
    biases: Iterable[np.ndarray | None] = (),
    num_threads: int = 1,
) -> np.ndarray:
    """The rows times each matrix, side by side."""
    assert library is not None
    matrices, biases = list(matrices), list(biases)
    width = sum(each.outputs for each in matrices)
    out = np.full((len(rows), width + GUARD), np.inf, np.float32)
    x = np.full((len(rows), rows.shape[1] + GUARD), np.nan, np.float32)
    x[:, :-GUARD] = rows
    op = library.Operation(library.Kind.linear)
    op.x = library.Value(x.ctypes.data, x.shape[1], rows.shape[1])
    op.out = library.Value(out.ctypes.data, out.shape[1], width)
    op.matrices = [native_matrix(each) for each in matrices]
    op.set_biases([0 if b is None else b.ctypes.data for b in biases] or [0] * len(matrices))
    tape = library.Tape(isa, 0, 1, 16, 1, 16, 4, len(rows), num_threads)
    tape.add(op)
    tape.run(library.Step([0] * 6, [len(rows), 0, 0, 0]), 0, 1)
    assert np.isposinf(out[:, width:]).all()
    return out[:, :width].copy()


def native_matrix(each: PackedMatrix) -> Any:
    assert library is not None
    return library.Matrix(each.panels.ctypes.data, each.outputs, each.inputs, each.format)


def same_bits(format_: str) -> list[str]:
    """The instruction sets that add this format's floats in one order, if with the same rounding.

    Integer sums are exact everywhere; a fused multiply-add is not the generic set's; sums of
    rounded products are the tiles' own, and those of pairs.
    """
    others = {"bf16": ("generic", "amx", "avx512_bf16"), "int4": (), "int8": ()}.get(
        format_, ("generic",)
    )
    return [isa for isa in SETS if isa not in others]


def test_sets_that_are_emulated_come_after_those_of_the_machine():
    assert library is not None
    real = [isa for isa in SETS if isa not in library.emulated]
    assert [*real, *library.emulated] == SETS
    assert real[-1] == "generic"


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("format_", FORMATS)
def test_every_instruction_set_of_one_order_has_the_same_bits(format_, inputs):
    """With an odd number of panels, of which the last is not whole."""
    some, rows = matrix(format_, inputs, 16 * 6 + 7), activations(50, inputs)
    sets = same_bits(format_)
    expected = product(sets[0], rows, [some])
    assert np.isfinite(expected).all()
    assert expected[[0, 1, 2, 4]].any(axis=1).all()
    for isa in sets[1:]:
        assert bits(product(isa, rows, [some])) == bits(expected), isa


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("format_", FORMATS)
class TestRows:
    @pytest.mark.parametrize("inputs", [96, 2080])
    def test_any_number_of_rows_gives_each_the_same_bits(self, format_, isa, inputs):
        some, rows = matrix(format_, inputs, 40), activations(50, inputs)
        expected = product(isa, rows, [some])
        for count in FEW:
            assert bits(product(isa, rows[:count], [some])) == bits(expected[:count]), count

    @pytest.mark.parametrize(("inputs", "outputs"), [(96, 40), (2080, 17)])
    def test_more_rows_than_a_block_give_each_the_same_bits(self, format_, isa, inputs, outputs):
        some, rows = matrix(format_, inputs, outputs), activations(530, inputs)
        first = product(isa, rows[:50], [some])
        last = product(isa, rows[-50:], [some])
        for count in MANY:
            found = product(isa, rows[-count:], [some])
            assert bits(found[-50:]) == bits(last), count
        assert bits(found[:50]) == bits(first)

    def test_rows_that_are_no_numbers_spoil_no_other(self, format_, isa):
        some, rows = matrix(format_, 96, 40), activations(50, 96).copy()
        expected = product(isa, rows, [some])
        bad = np.array([0, 15, 16, 33, 49])
        rows[bad, [0, 31, 32, 64, 95]] = [np.nan, np.inf, -np.inf, np.nan, np.nan]
        rows[33] = np.nan
        good = np.setdiff1d(np.arange(50), bad)
        for count in (50, 34, 17, 5, 4, 2):
            found = product(isa, rows[:count], [some])
            some_good, some_bad = good[good < count], bad[bad < count]
            assert bits(found[some_good]) == bits(expected[some_good]), count
            assert not np.isfinite(found[some_bad]).all(axis=1).any(), count

    @pytest.mark.parametrize("outputs", [1, 16, 33, 16 * 7, 16 * 25 + 1])
    def test_neighbouring_panels_and_threads_do_not_matter(self, format_, isa, outputs):
        """Whatever share of the panels a thread takes: single ones, pairs, a pair and a half."""
        rows, every = activations(50, 96)[:21], matrix(format_, 96, 16 * 25 + 1)
        whole = product(isa, rows, [every])
        some = PackedMatrix(every.panels, outputs, 96, every.format)
        for num_threads in (1, 3):
            found = product(isa, rows, [some], num_threads=num_threads)
            assert bits(found) == bits(whole[:, :outputs]), num_threads


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("count", [1, 4, 5, 16, 23])
def test_matrices_of_all_formats_side_by_side_are_what_each_is_alone(isa, count):
    """In one product, with biases for some; each begins in another panel and column."""
    rows = activations(50, 96)[:count]
    shapes = {"int4": 40, "bf16": 16, "int8": 23, "int4_group": 1, "int8_group": 49}
    several = [matrix(name, 96, outputs) for name, outputs in shapes.items()]
    biases = [
        None if number % 2 else np.linspace(-1, 1, each.outputs).astype(np.float32)
        for number, each in enumerate(several)
    ]
    alone = [product(isa, rows, [each], [b]) for each, b in zip(several, biases, strict=True)]
    assert bits(product(isa, rows, several, biases)) == bits(np.concatenate(alone, axis=1))
    assert bits(product(isa, rows, several, biases, num_threads=2)) == bits(
        np.concatenate(alone, axis=1)
    )


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("inputs", [1, 31, 33, 70, 2049])
def test_a_last_group_that_is_not_whole_is_padded_with_zeros(isa, inputs):
    """bfloat16 and int8, which floats of any width become."""
    assert library is not None
    values = np.random.default_rng(0).standard_normal((20, inputs), np.float32)
    rows = activations(50, inputs)[:20]
    for format_, error in (("bf16", 2.0**-7), ("int8", 0.02), ("int8_group", 0.04)):
        panels = np.zeros(2 * library.panel_bytes(format_, inputs), np.uint8)
        getattr(library, f"pack_{format_}")(values.ctypes.data, 0, 20, inputs, panels.ctypes.data)
        found = product(isa, rows, [PackedMatrix(panels, 20, inputs, format_)])  # type: ignore[arg-type]
        expected = rows.astype(np.float64) @ values.T.astype(np.float64)
        norms = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(values, axis=1)
        assert (np.abs(found - expected) <= error * norms).all(), format_


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("format_", FORMATS)
def test_rows_too_small_for_the_inverse_of_a_scale_are_as_good_as_zero(format_, isa):
    """Down to numbers that are not normal any more, in one group of a row or in all."""
    some, rows = matrix(format_, 96, 40), np.zeros((3, 96), np.float32)
    rows[0], rows[1, :32], rows[2] = 3e-45, 1e-40, -1e-36
    found = product(isa, rows, [some])
    assert (np.abs(found) < 1e-25).all(), found


def tape_of(isa: str, rows: int, *operations: Any) -> None:
    """Run operations that need nothing of a step but its rows."""
    assert library is not None
    tape = library.Tape(isa, 0, 1, 16, 1, 16, 4, rows, 2)
    for op in operations:
        tape.add(op)
    tape.run(library.Step([0] * 6, [rows, 0, 0, 0]), 0, len(operations))


def value(array: np.ndarray) -> Any:
    assert library is not None
    return library.Value(array.ctypes.data, array.strides[0] // 4, array.shape[1])


def linear(x: np.ndarray, out: np.ndarray, *matrices: PackedMatrix) -> Any:
    assert library is not None
    op = library.Operation(library.Kind.linear)
    op.x, op.out = value(x), value(out)
    op.matrices = [native_matrix(each) for each in matrices]
    op.set_biases([0] * len(matrices))
    return op


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("count", [1, 3, 21])
def test_an_addend_is_added_to_columns_as_if_afterwards(format_, isa, count):
    """With a bias, and to two matrices side by side, of which one's last panel is not whole."""
    rows = activations(50, 96)[:count].copy()
    some = [matrix(format_, 96, 40), matrix(format_, 96, 33, seed=1)]
    bias = np.linspace(-1, 1, 40).astype(np.float32)
    addend = np.random.default_rng(0).standard_normal((count, 73), np.float32)
    out = np.full((count, 73), np.nan, np.float32)
    op = linear(rows, out, *some)
    op.set_biases([bias.ctypes.data, 0])
    op.y = value(addend)
    tape_of(isa, count, op)
    assert bits(out) == bits(addend + product(isa, rows, some, [bias, None]))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("outputs", [16, 40, 16 * 25])
def test_a_gated_product_is_the_activation_of_its_halves(format_, isa, outputs):
    assert library is not None
    rows = activations(50, 96)[:21].copy()
    pair = [matrix(format_, 96, outputs), matrix(format_, 96, outputs, seed=1)]
    for gate in (0, 1):
        out, expected = (np.full((21, outputs), np.nan, np.float32) for _ in range(2))
        op = linear(rows, out, *pair)
        op.is_gated, op.gate = True, gate
        tape_of(isa, 21, op)
        both = product(isa, rows, pair)
        plain = library.Operation(library.Kind.gated_activation)
        plain.x, plain.y = value(both[:, :outputs]), value(both[:, outputs:])
        plain.out, plain.gate = value(expected), gate
        tape_of(isa, 21, plain)
        assert bits(out) == bits(expected)
