"""What a family needs of a weight file. Any object of this shape will do; no format is known."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


class Shaped(Protocol):
    """One tensor's description; a matrix is (outputs, inputs)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major shape."""
        ...

    @property
    def dtype(self) -> str:
        """How the numbers are stored, by GGUF's names."""
        ...


class TensorSource(Protocol):
    """Named tensors."""

    @property
    def tensors(self) -> Mapping[str, Shaped]:
        """Every tensor by its name in the file."""
        ...

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's stored bytes, flat."""
        ...

    def float32(self, name: str) -> Float32:
        """Return a tensor's values in its shape."""
        ...

    def release(self, name: str) -> None:
        """Give back the memory of a tensor's stored bytes."""
        ...
