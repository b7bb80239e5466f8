"""Packed weights are the stored ones, as exactly as their layout can hold them."""

import gguf
import numpy as np
import pytest

from octavo.executors.packing import PackedMatrix, format_of, packed_bytes
from octavo.native import library
from octavo.weights.source import TensorType
from tests.executors.native import SCALES, needs_library, packed, stored, unpacked

pytestmark = needs_library

FLOATS = ("F32", "F16", "BF16")
FOURS = ("Q4_0", "Q4_1", "Q4_K")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
HALF = 2.0**-11  # the largest relative error of rounding to half precision


def exactly(dtype: str, rows: np.ndarray) -> np.ndarray:
    """What the gguf package makes of stored rows."""
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[dtype]).astype(np.float32)


def bound(dtype: str, values: np.ndarray) -> np.ndarray:
    """How far each packed weight may be from the stored one, from the formats alone."""
    size = np.abs(values)
    match dtype:
        case "Q4_0" | "Q4_1":
            return 4 * np.spacing(size)  # exact, but for the float32 product and sum
        case "Q8_0":
            # A group whose largest value is +-127 keeps its scale; others get a finer one.
            return half_a_step(values)
        case "F32" | "F16" | "BF16":
            return size * 2.0**-8
        case "Q4_K":
            # Scale and minimum are rounded once each; |scale * 15| and |minimum| bound both.
            groups = np.abs(values).reshape(len(values), -1, 32).max(axis=2)
            return np.repeat(groups, 32, axis=1) * 3 * HALF
        case _:
            return half_a_step(values)


def half_a_step(values: np.ndarray) -> np.ndarray:
    """int8: half of the scale, largest / 127 rounded to a half; the largest may be cut by that."""
    largest = np.abs(values).reshape(len(values), -1, 32).max(axis=2)
    return np.repeat(largest * (0.5 / 127 + HALF), 32, axis=1)


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 37, 530])
@pytest.mark.parametrize("dtype", [kind.value for kind in TensorType])
def test_packed_weights_are_the_stored_ones(dtype, outputs):
    rows = stored(dtype, (outputs, 512 if dtype in K_TYPES else 96))
    expected = exactly(dtype, rows)
    matrix = packed(dtype, rows)
    assert (matrix.outputs, matrix.inputs) == expected.shape
    error = np.abs(unpacked(matrix) - expected)
    assert (error <= bound(dtype, expected)).all(), (error / bound(dtype, expected)).max()


@pytest.mark.parametrize("outputs", [1, 16, 37, 530])
@pytest.mark.parametrize("dtype", [*FOURS, "Q5_0", "Q6_K", "Q8_0"])
def test_one_scale_per_output_rounds_to_its_steps(dtype, outputs):
    rows = stored(dtype, (outputs, 512 if dtype in K_TYPES else 96))
    expected = exactly(dtype, rows)
    error = np.abs(unpacked(packed(dtype, rows, "channel")) - expected)
    step = code_steps(expected) if dtype in FOURS else np.abs(expected).max(axis=1) / 127
    # A code: rounded, its multiplier too (a 256th of a step for each of 15), and its offset.
    bound = step * (0.5 + 15 / 256 + 1 / 512 if dtype in FOURS else 0.5)
    assert (error <= bound[:, None] * 1.001).all(), (error / bound[:, None]).max()


def code_steps(values: np.ndarray) -> np.ndarray:
    """The step in which each output tells its codes, from the widest and the most distant group."""
    groups = values.reshape(len(values), -1, 32)
    # What a group could hold at most: some of its codes may not occur.
    widest = 2 * np.abs(groups).max(axis=(1, 2))
    return widest * (128 / 2047 / 15) * 2


def test_a_negative_scale_is_told_by_turning_the_codes_round():
    rows = stored("Q4_0", (16, 64)).copy()
    scales = rows.reshape(16, 2, 18)[:, :, :2].copy().view(np.float16)
    assert (scales < 0).any()
    assert (scales > 0).any()
    expected = exactly("Q4_0", rows)
    found = unpacked(packed("Q4_0", rows, "channel"))
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("minimum", [0.5, 0.0, -0.5, -8.0, -40.0])
def test_codes_far_from_zero_take_a_wider_step(minimum):
    """All weights of a group positive, or all far below zero."""
    rows = stored("Q4_1", (16, 64)).copy()
    rows.reshape(16, 2, 20)[:, 0, 2:4] = np.array([minimum], np.float16).view(np.uint8)
    expected = exactly("Q4_1", rows)
    error = np.abs(unpacked(packed("Q4_1", rows, "channel")) - expected).max()
    assert error <= max(code_steps(expected).max(), abs(minimum) / 7)


