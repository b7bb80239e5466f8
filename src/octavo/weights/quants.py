"""Decodes stored tensor bytes to float32.

Decides how many blocks are decoded at a time, so that temporaries stay within a few megabytes; the
arithmetic of the quantised types is the `gguf` package's. It does not know files, names or shapes.
Invariant: a value depends on the bytes of its own block alone, not on how they were sliced.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.source import TensorType

# 512 KiB of float32: long enough to hide NumPy's cost per call, short enough to stay in the cache.
SLICE_ELEMENTS = 1 << 17


def dequantize(stored: NDArray[np.uint8], dtype: TensorType) -> NDArray[np.float32]:
    """Return the values of `stored`, a flat array of whole blocks, as a new flat array.

    Any bytes decode to something: a damaged scale gives infinities or NaN, never an error.
    """
    num_blocks = stored.size // dtype.block_bytes
    blocks = stored.reshape(num_blocks, dtype.block_bytes)
    values = np.empty((num_blocks, dtype.block_elements), np.float32)
    decode = _decoder(dtype)
    step = SLICE_ELEMENTS // dtype.block_elements
    with np.errstate(all="ignore"):
        for begin in range(0, num_blocks, step):
            part = slice(begin, begin + step)
            values[part] = decode(blocks[part])
    return values.reshape(-1)


def _decoder(dtype: TensorType) -> Callable[[NDArray[np.uint8]], NDArray[Any]]:
    """Return the function from (blocks, bytes) to the (blocks, values) that they store."""
    match dtype:
        case TensorType.F32:
            return lambda blocks: blocks.view("<f4")
        case TensorType.F16:
            return lambda blocks: blocks.view("<f2")
        case TensorType.BF16:
            return _widen_bfloat16
    # Imported here because it takes a tenth of a second, and only quantised types need it.
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_rows

    quantization = GGMLQuantizationType[dtype]

    def decode(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        # As one long row, because the package would otherwise cut the slice into 16 rows at a time.
        values: NDArray[np.float32] = dequantize_rows(blocks.reshape(1, -1), quantization)
        return values.reshape(-1, dtype.block_elements)

    return decode


def _widen_bfloat16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A bfloat16 is the upper half of the float32 of the same value."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
