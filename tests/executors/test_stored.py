"""The native library reads stored rows bit for bit as NumPy does, whatever bytes a file holds."""

import numpy as np
import pytest

from octavo.executors.packing import Bytes, Packer, pack
from octavo.native import library
from octavo.weights.quants import dequantize
from octavo.weights.source import TensorType
from tests.executors.native import needs_library, packed, stored, unpacked

pytestmark = needs_library

TYPES = [kind.value for kind in TensorType]
HALVES = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q8_0": 1, "Q4_K": 2, "Q5_K": 2}


def any_bytes(dtype: str, num_blocks: int = 400) -> Bytes:
    """Blocks of random bytes: scales are of any size, infinite, or no numbers."""
    kind = TensorType(dtype)
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, num_blocks * kind.block_bytes, np.uint8)


def read(dtype: str, flat: Bytes) -> np.ndarray:
    """What the native library makes of them, from an address that nothing is aligned to."""
    kind = TensorType(dtype)
    moved = np.empty(flat.size + 1, np.uint8)
    moved[1:] = flat
    out = np.empty(flat.size // kind.block_bytes * kind.block_elements, np.float32)
    library.read_stored(dtype, moved.ctypes.data + 1, out.size, out.ctypes.data)
    return out


@pytest.mark.parametrize("dtype", TYPES)
def test_any_bytes_become_the_floats_that_numpy_makes_of_them(dtype):
    flat = any_bytes(dtype)
    expected, found = dequantize(flat, TensorType(dtype)), read(dtype, flat)
    # No number is told from another by sign and payload only in F32, where nothing is computed.
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert found[numbers].tobytes() == expected[numbers].tobytes()
    assert numbers.sum() > 100


@pytest.mark.parametrize("dtype", [t for t in TYPES if t in HALVES])
def test_every_half_is_read_as_the_number_it_is(dtype):
    """All 65,536 scales, infinities and NaN included."""
    kind = TensorType(dtype)
    blocks = np.full((1 << 16, kind.block_bytes), 0x35, np.uint8)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    for number in range(HALVES[dtype]):
        blocks[:, 2 * number : 2 * number + 2] = halves
    expected = dequantize(blocks.reshape(-1), kind)
    np.testing.assert_array_equal(read(dtype, blocks.reshape(-1)), expected)


# --- 4-bit types, taken apart into (nibbles, scales, minima) of groups of 32 ----------------------


def split_nibbles(values: Bytes) -> Bytes:
    """(…, 16) bytes to (…, 32): the low nibbles are the first half of a group."""
    return np.concatenate([values & 15, values >> 4], axis=-1)


def split_q4_0(rows: Bytes) -> tuple[np.ndarray, ...]:
    blocks = rows.reshape(len(rows), -1, 18)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    minima = (scales.astype(np.float32) * -8).astype(np.float16)
    return split_nibbles(blocks[..., 2:]), scales, minima


def split_q4_1(rows: Bytes) -> tuple[np.ndarray, ...]:
    blocks = rows.reshape(len(rows), -1, 20)
    pair = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    return split_nibbles(blocks[..., 4:]), pair[..., 0], pair[..., 1]


def split_q4_k(rows: Bytes) -> tuple[np.ndarray, ...]:
    """The products of a block's halves and its 6-bit scales and minima are rounded to halves."""
    blocks = rows.reshape(len(rows), -1, 144)
    pair = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    values = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    nibbles = np.stack([values & 15, values >> 4], axis=-2)
    return (
        nibbles.reshape(len(rows), -1, 32),
        (pair[..., :1] * scales).astype(np.float16).reshape(len(rows), -1),
        (-pair[..., 1:] * minima).astype(np.float16).reshape(len(rows), -1),
    )


SPLITTERS = {"Q4_0": split_q4_0, "Q4_1": split_q4_1, "Q4_K": split_q4_k}


@pytest.mark.parametrize("dtype", SPLITTERS)
@pytest.mark.parametrize("chosen", ["int4", "int4_group"])
@pytest.mark.parametrize("outputs", [1, 16, 37])
def test_codes_are_packed_as_the_file_has_them(dtype, chosen, outputs):
    rows = stored(dtype, (outputs, 512))
    found = pack(library, 512, dtype, rows, chosen)
    parts = [np.ascontiguousarray(part) for part in SPLITTERS[dtype](rows)]
    expected = np.zeros_like(found.panels)
    addresses = [part.ctypes.data for part in parts]
    getattr(library, f"pack_{chosen}")(*addresses, 0, outputs, 512, expected.ctypes.data)
    assert found.panels.tobytes() == expected.tobytes()


def test_nibbles_of_a_group_lie_where_the_layout_says():
    """Row i of a block holds the inputs 8i to 8i+3 of 16 outputs low, the next four high."""
    rows = stored("Q4_1", (16, 32))
    nibbles, scales, minima = split_q4_1(rows)
    panel = pack(library, 32, "Q4_1", rows, "int4_group").panels
    values = panel[:256].reshape(4, 16, 4)
    for row in range(4):
        quarter = nibbles[:, 0, 8 * row : 8 * row + 8]
        assert np.array_equal(values[row] & 15, quarter[:, :4])
        assert np.array_equal(values[row] >> 4, quarter[:, 4:])
    assert np.array_equal(panel[256:288].view(np.float16), scales[:, 0])
    assert np.array_equal(panel[288:].view(np.float16), minima[:, 0])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["Q4_1", "Q6_K", "BF16"])
def test_threads_and_slices_pack_the_same_bytes(dtype, threads):
    rows = stored(dtype, (1100, 1024))  # three slices
    expected = packed(dtype, rows)
    with Packer(library, threads) as packer:
        done = []
        found = packer.add(1024, dtype, rows, expected.format, done.append)
    assert done == [found]
    assert found.panels.tobytes() == expected.panels.tobytes()
    assert np.isfinite(unpacked(found)).all()


def test_what_breaks_while_it_is_packed_is_raised_at_the_end():
    rows = stored("BF16", (16, 64))
    done = []
    with (
        pytest.raises(ValueError, match="no stored type Q1_0"),
        Packer(library, 1) as packer,
    ):
        packer.add(64, "Q1_0", rows, "bf16", done.append)
    assert done == []


def test_an_error_of_the_caller_ends_the_threads_and_is_told_itself():
    rows = stored("BF16", (16, 64))
    packer = Packer(library, 1)
    with pytest.raises(KeyError, match="mine"), packer:
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="shutdown"):
        packer.add(64, "BF16", rows, "bf16", print)
