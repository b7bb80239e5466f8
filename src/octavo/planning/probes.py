"""How fast the native library runs on this machine.

Decides what is timed and for how long: each figure is the best of a few runs within a fraction of a
second. Runs tapes as the CPU executor does, on weights that are only bytes.

Invariant: a probe's numbers are finite: scales and floats of the weights are of ordinary size.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from octavo.executors.packing import HugePages
from octavo.planning.rehearsal import Rehearsal, rehearse

FORMATS = ("bf16", "int8", "int4", "int8_group", "int4_group")
# Bytes of weights that a probe of the bandwidth reads: caches of a core, of all, and none.
WORKING_SETS = (256 << 10, 4 << 20, 32 << 20, 192 << 20)
_BLOCK = 32
_SECONDS = 0.04
_MIN_RUNS = 2
# Of the matrices that are multiplied; rows of a prompt.
_WIDTH = 1024
_ROWS = 128
_HEADS, _HEAD_DIM, _PROMPT = 8, 64, 512


class Probe(NamedTuple):
    """One call of the library; bytes and flops are what it moves and computes."""

    run: Callable[[], None]
    num_bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Prober:
    """Runs probes. library: the native one. clock: in seconds. seconds: for each figure."""

    library: Any
    clock: Callable[[], float]
    seconds: float = _SECONDS

    def best(self, probe: Probe) -> float:
        """Return the least seconds of a run."""
        probe.run()
        least, started, num_runs = float("inf"), self.clock(), 0
        while num_runs < _MIN_RUNS or self.clock() - started < self.seconds:
            begun = self.clock()
            probe.run()
            least = min(least, self.clock() - begun)
            num_runs += 1
        return max(least, 1e-9)

    def bandwidth(self, instruction_set: str, threads: int, num_bytes: int) -> float:
        """Return the bytes per second at which one row meets so many bytes of weights.

        They have 8 bits, whose products are fast enough to wait for memory.
        """
        probe = product(self.library, instruction_set, threads, "int8_group", 1, num_bytes)
        return probe.num_bytes / self.best(probe)

    def product_rate(self, instruction_set: str, threads: int, form: str) -> float:
        """Return the flops per second of a prompt's products with weights of a format."""
        size = matrix_bytes(self.library, form)
        probe = product(self.library, instruction_set, threads, form, _ROWS, size)
        return probe.flops / self.best(probe)

    def attention_rate(self, instruction_set: str, threads: int) -> float:
        """Return the flops per second of a prompt's attention."""
        probe = attention(self.library, instruction_set, threads)
        return probe.flops / self.best(probe)

    def rehearsal(self, instruction_set: str, threads: int) -> Rehearsal:
        """Return steps of a small program, with their seconds."""
        return rehearse(self.library, instruction_set, threads, self.clock)


def matrix_bytes(library: Any, form: str) -> int:
    """Return what one square matrix takes."""
    return int(-(-_WIDTH // 16) * library.panel_bytes(form, _WIDTH))


def product(library: Any, isa: str, threads: int, form: str, rows: int, num_bytes: int) -> Probe:
    """Multiply `rows` rows with as many matrices as take `num_bytes` bytes, at least one."""
    width = _WIDTH if num_bytes >= matrix_bytes(library, form) else _WIDTH // 4
    size = -(-width // 16) * library.panel_bytes(form, width)
    count = max(1, num_bytes // size)
    panels = HugePages().zeros(count * size).reshape(count, size)
    # From 32 to 63: scales and floats of ordinary size, none subnormal.
    panels[:] = np.random.default_rng(0).integers(32, 64, size, np.uint8)
    x = np.random.default_rng(1).standard_normal((rows, width), np.float32)
    out = np.zeros((rows, width), np.float32)
    tape = library.Tape(isa, 0, 1, _BLOCK, 1, 16, 2, rows, threads)
    for panel in panels:
        op = library.Operation(library.Kind.linear)
        op.x, op.out = _value(library, x), _value(library, out)
        op.matrices = [library.Matrix(panel.ctypes.data, width, width, form)]
        op.set_biases([0])
        tape.add(op)
    run = _runner(library, tape, [(1, 1)] * rows, count, (panels, x, out))
    return Probe(run, count * size, 2.0 * count * rows * width * width)


def attention(library: Any, isa: str, threads: int) -> Probe:
    """Attend with one prompt in one layer."""
    pages_shape = (-(-_PROMPT // _BLOCK), _HEADS * 2 * _BLOCK * _HEAD_DIM)
    pages = HugePages().zeros(2 * pages_shape[0] * pages_shape[1]).view(np.uint16)
    pages = pages.reshape(pages_shape)
    pages[:] = np.random.default_rng(0).integers(0x3C00, 0x3F00, pages_shape[1], np.uint16)
    q = np.random.default_rng(1).standard_normal((_PROMPT, _HEADS * _HEAD_DIM), np.float32)
    out = np.zeros_like(q)
    tape = library.Tape(isa, pages.ctypes.data, 1, _BLOCK, _HEADS, _HEAD_DIM, 2, _PROMPT, threads)
    op = library.Operation(library.Kind.attention)
    op.x, op.out, op.layer = _value(library, q), _value(library, out), 0
    op.heads = op.kv_heads = _HEADS
    op.head_dim, op.scale = _HEAD_DIM, _HEAD_DIM**-0.5
    tape.add(op)
    seen = _PROMPT * (_PROMPT + 1) / 2
    run = _runner(library, tape, [(_PROMPT, _PROMPT)], 1, (pages, q, out))
    return Probe(run, float(pages.nbytes), seen * _HEADS * (4 * _HEAD_DIM + 4))


def _runner(
    library: Any,
    tape: Any,
    chunks: Iterable[tuple[int, int]],
    num_operations: int,
    kept: tuple[Any, ...],
) -> Callable[[], None]:
    """Return a function that runs a tape; kept: arrays that it points into."""
    arrays, sizes = _step(list(chunks))
    step = library.Step([array.ctypes.data for array in arrays], sizes)

    def run(_: Any = (kept, arrays)) -> None:
        tape.run(step, 0, num_operations)

    return run


def _step(chunks: list[tuple[int, int]]) -> tuple[list[Any], list[int]]:
    """Return the arrays of a step of (tokens, context) chunks, and their sizes."""
    widest = max(-(-context // _BLOCK) for _, context in chunks)
    rows = sum(tokens for tokens, _ in chunks)
    arrays: Iterator[Any] = iter(
        (
            np.zeros(rows),
            np.concatenate([np.arange(context - tokens, context) for tokens, context in chunks]),
            np.cumsum([0] + [tokens for tokens, _ in chunks]),
            np.arange(widest * len(chunks)),
            np.array([context for _, context in chunks]),
            np.zeros(1),
        )
    )
    return [np.ascontiguousarray(a, np.int32) for a in arrays], [rows, len(chunks), widest, rows]


def _value(library: Any, array: Any) -> Any:
    return library.Value(array.ctypes.data, array.strides[0] // 4, array.shape[1])


def thread_counts(most: int) -> list[int]:
    """Return powers of two up to `most`, and `most` itself."""
    counts = [1 << power for power in range(most.bit_length())]
    return counts if counts[-1] == most else [*counts, most]
