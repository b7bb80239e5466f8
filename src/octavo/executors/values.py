"""Where the values of a program lie while it runs.

Decides which values may share memory: one whose last reader has run gives its place to the next.
Knows the operations' inputs and outputs, and nothing of what they compute.

Invariant: an operation's outputs never share memory with its inputs.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

from octavo.program import ops
from octavo.program.program import Program

Floats = NDArray[np.float32]

# Rows are padded so that those of a tile do not all fall into one set of the cache.
_PADDING = 32


def place_values(program: Program, max_rows: int, head_rows: int) -> dict[str, Floats]:
    """Return an array for each value: (max_rows, width), but (head_rows, width) for the logits.

    The parts of a `Split` are views of its input.
    """
    operations = program.operations[:-1]
    roots = _roots(operations)
    last_use = {
        roots[value.name]: index
        for index, op in enumerate(operations)
        for value in (*op.inputs, *op.outputs)
    }
    logits = program.operations[-1].inputs[0]
    kept = [logits]
    kept += [op.inputs[0] for op in operations if isinstance(op, ops.SelectRows)]  # read repeatedly
    last_use.update((roots[value.name], len(operations)) for value in kept)
    values: dict[str, Floats] = {}
    free: list[Floats] = []
    for index, op in enumerate(operations):
        if isinstance(op, ops.Split):
            ends = np.cumsum(op.widths)
            for name, width, end in zip(op.outs, op.widths, ends.tolist(), strict=True):
                values[name] = values[op.x][:, end - width : end]
        else:
            for name, width in op.outputs:
                rows = head_rows if name == logits.name else max_rows
                values[name] = _take(free, rows, width)
        for root in {roots[v.name] for v in (*op.inputs, *op.outputs)}:
            if last_use[root] == index and values[root].base is not None:
                base = values[root].base
                assert isinstance(base, np.ndarray)
                free.append(base)
    return values


def _roots(operations: tuple[ops.Operation, ...]) -> dict[str, str]:
    """Return for each value the one whose memory it is: itself, unless it is part of a split."""
    roots: dict[str, str] = {}
    for op in operations:
        for value in (*op.inputs, *op.outputs):
            roots.setdefault(value.name, value.name)
        if isinstance(op, ops.Split):
            roots.update(dict.fromkeys(op.outs, roots[op.x]))
    return roots


def _take(free: list[Floats], rows: int, width: int) -> Floats:
    """Return `width` columns of the smallest free array that has as many, or of a new one."""
    fitting = [array for array in free if array.shape[1] >= width and array.shape[0] == rows]
    if fitting:
        best = min(fitting, key=lambda array: array.shape[1])
        free[:] = [array for array in free if array is not best]
        return best[:, :width]
    return _untouched(rows, -(-width // 16) * 16 + _PADDING)[:, :width]


def _untouched(rows: int, width: int) -> Floats:
    """Return zeros that take no memory until they are written.

    They are a mapping of their own: the C library would clear, and so touch, what it recycles.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros((rows, width), np.float32)
    memory = mmap.mmap(-1, 4 * rows * width, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.ndarray((rows, width), np.float32, memory)
