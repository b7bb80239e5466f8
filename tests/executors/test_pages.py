import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from octavo.executors.pages import PageStore, bytes_per_token, to_bfloat16
from octavo.program.program import KVGroup

GROUP = KVGroup(layers=2, kv_heads=3, head_dim=4)


def store(kv_dtype="float32", block_size=8, label="a"):
    return PageStore(GROUP, 10, block_size, kv_dtype, label)


def widened(number: float) -> float:
    bits = to_bfloat16(np.array([number], np.float32)).astype(np.uint32) << 16
    return float(bits.view(np.float32)[0])


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_is_the_nearest_number_of_eight_digits(number):
    if abs(number) < 1e-37 or abs(number) > 3e38:
        return
    mantissa, exponent = math.frexp(number)
    nearest = math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8)  # round() ties to even
    assert widened(number) == nearest


@pytest.mark.parametrize(
    ("bits", "expected"), [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0xBF818000, 0xBF82)]
)
def test_bfloat16_rounds_ties_to_even(bits, expected):
    assert to_bfloat16(np.array([bits], np.uint32).view(np.float32))[0] == expected


@pytest.mark.parametrize("number", [0.0, -0.0, math.inf, -math.inf, 1.0, -2.5])
def test_bfloat16_keeps_what_it_can_hold(number):
    assert math.copysign(1, widened(number)) == math.copysign(1, number)
    assert widened(number) == number


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_bfloat16_keeps_every_nan(bits):
    assert math.isnan(widened(float(np.array([bits], np.uint32).view(np.float32)[0])))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_and_the_rest_is_zero(kv_dtype):
    pages = store(kv_dtype)
    pages.array["numbers"] = np.nan if kv_dtype == "float32" else 0x7FC0
    k = np.arange(11 * 12, dtype=np.float32).reshape(11, 3, 4)
    positions = np.arange(11)
    pages.write(1, np.array([4, 7])[positions // 8], positions % 8, k, -k)
    keys, values = pages.read(1, np.array([4, 7]), 11, 32)
    np.testing.assert_array_equal(keys[:, :11], k.swapaxes(0, 1))
    np.testing.assert_array_equal(values, -keys)
    assert keys.shape == (3, 32, 4)
    assert not keys[:, 11:].any()


def test_layers_are_apart():
    pages = store()
    pages.write(0, np.array([2]), np.array([0]), np.ones((1, 3, 4)), np.ones((1, 3, 4)))
    assert not pages.read(1, np.array([2]), 8, 8)[0].any()


def test_imported_blocks_are_the_exported_ones():
    source, target = store(), store()
    numbers = source.array["numbers"]
    numbers[...] = np.random.default_rng(0).standard_normal(numbers.shape)
    target.import_blocks([8, 0], source.export_blocks([3, 5]))
    np.testing.assert_array_equal(target.array[[8, 0]], source.array[[3, 5]])
    assert not target.array["numbers"][1:8].any()


@given(arrays(np.float32, (3, 3, 4), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_int8_is_off_by_half_a_step_of_its_token_and_head_at_most(k):
    pages = store("int8")
    pages.array["scales"] = np.nan
    pages.write(1, np.array([4, 4, 4]), np.arange(3), k, 2 * k)
    keys, values = pages.read(1, np.array([4]), 3, 8)
    step = np.abs(k).max(axis=-1, keepdims=True).swapaxes(0, 1) / 127
    assert (np.abs(keys[:, :3] - k.swapaxes(0, 1)) <= 0.5001 * step + 2.0**-100).all()
    assert (np.abs(values[:, :3] - 2 * k.swapaxes(0, 1)) <= 1.0002 * step + 2.0**-100).all()
    assert not keys[:, 3:].any()


def test_int8_blocks_go_elsewhere_with_their_scales():
    source, target = store("int8"), store("int8")
    k = np.random.default_rng(0).standard_normal((8, 3, 4)).astype(np.float32)
    source.write(0, np.full(8, 3), np.arange(8), k, -k)
    target.import_blocks([6], source.export_blocks([3]))
    target.copy(6, 2)
    expected = source.read(0, np.array([3]), 8, 8)
    np.testing.assert_array_equal(target.read(0, np.array([2]), 8, 8), expected)
    assert len(source.export_blocks([3])) == 32 + 8 * bytes_per_token([GROUP], "int8")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_of_what_is_not_finite_is_nan_in_its_own_token_and_head_alone(bad):
    pages = store("int8")
    k = np.ones((2, 3, 4), np.float32)
    k[1, 2, 0] = bad
    pages.write(0, np.array([1, 1]), np.array([0, 1]), k, k)
    keys, _ = pages.read(0, np.array([1]), 2, 8)
    assert np.isnan(keys[2, 1]).all()
    keys[2, 1] = 1
    np.testing.assert_allclose(keys[:, :2], 1)


@pytest.mark.parametrize(
    ("kv_dtype", "expected"), [("float32", 192), ("bfloat16", 96), ("int8", 96)]
)
def test_a_token_takes_its_numbers_and_scales(kv_dtype, expected):
    """48 numbers; with heads of 4 the 12 scales take as much as int8 saves."""
    assert bytes_per_token([GROUP], kv_dtype) == expected
    wide = KVGroup(layers=2, kv_heads=3, head_dim=64)
    assert bytes_per_token([wide], "int8") / bytes_per_token([wide], "bfloat16") == (64 + 4) / 128


@pytest.mark.parametrize(
    "other",
    [store("bfloat16"), store(block_size=4), store(label="b")],
    ids=["format", "block size", "label"],
)
def test_content_of_another_kind_is_refused(other):
    with pytest.raises(ValueError, match="come from another model"):
        other.import_blocks([1], store().export_blocks([1]))


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c + b"\0", lambda c: c + c[32:]])
def test_content_of_another_number_of_blocks_is_refused(change):
    pages = store()
    content = change(pages.export_blocks([1, 2]))
    with pytest.raises(ValueError, match="2 blocks take"):
        pages.import_blocks([1, 2], content)


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 5000])
def test_content_without_the_seal_is_refused(content):
    with pytest.raises(ValueError, match="come from another model"):
        store().import_blocks([1], content)


@pytest.mark.parametrize("blocks", [[10], [-1], [0, 99]])
def test_blocks_beyond_the_pool_are_refused(blocks):
    with pytest.raises(ValueError, match="numbered from 0 to 9"):
        store().export_blocks(blocks)
    with pytest.raises(ValueError, match="numbered from 0 to 9"):
        store().import_blocks(blocks, b"")
