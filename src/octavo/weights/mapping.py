"""Maps weight files into memory and hands out their tensors.

Knows nothing of formats, except what other things people save under a model's name.
Invariant: every view handed out is read-only and lies within its file.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelFileError, ModelNotFoundError, nearest, shorten
from octavo.weights.quants import dequantize
from octavo.weights.source import TensorInfo

_LOOKALIKES = {
    b"<!doctype": "a web page: the link was wrong or needs a login. Download the model again",
    b"<html": "a web page: the link was wrong or needs a login. Download the model again",
    b"version https://git-lfs": "a Git LFS pointer: the weights are elsewhere. Run `git lfs pull`",
    b"gguf": "a GGUF file. Give it a name that ends in .gguf",
    b"ggjt": "a GGML file from before GGUF. Convert the model again",
    b"tjgg": "a GGML file from before GGUF. Convert the model again",
    b"lmgg": "a GGML file from before GGUF. Convert the model again",
    b"pk\x03\x04": "a ZIP archive or PyTorch checkpoint. Convert it to safetensors or GGUF",
    b"\x1f\x8b": "compressed with gzip. Decompress it",
}


class StoredTensor(NamedTuple):
    """A tensor's description and its bytes, (num_bytes,), in the mapped file."""

    info: TensorInfo
    stored: NDArray[np.uint8]


class MappedTensors:
    """Tensors whose bytes lie in memory-mapped files (a `TensorSource`)."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: tensor.info for name, tensor in tensors.items()}
        )
        self._stored = {name: tensor.stored for name, tensor in tensors.items()}
        self._closed = False

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes, (num_bytes,): a read-only view of the mapped file, not aligned.

        Raises ModelFileError if there is no such tensor, and ValueError after `close`.
        """
        if self._closed:
            raise ValueError(f"{self.path} is closed.")
        if name not in self._stored:
            raise ModelFileError(
                f"{self.path} has no tensor {shorten(name)}; it has {len(self._stored):,} others."
                f"{nearest(name, self._stored)}"
            )
        return self._stored[name]

    def float32(self, name: str) -> NDArray[np.float32]:
        """Return the values in the tensor's shape: a new C-contiguous array of the caller's own.

        Raises ModelFileError if there is no such tensor, and ValueError after `close`.
        """
        stored = self.raw(name)
        info = self.tensors[name]
        return dequantize(stored, info.dtype).reshape(info.shape)

    def release(self, name: str) -> None:
        """Give back the memory that a tensor's bytes take; views read them from the file again."""
        stored = self.raw(name)
        if not stored.size or not hasattr(mmap, "MADV_DONTNEED"):
            return
        # A view's base is the array over the whole file, whose own is a memoryview of the mapping.
        file: Any = stored.base
        start = stored.ctypes.data - file.ctypes.data
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        file.base.obj.madvise(mmap.MADV_DONTNEED, page, start + stored.size - page)

    def close(self) -> None:
        """Let go of the file; the mapping ends when the last view that was handed out does."""
        self._stored.clear()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def map_file(path: Path) -> mmap.mmap:
    """Map the whole of `path`, read-only.

    Raises ModelNotFoundError if there is no such file, ModelFileError if it is empty or unreadable.
    """
    try:
        # A pipe or a device would block, or never end.
        if path.exists() and not path.is_file():
            raise ModelFileError(f"{path} is not a regular file. Give the path of a weight file.")
        with path.open("rb") as file:
            if not file.seek(0, 2):
                raise ModelFileError(f"{path} is empty (0 bytes). Download it again.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"There is no file {path}. Check the path.") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{shorten(str(path))} cannot be read: {error}.") from error


def lookalike(path: Path, buffer: mmap.mmap) -> ModelFileError | None:
    """Return the error for something well known that is not a weight file, or None."""
    head = buffer[:256].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for prefix, verdict in _LOOKALIKES.items():
        if head.startswith(prefix):
            return ModelFileError(f"{path} ({len(buffer):,} bytes) is {verdict}.")
    return None
