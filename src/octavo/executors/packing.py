"""Weights in the few layouts that the native library computes with.

Decides which layout each stored type becomes: floats become bfloat16, integers keep 4 bits or
become 8. With scales by group they are as exact as they were, with one scale per output ("channel")
rounded to 8 bits, and their activations to 16 instead of 8. The layouts are told in csrc/pack.h.

Invariant: a packed matrix is made once, from slices of rows, so temporaries stay small.
"""

import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from octavo.executors.quantization import Quantization, split_floats, tables_of
from octavo.program.program import Program
from octavo.weights.quants import dequantize
from octavo.weights.source import TensorType

Format = Literal["bf16", "int8", "int4", "int8_group", "int4_group"]
Scales = Literal["channel", "group"]
Bytes = NDArray[np.uint8]

PANEL = 16
GROUP = 32
_WEIGHTS_PER_SLICE = 1 << 19
_SLICES_AHEAD = 512  # whose stored bytes may be in memory at once
FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
# Stored as nibbles with a scale and a minimum for each group of 32.
_CODE_TYPES = frozenset({"Q4_0", "Q4_1", "Q4_K"})


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix of (outputs, inputs) in panels of 16 outputs; `panels` is its memory."""

    panels: Bytes
    outputs: int
    inputs: int
    format: Format

    @property
    def bytes_per_weight(self) -> float:
        """Bytes that one weight takes, scales and padding included."""
        return self.panels.size / (self.outputs * self.inputs)


def formats_of(
    program: Program,
    dtype_of: Callable[[str], str],
    scales: Scales,
    quantization: Quantization | None = None,
) -> dict[str, Format]:
    """Return the layout of each matrix of a program.

    dtype_of: how a parameter is stored. quantization: what float matrices become.
    """
    tables = tables_of(program)
    formats: dict[str, Format] = {}
    for name, shape in program.parameters.items():
        if len(shape) == 2:
            dtype = dtype_of(name)
            is_changed = quantization is not None and dtype in FLOAT_TYPES
            small = quantization == "int4" and name not in tables
            formats[name] = (
                _integers(4 if small else 8, scales) if is_changed else format_of(dtype, scales)
            )
    return formats


def packed_bytes(shape: tuple[int, int], chosen: Format) -> int:
    """Return what a matrix takes once packed."""
    outputs, inputs = shape
    groups = -(-inputs // GROUP)
    return (
        -(-outputs // PANEL)
        * {
            "bf16": -(-inputs // 2) * 64,
            "int8": 64 + -(-groups // 2) * 1024,
            "int4": 64 + groups * (4 * 64 + 64),
            "int8_group": groups * (8 * 64 + 32),
            "int4_group": groups * (4 * 64 + 64),
        }[chosen]
    )


def format_of(dtype: str, scales: Scales) -> Format:
    """Return the layout that a stored type becomes."""
    if dtype in FLOAT_TYPES:
        return "bf16"
    return _integers(4 if dtype in _CODE_TYPES else 8, scales)


def _integers(bits: int, scales: Scales) -> Format:
    if bits == 4:
        return "int4" if scales == "channel" else "int4_group"
    return "int8" if scales == "channel" else "int8_group"


class HugePages:
    """Hands out zeroed memory in whole cache lines, from regions of huge pages.

    Streaming weights through 4 KB pages costs up to a quarter of the bandwidth. Matrices lie side
    by side, since most are smaller than one huge page. A region lives as long as an array in it.
    """

    _REGION = 32 << 20
    _HUGE_PAGE = 2 << 20
    _LINE = 64

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def zeros(self, size: int) -> Bytes:
        """Return `size` zero bytes at a multiple of 64."""
        if size > self._free.size:
            self._free = self._region(max(size, self._REGION))
        taken, rest = self._free[:size], -(-size // self._LINE) * self._LINE
        self._free = self._free[rest:]
        return taken

    def _region(self, size: int) -> Bytes:
        if not hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux has it
            region = np.zeros(size + self._LINE, np.uint8)
            first = -region.ctypes.data % self._LINE
            return region[first : first + size]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, size + self._HUGE_PAGE, flags)
        memory.madvise(mmap.MADV_HUGEPAGE)
        region = np.frombuffer(memory, np.uint8)
        first = -region.ctypes.data % self._HUGE_PAGE
        return region[first : first + size]


class _Pending(NamedTuple):
    matrix: PackedMatrix
    slices: list[Future[None]]
    done: Callable[[PackedMatrix], None]


class Packer:
    """Packs the matrices of one model with threads of its own; a context manager.

    Its end waits until all are packed, or with an error gives up those that were not begun.
    """

    def __init__(self, library: Any, num_threads: int) -> None:
        self._library = library
        self._threads = ThreadPoolExecutor(num_threads, "octavo-pack")
        self._memory = HugePages()
        self._pending: deque[_Pending] = deque()
        self._num_slices = 0  # of those

    def add(
        self,
        inputs: int,
        dtype: str,
        rows: Bytes,
        chosen: Format,
        done: Callable[[PackedMatrix], None],
    ) -> PackedMatrix:
        """Return a matrix whose numbers come until the end; arguments are those of `pack`.

        done: called with it by this thread, here or at the end, once they are there.
        """
        matrix = _empty(self._library, len(rows), inputs, chosen, self._memory)
        slices = [self._threads.submit(job) for job in _slices(self._library, matrix, dtype, rows)]
        self._pending.append(_Pending(matrix, slices, done))
        self._num_slices += len(slices)
        while self._num_slices > _SLICES_AHEAD:
            self._finish_first()
        return matrix

    def _finish_first(self) -> None:
        matrix, slices, done = self._pending.popleft()
        self._num_slices -= len(slices)
        for future in slices:
            future.result()
        done(matrix)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            while kind is None and self._pending:
                self._finish_first()
        finally:
            self._threads.shutdown(cancel_futures=True)


def pack(library: Any, inputs: int, dtype: str, rows: Bytes, chosen: Format) -> PackedMatrix:
    """Pack a stored matrix.

    rows: its bytes as (outputs, bytes per row). chosen: the layout; a 4-bit one for floats
    quantises them.
    """
    matrix = _empty(library, len(rows), inputs, chosen, HugePages())
    for job in _slices(library, matrix, dtype, rows):
        job()
    return matrix


def _empty(
    library: Any, outputs: int, inputs: int, chosen: Format, memory: HugePages
) -> PackedMatrix:
    size = -(-outputs // PANEL) * library.panel_bytes(chosen, inputs)
    return PackedMatrix(memory.zeros(size), outputs, inputs, chosen)


def _slices(
    library: Any, matrix: PackedMatrix, dtype: str, rows: Bytes
) -> Iterator[Callable[[], None]]:
    """Yield jobs that each pack some rows. They are whole panels: no two write the same bytes."""
    step = max(1, _WEIGHTS_PER_SLICE // (matrix.inputs * PANEL)) * PANEL
    are_quantised = dtype in FLOAT_TYPES and matrix.format in ("int4", "int4_group")
    job = _quantise_slice if are_quantised else _pack_slice
    for first in range(0, len(rows), step):
        yield partial(job, library, matrix, dtype, first, rows[first : first + step])


def _pack_slice(library: Any, matrix: PackedMatrix, dtype: str, first: int, rows: Bytes) -> None:
    rows = np.ascontiguousarray(rows)
    library.pack_stored(
        dtype, matrix.format, rows.ctypes.data, first, len(rows), matrix.inputs,
        matrix.panels.ctypes.data,
    )  # fmt: skip


def _quantise_slice(
    library: Any, matrix: PackedMatrix, dtype: str, first: int, rows: Bytes
) -> None:
    parts = [np.ascontiguousarray(part) for part in split_floats(floats_of(rows, dtype))]
    function = getattr(library, f"pack_{matrix.format}")
    at = [part.ctypes.data for part in parts]
    function(*at, first, len(rows), matrix.inputs, matrix.panels.ctypes.data)


def floats_of(rows: Bytes, dtype: str) -> NDArray[np.float32]:
    """Return stored rows as numbers, (rows, inputs)."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    return dequantize(flat, TensorType(dtype)).reshape(len(rows), -1)