@pytest.mark.parametrize("inputs", [1, 31, 33, 70])
def test_an_output_of_int8_may_have_any_number_of_inputs(inputs):
    values = np.random.default_rng(0).standard_normal((5, inputs), np.float32)
    values[2] = 0
    panels = np.zeros(library.panel_bytes("int8", inputs), np.uint8)
    library.pack_int8(values.ctypes.data, 0, 5, inputs, panels.ctypes.data)
    found = unpacked(PackedMatrix(panels, 5, inputs, "int8"))
    assert (np.abs(found - values) <= np.abs(values).max(axis=1)[:, None] * 0.501 / 127).all()


@pytest.mark.parametrize("dtype", ["BF16", "Q4_0", "Q8_0"])
def test_what_fits_its_layout_is_packed_exactly(dtype):
    """A quantiser of gguf makes the largest of a group +-127 steps, or -8."""
    rows = stored(dtype, (40, 64))
    assert np.array_equal(unpacked(packed(dtype, rows)), exactly(dtype, rows))


@pytest.mark.parametrize("inputs", [1, 2, 15, 31, 33, 63, 65, 100])
def test_floats_of_any_width_are_packed(inputs):
    rows = stored("F32", (20, inputs))
    expected = exactly("F32", rows)
    assert (np.abs(unpacked(packed("F32", rows)) - expected) <= bound("F32", expected)).all()


@pytest.mark.parametrize("inputs", [1, 31, 33, 70])
def test_the_last_group_of_int8_may_be_short(inputs):
    values = np.random.default_rng(0).standard_normal((5, inputs), np.float32)
    panels = np.zeros(library.panel_bytes("int8_group", inputs), np.uint8)
    library.pack_int8_group(values.ctypes.data, 0, 5, inputs, panels.ctypes.data)
    found = unpacked(PackedMatrix(panels, 5, inputs, "int8_group"))
    assert (np.abs(found - values) <= np.abs(values).max() * (0.5 / 127 + HALF)).all()


@pytest.mark.parametrize("dtype", [kind.value for kind in TensorType])
@pytest.mark.parametrize("outputs", [1, 16, 33])
@pytest.mark.parametrize("scales", SCALES)
def test_size_is_known_before_packing(dtype, outputs, scales):
    rows = stored(dtype, (outputs, 256))
    matrix = packed(dtype, rows, scales)
    assert matrix.panels.size == packed_bytes((outputs, 256), format_of(dtype, scales))
    assert matrix.format == format_of(dtype, scales)
    assert matrix.bytes_per_weight == matrix.panels.size / (outputs * 256)


def test_bytes_per_weight_of_whole_panels():
    sizes = {
        (dtype, scales): packed_bytes((64, 256), format_of(dtype, scales)) / (64 * 256)
        for dtype in ("F32", "Q8_0", "Q4_0")
        for scales in SCALES
    }
    per_output = 4 / 256
    assert sizes == {
        ("F32", "group"): 2.0,
        ("F32", "channel"): 2.0,
        ("Q8_0", "group"): 1.0625,
        ("Q8_0", "channel"): 1 + per_output,
        ("Q4_0", "group"): 0.625,
        ("Q4_0", "channel"): 0.625 + per_output,
    }


def test_zeros_stay_zeros_and_tiny_groups_do_not_blow_up():
    values = np.zeros((16, 64), np.float32)
    values[0, 32:] = 1e-9  # below the smallest half: its scale is zero
    values[1, 32:] = 1e-5
    panels = np.zeros(library.panel_bytes("int8_group", 64), np.uint8)
    library.pack_int8_group(values.ctypes.data, 0, 16, 64, panels.ctypes.data)
    found = unpacked(PackedMatrix(panels, 16, 64, "int8_group"))
    assert not found[:, :32].any()
    assert np.abs(found - values).max() <= 1e-5


def test_an_unknown_format_or_instruction_set_is_a_value_error():
    with pytest.raises(ValueError, match="no weight format int3"):
        library.panel_bytes("int3", 64)
    with pytest.raises(ValueError, match="no instruction set sse9"):
        library.Tape("sse9", 0, 1, 16, 1, 16, 4, 1, 1)
