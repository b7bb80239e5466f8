import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from octavo.executors import arithmetic
from octavo.executors.arithmetic import SEGMENT, TILE

SHAPES = [(1, 2), (1, 40), (7, 3), (31, 33), (64, 300), (100, 17), (255, 2), (576, 96), (640, 257)]


@pytest.fixture(autouse=True)
def _one_thread():
    with threadpool_limits(1, user_api="blas"):
        yield


def product(x, weight):
    out = np.empty((len(x), len(weight)), x.dtype)
    arithmetic.linear(x, weight, out)
    return out


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_of_a_row_has_the_same_bits_wherever_it_is(shape, dtype, order):
    rng = np.random.default_rng(0)
    width, out_width = shape
    weight = np.asarray(rng.standard_normal((out_width, width)), dtype, order=order)
    row = rng.standard_normal(width).astype(dtype)
    results = set()
    for filling in (np.zeros, lambda s: rng.standard_normal(s) * 1e3, lambda s: np.full(s, np.nan)):
        for place in range(3 * TILE):
            if place % 5 == 0 or place < TILE:
                x = filling((3 * TILE, width)).astype(dtype)
                x[place] = row
                results.add(product(x, weight)[place].tobytes())
    assert len(results) == 1


def test_product_into_columns_of_a_wider_array_has_the_same_bits():
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((TILE, 64)), rng.standard_normal((48, 64))
    wide = np.zeros((TILE, 100))
    arithmetic.linear(x, weight, wide[:, 13:61])
    assert wide[:, 13:61].tobytes() == product(x, weight).tobytes()
    assert not wide[:, :13].any()
    assert not wide[:, 61:].any()


@pytest.mark.parametrize("window", [None, 1, 5, 256, 300])
@pytest.mark.parametrize(("first", "rows"), [(0, 1), (0, 40), (255, 3), (700, 1), (500, 260)])
def test_attention_is_the_softmax_of_what_a_row_sees(first, rows, window):
    heads, kv_heads, head_dim, context = 6, 2, 8, first + rows
    rng = np.random.default_rng(first + rows)
    q = rng.standard_normal((rows, heads, head_dim))
    padded = -(-context // SEGMENT) * SEGMENT
    k, v = rng.standard_normal((2, kv_heads, padded, head_dim))
    out = arithmetic.attention(
        q,
        first,
        lambda start: (k[:, start : start + SEGMENT], v[:, start : start + SEGMENT]),
        kv_heads=kv_heads,
        scale=0.3,
        window=window,
    )
    for row in range(rows):
        position = first + row
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        for head in range(heads):
            scores = k[head // 3, seen] @ q[row, head] * 0.3
            shares = np.exp(scores - scores.max())
            expected = shares @ v[head // 3, seen] / shares.sum()
            np.testing.assert_allclose(out[row, head], expected, rtol=1e-12, atol=1e-12)


def test_segments_before_every_window_are_not_read():
    starts = []

    def read(start):
        starts.append(start)
        return np.ones((1, SEGMENT, 4)), np.ones((1, SEGMENT, 4))

    q = np.ones((2, 1, 4))
    arithmetic.attention(q, 1000, read, kv_heads=1, scale=1.0, window=300)
    assert starts == [512, 768]  # positions 701 to 1001


def test_rope_turns_by_the_angle():
    frequencies = (1.0, 0.01)
    cosines, sines = arithmetic.turns(np.array([0, 3]), frequencies, np.float64)
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]] * 2)
    turned = arithmetic.rope(x, cosines, sines)
    np.testing.assert_array_equal(turned[0], x[0])
    pairs = (x[1, 0, :2] + 1j * x[1, 0, 2:]) * np.exp(1j * 3 * np.array(frequencies))
    np.testing.assert_allclose(turned[1, 0], np.concatenate([pairs.real, pairs.imag]), rtol=1e-12)


def test_far_positions_turn_by_the_exact_angle():
    frequency = float(np.float32(0.7))
    cosines, _ = arithmetic.turns(np.array([10**6]), (frequency,), np.float32)
    assert cosines[0, 0, 0] == np.float32(np.cos(10**6 * frequency))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_silu_of_a_large_negative_number_is_zero():
    assert arithmetic.silu(np.array([-1e4], np.float32))[0] == 0
    assert arithmetic.silu(np.array([1e4], np.float32))[0] == 1e4
