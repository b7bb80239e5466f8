"""What the CPU executor makes of a program, told before any weight is read.

Decides nothing: fusing is `program.fuse`'s, layouts are `packing`'s. This is where the cost model
gets them from, so that a prediction cannot drift from what runs.

Invariant: the bytes are those that `CPUExecutor` takes for the same program and formats.
"""

import math
from collections.abc import Callable, Mapping

from octavo.cost.accounting import PreparedProgram
from octavo.executors.packing import Format, Scales, formats_of, packed_bytes
from octavo.executors.quantization import Quantization
from octavo.program.fuse import fuse
from octavo.program.program import Program

_FLOAT = 4


def prepare(
    program: Program,
    dtype_of: Callable[[str], str],
    scales: Scales,
    *,
    quantization: Quantization | None = None,
    kv_element: float = 2.0,
) -> PreparedProgram:
    """Return the program fused, with what each parameter takes once packed.

    dtype_of: how a parameter is stored. kv_element: bytes of a number in the pages.
    """
    formats = formats_of(program, dtype_of, scales, quantization)
    return PreparedProgram(fuse(program), weight_bytes(program, formats), formats, kv_element)


def weight_bytes(program: Program, formats: Mapping[str, Format]) -> dict[str, int]:
    """Return what each parameter takes: matrices in their format, vectors as float32."""
    return {
        name: packed_bytes((shape[0], shape[1]), formats[name])
        if name in formats
        else _FLOAT * math.prod(shape)
        for name, shape in program.parameters.items()
    }
