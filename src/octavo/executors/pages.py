"""The keys and values of every sequence, in blocks.

Decides how a block lies in memory and how a number is stored in it. Knows no sequence and no model.
A block is contiguous: (layers, keys and values, kv_heads, block_size, head_dim), so that it can be
copied, exported and imported as a whole.

Keys and values as int8 have a float32 scale for each token and head, which lies in their block.

Invariant: what `read` returns past `count` positions is zero, whatever the block holds there.
"""

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import KVGroup

KVType = Literal["bfloat16", "float32", "int8"]
ELEMENT_BYTES: Mapping[str, int] = {"int8": 1, "bfloat16": 2, "float32": 4}
_SCALE_BYTES = 4
_INT8_TOP = np.float32(127)
# A row that is smaller is zero: the inverse of its scale could be infinite.
_TINY = np.float32(2.0**-100)
Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.int32]


def element_size(kv_dtype: KVType, head_dim: int) -> float:
    """Return the bytes that a key or value takes per dim, its scale included."""
    shared = _SCALE_BYTES / head_dim if kv_dtype == "int8" else 0
    return ELEMENT_BYTES[kv_dtype] + shared


def bytes_per_token(groups: Ordered[KVGroup], kv_dtype: KVType) -> int:
    """Return what a token's keys and values take in blocks of every group."""
    sizes = (group.elements_per_token * element_size(kv_dtype, group.head_dim) for group in groups)
    return round(sum(sizes))


class PageStore:
    """Blocks of one KV group. Memory is taken from the system when a block is first written."""

    def __init__(
        self, group: KVGroup, num_blocks: int, block_size: int, kv_dtype: KVType, label: str
    ) -> None:
        """`label` names everything that must be equal for blocks to be exchanged."""
        shape = (group.layers, 2, group.kv_heads, block_size, group.head_dim)
        self.array = np.zeros(num_blocks, _block_type(shape, kv_dtype))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._kv_dtype = kv_dtype
        self._seal = Seal(f"{label} {shape} {kv_dtype}")

    def write(self, layer: int, blocks: Indices, slots: Indices, k: Floats, v: Floats) -> None:
        """Store row i of k and v, (rows, kv_heads, head_dim), in slot slots[i] of blocks[i]."""
        for which, rows in enumerate((k, v)):
            numbers: NDArray[Any] = rows.astype(np.float32, copy=False)
            if self._kv_dtype == "int8":
                numbers, scales = to_int8(numbers)
                self.array["scales"][blocks, layer, which, :, slots] = scales
            elif self._kv_dtype == "bfloat16":
                numbers = to_bfloat16(numbers)
            self.array["numbers"][blocks, layer, which, :, slots] = numbers

    def read(self, layer: int, blocks: Indices, count: int, size: int) -> tuple[Floats, Floats]:
        """Return keys and values, (kv_heads, size, head_dim) float32; zero from `count` on."""
        pages = self.array["numbers"][blocks, layer]
        kv_heads, head_dim = pages.shape[2], pages.shape[4]
        rows = np.zeros((2, kv_heads, size, head_dim), np.float32)
        gathered = pages.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :count]
        if self._kv_dtype == "bfloat16":
            np.left_shift(gathered, 16, out=rows.view(np.uint32)[:, :, :count], dtype=np.uint32)
        else:
            rows[:, :, :count] = gathered
        if self._kv_dtype == "int8":
            scales = self.array["scales"][blocks, layer].transpose(1, 2, 0, 3)
            rows[:, :, :count] *= scales.reshape(2, kv_heads, -1, 1)[:, :, :count]
        return rows[0], rows[1]

    def copy(self, source: int, destination: int) -> None:
        """Overwrite one block with another."""
        self.array[destination] = self.array[source]

    def export_blocks(self, blocks: Ordered[int]) -> bytes:
        """Return a seal, which tells other layouts and models apart, and the blocks' bytes."""
        return self._seal.close(self.array, blocks)

    def import_blocks(self, blocks: Ordered[int], content: bytes) -> None:
        """Overwrite blocks; raises `ValueError` if the content is not of this kind and number."""
        self._seal.open(self.array, blocks, content)


def _block_type(shape: tuple[int, ...], kv_dtype: KVType) -> np.dtype[np.void]:
    """Return what a block holds: `numbers` of this shape and, of int8, their `scales`."""
    if kv_dtype == "int8":
        return np.dtype([("numbers", np.int8, shape), ("scales", np.float32, shape[:-1])])
    return np.dtype([("numbers", np.uint16 if kv_dtype == "bfloat16" else np.float32, shape)])


class Seal:
    """Bytes that stand before exported blocks, so that only their like takes them in.

    label: names everything that must be equal. A pool is an array whose first axis is blocks.
    """

    def __init__(self, label: str) -> None:
        self._digest = hashlib.sha256(label.encode()).digest()

    def close(self, pool: NDArray[Any], blocks: Ordered[int]) -> bytes:
        """Return the seal and the blocks' bytes."""
        return self._digest + pool[_checked(blocks, len(pool))].tobytes()

    def open(self, pool: NDArray[Any], blocks: Ordered[int], content: bytes) -> None:
        """Overwrite blocks with what `close` returned; raises `ValueError` for anything else."""
        indices = _checked(blocks, len(pool))
        size = len(self._digest)
        if content[:size] != self._digest:
            raise ValueError("these blocks come from another model, executor or KV format")
        expected = size + len(indices) * pool[:1].nbytes
        if len(content) != expected:
            raise ValueError(f"{len(indices)} blocks take {expected} bytes, not {len(content)}")
        pool[indices] = np.frombuffer(content, pool.dtype, offset=size).reshape(-1, *pool.shape[1:])


def _checked(blocks: Ordered[int], num_blocks: int) -> Indices:
    indices = np.asarray(blocks, np.int32).reshape(-1)
    if not ((indices >= 0) & (indices < num_blocks)).all():
        raise ValueError(f"blocks are numbered from 0 to {num_blocks - 1}")
    return indices


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 numbers, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # Rounding could carry a NaN over to infinity or zero.
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def to_int8(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return numbers from -127 to 127 and the scale that each row of the last axis shares.

    A row that is not finite has the scale NaN.
    """
    top = np.abs(values).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(top > _TINY, _INT8_TOP / top, np.float32(0))[..., None]
        whole = np.nan_to_num(np.rint(values * inverse))
        scales = np.where(np.isfinite(top), top / _INT8_TOP, np.float32(np.nan))
    return np.clip(whole, -_INT8_TOP, _INT8_TOP).astype(np.int8), scales
