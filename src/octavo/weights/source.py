"""What a weight file offers: named tensors, as stored bytes and as float32.

This is all that the rest of the engine sees of GGUF and safetensors. It does not know how a file is
laid out, nor how a block of a quantised type is decoded (`quants`).
Invariant: a tensor's stored bytes are its values row by row, each row a whole number of blocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class TensorType(StrEnum):
    """How a tensor's values are stored; the names are GGML's, shared by safetensors."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"

    @property
    def block_elements(self) -> int:
        """How many consecutive values of a row share one block; 1 for plain floats."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Size of one block in bytes, scales included."""
        return _BLOCKS[self][1]


# (values, bytes) of one block; the sums name the parts in the order in which they are stored.
_BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q8_0: (32, 2 + 32),  # scale, values
    TensorType.Q4_0: (32, 2 + 16),
    TensorType.Q4_1: (32, 2 + 2 + 16),  # scale, minimum, values
    TensorType.Q5_0: (32, 2 + 4 + 16),  # scale, fifth bits, low four bits
    TensorType.Q5_1: (32, 2 + 2 + 4 + 16),
    TensorType.Q4_K: (256, 2 + 2 + 12 + 128),  # scale, minimum, eight 6-bit pairs, values
    TensorType.Q5_K: (256, 2 + 2 + 12 + 32 + 128),
    TensorType.Q6_K: (256, 128 + 64 + 16 + 2),  # low four bits, high two bits, scales, scale
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    `shape` is row-major as in PyTorch: a linear layer's weight is (outputs, inputs). `num_bytes` is
    its exact size in the file, without padding.
    """

    name: str
    shape: tuple[int, ...]
    dtype: TensorType
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)


class TensorSource(Protocol):
    """An open weight file, or a set of them; a context manager that closes on exit."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, in the order of the file."""
        ...

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes, (num_bytes,): a read-only view of the mapped file, not aligned.

        Raises ModelFileError if there is no such tensor.
        """
        ...

    def float32(self, name: str) -> NDArray[np.float32]:
        """Return the values in the tensor's shape: a new C-contiguous array of the caller's own.

        Raises ModelFileError if there is no such tensor.
        """
        ...

    def release(self, name: str) -> None:
        """Give back the memory that a tensor's bytes take; views read them from the file again."""
        ...

    def close(self) -> None:
        """Let go of the file; views that were handed out stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
