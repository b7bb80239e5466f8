"""Weights in the few layouts that the native library computes with.

Decides which layout each stored type becomes: floats become bfloat16, integers keep 4 bits or
become 8. With scales by group they are as exact as they were, with one scale per output ("channel")
rounded to 8 bits, and their activations to 16 instead of 8. The layouts are told in csrc/pack.h.

Invariant: a packed matrix is made once, from slices of rows, so temporaries stay small.
"""

import mmap
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.executors.quantization import Quantization, split_floats, tables_of
from octavo.program.program import Program

Format = Literal["bf16", "int8", "int4", "int8_group", "int4_group"]
Scales = Literal["channel", "group"]
Bytes = NDArray[np.uint8]

PANEL = 16
GROUP = 32
_ROWS_PER_SLICE = 512
FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})


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
    return _integers(4 if dtype in _SPLITTERS else 8, scales)


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


def pack(
    library: Any,
    shape: tuple[int, int],
    dtype: str,
    raw: Bytes,
    floats: Callable[[Bytes], Any],
    chosen: Format,
    memory: HugePages | None = None,
    threads: Executor | None = None,
) -> PackedMatrix:
    """Pack a stored matrix.

    raw: its bytes as (outputs, bytes per row). floats: from such rows to float32 (rows, inputs).
    chosen: the layout; a 4-bit one for floats quantises them.
    memory: where it shall lie; shared by the matrices of a model. threads: that pack slices of it.
    """
    outputs, inputs = shape
    function = getattr(library, f"pack_{chosen}")
    num_panels = -(-outputs // PANEL)
    size = num_panels * library.panel_bytes(chosen, inputs)
    panels = memory.zeros(size) if memory else np.zeros(size, np.uint8)
    address = panels.ctypes.data

    def pack_slice(first: int) -> None:
        rows = raw[first : first + _ROWS_PER_SLICE]
        if chosen in ("int4", "int4_group"):
            split = _SPLITTERS.get(dtype)
            found = split(rows) if split else split_floats(floats(rows))
            parts = [np.ascontiguousarray(part) for part in found]
            at = [part.ctypes.data for part in parts]
            function(*at, first, len(rows), inputs, address)
        else:
            values = np.ascontiguousarray(floats(rows), np.float32)
            function(values.ctypes.data, first, len(rows), inputs, address)

    # Slices are whole panels, so that no two write the same bytes.
    each = threads.map if threads else map
    for _ in each(pack_slice, range(0, outputs, _ROWS_PER_SLICE)):
        pass
    return PackedMatrix(panels, outputs, inputs, chosen)


# --- 4-bit types, taken apart into (nibbles, scales, minima) of groups of 32 ----------------------


def _nibbles(packed: Bytes) -> Bytes:
    """(…, 16) bytes to (…, 32): the low nibbles are the first half of a group."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _split_q4_0(rows: Bytes) -> tuple[Bytes, Any, Any]:
    """A block is a scale and 32 nibbles; weight = scale * (nibble - 8)."""
    blocks = rows.reshape(len(rows), -1, 18)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    minima = (scales.astype(np.float32) * -8).astype(np.float16)
    return _nibbles(blocks[..., 2:]), scales, minima


def _split_q4_1(rows: Bytes) -> tuple[Bytes, Any, Any]:
    """A block is a scale, a minimum and 32 nibbles; weight = scale * nibble + minimum."""
    blocks = rows.reshape(len(rows), -1, 20)
    pair = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    return _nibbles(blocks[..., 4:]), pair[..., 0], pair[..., 1]


def _split_q4_k(rows: Bytes) -> tuple[Bytes, Any, Any]:
    """A block of 256 has two halves, eight 6-bit scales and minima, and 128 bytes of nibbles.

    weight = d * scale * nibble - dmin * minimum; the products are rounded to halves. Format:
    ggml's block_q4_K.
    """
    blocks = rows.reshape(len(rows), -1, 144)
    pair = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    # 32 bytes hold two groups: one in the low nibbles, the next in the high ones.
    values = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    nibbles = np.stack([values & 15, values >> 4], axis=-2)
    return (
        nibbles.reshape(len(rows), -1, GROUP),
        (pair[..., :1] * scales).astype(np.float16).reshape(len(rows), -1),
        (-pair[..., 1:] * minima).astype(np.float16).reshape(len(rows), -1),
    )


_SPLITTERS: dict[str, Callable[[Bytes], tuple[Bytes, Any, Any]]] = {
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q4_K": _split_q4_k,
}
