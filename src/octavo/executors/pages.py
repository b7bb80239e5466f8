"""The keys and values of every sequence, in blocks.

Decides how a block lies in memory and how a number is stored in it. Knows no sequence and no model.
A block is contiguous: (layers, keys and values, kv_heads, block_size, head_dim), so that it can be
copied, exported and imported as a whole.

Invariant: what `read` returns past `count` positions is zero, whatever the block holds there.
"""

import hashlib
from collections.abc import Sequence as Ordered
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import KVGroup

KVType = Literal["bfloat16", "float32"]
Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.int32]


class PageStore:
    """Blocks of one KV group. Memory is taken from the system when a block is first written."""

    def __init__(
        self, group: KVGroup, num_blocks: int, block_size: int, kv_dtype: KVType, label: str
    ) -> None:
        """`label` names everything that must be equal for blocks to be exchanged."""
        shape = (num_blocks, group.layers, 2, group.kv_heads, block_size, group.head_dim)
        self.array = np.zeros(shape, np.uint16 if kv_dtype == "bfloat16" else np.float32)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._narrow = kv_dtype == "bfloat16"
        self._seal = Seal(f"{label} {shape[1:]} {kv_dtype}")

    def write(self, layer: int, blocks: Indices, slots: Indices, k: Floats, v: Floats) -> None:
        """Store row i of k and v, (rows, kv_heads, head_dim), in slot slots[i] of blocks[i]."""
        self.array[blocks, layer, 0, :, slots] = self._stored(k)
        self.array[blocks, layer, 1, :, slots] = self._stored(v)

    def read(self, layer: int, blocks: Indices, count: int, size: int) -> tuple[Floats, Floats]:
        """Return keys and values, (kv_heads, size, head_dim) float32; zero from `count` on."""
        pages = self.array[blocks, layer]
        kv_heads, head_dim = pages.shape[2], pages.shape[4]
        rows = np.zeros((2, kv_heads, size, head_dim), np.float32)
        gathered = pages.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :count]
        if self._narrow:
            np.left_shift(gathered, 16, out=rows.view(np.uint32)[:, :, :count], dtype=np.uint32)
        else:
            rows[:, :, :count] = gathered
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

    def _stored(self, values: Floats) -> NDArray[Any]:
        values = values.astype(np.float32, copy=False)
        return to_bfloat16(values) if self._narrow else values


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
