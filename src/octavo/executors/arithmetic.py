"""Operators in NumPy whose every output row has the same bits, whatever rows are beside it.

Decides the order of every sum: products on tiles of exactly 16 rows, attention in segments of 256
positions. Knows no pages and no program. A caller pads rows to whole tiles and keeps BLAS on one
thread.

BLAS gets a tile as the 16 columns of its right operand: OpenBLAS then computes them all alike on
every x86 core, which it does not for rows, nor for 32 (AVX2 kernels take 12 at a time).

Invariant: an operator's shape along the rows never reaches BLAS or a reduction.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Int32 = NDArray[np.int32]

TILE = 16
SEGMENT = 256


def padded(num_rows: int) -> int:
    """Return `num_rows` rounded up to whole tiles."""
    return -(-num_rows // TILE) * TILE


def linear(x: Floats, weight: Floats, out: Floats) -> None:
    """out = x W^T for x (rows, in), W (out, in): one BLAS call of one shape per tile of rows."""
    rows, width = out.shape
    columns = np.matmul(weight, x.reshape(rows // TILE, TILE, -1).swapaxes(1, 2))
    out.reshape(rows // TILE, TILE, width)[...] = columns.swapaxes(1, 2)  # written to a view


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Normalise the last axis by its root mean square."""
    square = np.add.reduce(x * x, axis=-1, keepdims=True)
    size = x.dtype.type(x.shape[-1])
    return x * (1 / np.sqrt(square / size + x.dtype.type(eps))) * weight


def turns(positions: Int32, frequencies: tuple[float, ...], dtype: Any) -> tuple[Floats, Floats]:
    """Return cosines and sines, (rows, 1, pairs); float64 keeps far angles exact."""
    angles = positions[:, None, None] * np.array(frequencies)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rope(x: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Turn the halves of each head of x, (rows, heads, head_dim), against each other."""
    first, second = np.split(x, 2, axis=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return np.concatenate(turned, axis=-1)


def silu(x: Floats) -> Floats:
    """x / (1 + exp(-x))."""
    activated: Floats = x / (1 + np.exp(-x))
    return activated


def gelu_tanh(x: Floats) -> Floats:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    root = x.dtype.type(math.sqrt(2 / math.pi))
    inner = root * (x + x.dtype.type(0.044715) * (x * x * x))
    activated: Floats = x.dtype.type(0.5) * x * (1 + np.tanh(inner))
    return activated


def attention(
    q: Floats,
    first_position: int,
    read: Callable[[int], tuple[Floats, Floats]],
    *,
    kv_heads: int,
    scale: float,
    window: int | None,
) -> Floats:
    """Attend with one chunk's queries, (rows, heads, head_dim), at consecutive positions.

    read: from the first position of a segment to its keys and values, (kv_heads, SEGMENT,
    head_dim). Every segment starts from fresh softmax state and is merged left to right (Dao 2023,
    arXiv 2307.08691). A segment that a row does not see leaves its state bit for bit as it was, so
    those that a whole tile does not see are skipped.
    """
    rows, heads, head_dim = q.shape
    group = heads // kv_heads
    queries = _columns(q * q.dtype.type(scale), kv_heads)
    num_tiles = queries.shape[1]
    row_of_query = np.arange(num_tiles * TILE).reshape(num_tiles, 1, TILE) // group
    positions = first_position + np.minimum(row_of_query, rows - 1)
    top = np.full((kv_heads, num_tiles, 1, TILE), -np.inf, q.dtype)
    total = np.zeros_like(top)
    mixed = np.zeros(queries.shape, q.dtype)
    oldest = 0 if window is None else max(0, first_position - window + 1)
    for start in range(oldest // SEGMENT * SEGMENT, first_position + rows, SEGMENT):
        live = _live_tiles(positions, start, window)
        keys, values = read(start)
        scores = np.matmul(keys[:, None], queries[:, live])
        _mask(scores, positions[live], start, window)
        part = _softmax_part(scores, values)
        _merge(top[:, live], total[:, live], mixed[:, live], *part)
    out = (mixed / total).swapaxes(2, 3).reshape(kv_heads, -1, head_dim)[:, : rows * group]
    return out.reshape(kv_heads, rows, group, head_dim).swapaxes(0, 1).reshape(q.shape)


def _columns(q: Floats, kv_heads: int) -> Floats:
    """Return (kv_heads, tiles, head_dim, TILE): queries of the heads that share keys, padded."""
    rows, heads, head_dim = q.shape
    group = heads // kv_heads
    out = np.zeros((kv_heads, padded(rows * group), head_dim), q.dtype)
    shared = q.reshape(rows, kv_heads, group, head_dim).swapaxes(0, 1)
    out[:, : rows * group] = shared.reshape(kv_heads, rows * group, head_dim)
    return out.reshape(kv_heads, -1, TILE, head_dim).swapaxes(2, 3)


def _live_tiles(positions: NDArray[Any], start: int, window: int | None) -> slice:
    """Return the tiles of which some query sees a position of the segment at `start`."""
    lows, highs = positions[:, 0, 0], positions[:, 0, -1]
    first = int(np.searchsorted(highs, start))
    if window is None:
        return slice(first, len(lows))
    return slice(first, int(np.searchsorted(lows, start + SEGMENT + window - 1)))


def _mask(scores: Floats, positions: NDArray[Any], start: int, window: int | None) -> None:
    """Set scores to -inf except where a query at p sees a key: in (p - window, p]."""
    low, high = positions[0, 0, 0], positions[-1, 0, -1]
    if low >= start + SEGMENT - 1 and (window is None or high - window < start):
        return
    keys = np.arange(start, start + SEGMENT)[:, None]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    np.copyto(scores, -np.inf, where=hidden)


def _softmax_part(scores: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return maximum, sum and mixed values of one segment; a query that sees nothing has sum 0."""
    top = scores.max(axis=-2, keepdims=True)
    scores -= np.where(np.isneginf(top), 0, top)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=-2, keepdims=True)
    return top, total, np.matmul(values[:, None].swapaxes(2, 3), scores)


def _merge(
    top: Floats, total: Floats, mixed: Floats, new_top: Floats, new_total: Floats, new_mixed: Floats
) -> None:
    """Merge a segment into the state, in place."""
    highest = np.maximum(top, new_top)
    reference = np.where(np.isneginf(highest), 0, highest)
    kept, added = np.exp(top - reference), np.exp(new_top - reference)
    top[...] = highest
    total *= kept
    total += new_total * added
    mixed *= kept
    mixed += new_mixed * added
