"""Runs a whole step of a program in one native call.

Decides how a program becomes a tape of native operations: where each value lies, how each weight is
packed. The operations are those of `program/ops.py`, under the same names in csrc/. Checks what the
tape points into before its address crosses; a step's arrays the library checks.

Invariant: a row's result has the same bits in every batch, chunking, block size and thread count.
"""

import platform
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import UnsupportedModelError
from octavo.executors.arithmetic import SEGMENT
from octavo.executors.executor import Batch, Done, StepResult
from octavo.executors.limits import BatchLimits
from octavo.executors.native_sampling import NativeSampling
from octavo.executors.packing import (
    FLOAT_TYPES,
    Format,
    HugePages,
    PackedMatrix,
    Packer,
    Scales,
    floats_of,
    formats_of,
)
from octavo.executors.pages import ELEMENT_BYTES, KVType, Seal, bytes_per_token
from octavo.executors.quantization import Losses, Quantization
from octavo.executors.values import place_values
from octavo.program import ops
from octavo.program.fuse import fuse
from octavo.program.program import Program
from octavo.weights.source import TensorType

Floats = NDArray[np.float32]

# Rows of logits that are kept at a time.
HEAD_ROWS = 64
# As the library numbers them.
_GATES: tuple[ops.Gate, ...] = ("silu", "gelu_tanh")
# Of a quantised matrix, to measure what was lost.
_ROWS_COMPARED = 64


class Weights(Protocol):
    """What the executor needs of a model's weights; `WeightReader` has it."""

    def __call__(self, parameter: str, /) -> Floats:
        """Return a parameter's values."""
        ...

    def dtype(self, parameter: str, /) -> str:
        """Return how they are stored."""
        ...

    def stored_rows(self, parameter: str, /) -> NDArray[np.uint8]:
        """Return a matrix as stored, (outputs, bytes per row)."""
        ...

    def release(self, parameter: str, /) -> None:
        """Give back the memory of what `stored_rows` returned."""
        ...


class Counted(NamedTuple):
    """What the library has done since it was loaded: flops of products and attention, and bytes.

    Keys and values count once per chunk and layer. The vocabulary's product runs on `HEAD_ROWS`
    rows at a time, and each time reads its weights.
    """

    flops: int
    weights: int
    kv_read: int
    kv_written: int


class CPUExecutor:
    """An `Executor` over the native library.

    instruction_set: one of `library.instruction_sets()`; it decides the bits. num_threads: how many
    compute. max_rows: most tokens per step. max_positions: most positions of a sequence. scales: of
    packed integer weights. quantization: what matrices of floats become; `notes` says what that
    cost. meanwhile: called while threads pack the weights.
    """

    def __init__(
        self,
        library: Any,
        program: Program,
        weights: Weights,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: KVType,
        max_rows: int,
        max_positions: int,
        instruction_set: str,
        num_threads: int,
        clock: Callable[[], float],
        scales: Scales = "group",
        quantization: Quantization | None = None,
        weights_digest: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        check_supported(program)
        _check_sizes(block_size, kv_dtype, num_threads, max_rows, max_positions)
        self.name = f"cpu ({instruction_set}, {num_threads} thread{'s'[: num_threads > 1]})"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.program = fuse(program)
        parts = ["cpu", instruction_set, platform.machine(), f"kv-{kv_dtype}", f"{scales}-scales"]
        parts += [quantization] if quantization else []
        parts += [f"program-{self.program.digest}", f"weights-{weights_digest}"]
        self.fingerprint = " ".join(parts)
        self._clock = clock
        self._limits = BatchLimits(program, num_blocks, block_size, max_rows, max_positions)
        self._native_limits = library.Limits(
            self._limits.num_tokens, num_blocks, block_size, max_rows, max_positions
        )
        self._seal = Seal(f"{self.fingerprint} {block_size}")
        group = self.program.kv_groups[0]
        block_bytes = bytes_per_token([group], kv_dtype) * block_size
        self.pages = HugePages().zeros(num_blocks * block_bytes).reshape(num_blocks, block_bytes)
        self._tape = library.Tape(
            instruction_set, self.pages.ctypes.data, group.layers, block_size, group.kv_heads,
            group.head_dim, ELEMENT_BYTES[kv_dtype], max_rows, num_threads,
        )  # fmt: skip
        formats = formats_of(self.program, weights.dtype, scales, quantization)
        with Packer(library, num_threads) as packer:
            recorder = _Recorder(
                library, self.program, weights, formats, max_rows, max_positions, packer
            )
            for op in self.program.operations:
                recorder.record(op, self._tape)
            meanwhile()
        self._sampling = NativeSampling(library, program.vocab_size)
        self._select = sum(not isinstance(op, ops.Split) for op in self.program.body)
        self._num_operations = recorder.num_recorded
        self._logits = recorder.values[self.program.operations[-1].inputs[0].name]
        self._states = recorder.values[self.program.state]
        self.notes = tuple(recorder.losses.describe(quantization)) if quantization else ()
        self._kept = recorder.kept  # what the tape points into

    def submit(self, batch: Batch) -> Future[StepResult]:
        """Copy blocks, run the whole step, sample. Errors arrive through the future."""
        try:
            started = self._clock()
            step = self._step(batch)
            draws = self._sampling.prepare(batch)
            self._copy_blocks(batch)
            self._tape.sample(step, HEAD_ROWS, draws)
            states = self._final_states(batch)
            duration = self._clock() - started
            return Done(self._sampling.collect(batch, draws, duration, states))
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def time_operations(self, batch: Batch) -> list[float]:
        """Run the step an operation at a time and return the seconds of each, without the draw.

        They stand in the order of the program, whose `Split`s are no operations here. Raises
        `ValueError` for a step of more than `HEAD_ROWS` rows of logits.
        """
        step = self._step(batch)
        if len(batch.logit_rows) > HEAD_ROWS:
            raise ValueError(f"operations are timed with at most {HEAD_ROWS} rows of logits")
        self._copy_blocks(batch)
        moments = [self._clock()]
        for index in range(self._num_operations - 1):
            self._tape.run(step, index, index + 1)
            moments.append(self._clock())
        return np.diff(moments).tolist()

    def logits(self, batch: Batch) -> Floats:
        """Run the step and return the logits of `batch.logit_rows`, (R, vocab_size)."""
        out = np.empty((len(batch.logit_rows), self.program.vocab_size), np.float32)
        for first, tile in self._logit_tiles(batch):
            out[first : first + len(tile)] = tile
        return out

    def counted(self) -> Counted:
        """Return the library's own counters; the difference of two is what came between."""
        return Counted(*self._tape.counters())

    def export_blocks(self, blocks: Ordered[int]) -> bytes:
        """Return the keys and values of `blocks` as opaque bytes that `import_blocks` accepts."""
        return self._seal.close(self.pages, blocks)

    def import_blocks(self, blocks: Ordered[int], content: bytes) -> None:
        """Overwrite `blocks`; raises `ValueError` if the content is of another model or format."""
        self._seal.open(self.pages, blocks, content)

    def close(self) -> None:
        """Release threads, pool and weights; nothing may be submitted afterwards."""
        for name in (
            "_tape",
            "_native_limits",
            "_sampling",
            "_kept",
            "pages",
            "_logits",
            "_states",
        ):
            self.__dict__.pop(name, None)

    def _logit_tiles(self, batch: Batch) -> Iterator[tuple[int, Floats]]:
        """Run the step; give the logits of some rows at a time, and which comes first."""
        self._step(batch)  # all of it, before anything is written
        self._copy_blocks(batch)
        step = self._step(batch, batch.logit_rows[:HEAD_ROWS])
        # Without the last operation, which draws from the logits.
        end = self._num_operations - 1
        self._tape.run(step, 0, end if len(batch.logit_rows) else self._select)
        for first in range(0, len(batch.logit_rows), HEAD_ROWS):
            rows = batch.logit_rows[first : first + HEAD_ROWS]
            if first:
                self._tape.run(self._step(batch, rows), self._select, end)
            yield first, self._logits[: len(rows)]

    def _step(self, batch: Batch, logit_rows: NDArray[np.int32] | None = None) -> Any:
        """Return the library's view of a batch, whose arrays it borrows; `ValueError` if unsound.

        logit_rows: some of the batch's, or None for all.
        """
        step = self._native_limits.step(
            batch.token_ids, batch.positions, batch.chunk_starts, batch.block_tables,
            batch.context_lengths, batch.copies, batch.state_rows,
            batch.logit_rows if logit_rows is None else logit_rows,
        )  # fmt: skip
        if step is None:
            self._limits.check(batch)
            raise AssertionError("the library refuses a batch that is within the limits")
        return step

    def _copy_blocks(self, batch: Batch) -> None:
        for source, destination in batch.copies.tolist():
            self.pages[destination] = self.pages[source]

    def _final_states(self, batch: Batch) -> Floats | None:
        """Return the states of `batch.state_rows`, from what the step's run has left."""
        rows = batch.state_rows
        if not len(rows):
            return None
        # The last two are the vocabulary's product and the draw, which nobody asks for here.
        self._tape.run(self._step(batch, rows), self._select, self._num_operations - 2)
        return self._states[: len(rows)].copy()


def _check_sizes(
    block_size: int, kv_dtype: KVType, num_threads: int, max_rows: int, max_positions: int
) -> None:
    if block_size < 16 or block_size % 16 or SEGMENT % block_size:
        raise ValueError(f"block_size must divide {SEGMENT} in steps of 16, not {block_size}")
    if kv_dtype not in ELEMENT_BYTES or min(num_threads, max_rows, max_positions) < 1:
        raise ValueError(
            f"impossible: kv_dtype {kv_dtype}, {num_threads} threads, {max_rows} rows, "
            f"{max_positions} positions"
        )


def check_supported(program: Program) -> None:
    """Raise `UnsupportedModelError` if the library cannot run `program`."""
    if len(program.kv_groups) != 1:
        raise UnsupportedModelError(
            f"The native library keeps one KV group, not {len(program.kv_groups)}."
        )
    for group in program.kv_groups:
        if group.head_dim % 16 or group.head_dim > 512:
            raise UnsupportedModelError(
                f"The native library needs heads of 16 to 512 in steps of 16, not {group.head_dim}."
            )


class _Recorder:
    """Turns operations into a tape; holds what the tape points into."""

    def __init__(
        self,
        library: Any,
        program: Program,
        weights: Weights,
        formats: dict[str, Format],
        max_rows: int,
        max_positions: int,
        packer: Packer,
    ) -> None:
        self._library = library
        self._packer = packer
        self._weights = weights
        self._formats = formats
        self.losses = Losses()
        self._positions = max_positions
        self.values = place_values(program, max_rows, min(max_rows, HEAD_ROWS))
        self.kept: list[Any] = list(self.values.values())
        self.num_recorded = 0
        self._matrices: dict[str, PackedMatrix] = {}
        self._turns: dict[tuple[float, ...], tuple[Floats, Floats]] = {}

    def record(self, op: ops.Operation, tape: Any) -> None:
        """Add one operation of the program; a `Split` is only a view."""
        if isinstance(op, ops.Split):
            return
        kind = type(op).__name__
        method = getattr(self, "_" + "".join(_snake(kind)))
        native = self._library.Operation(getattr(self._library.Kind, "".join(_snake(kind))))
        method(native, op)
        tape.add(native)
        self.num_recorded += 1

    def _value(self, name: str) -> Any:
        array = self.values[name]
        return self._library.Value(array.ctypes.data, array.strides[0] // 4, array.shape[1])

    def _address(self, array: Floats) -> int:
        array = np.ascontiguousarray(array, np.float32)
        self.kept.append(array)
        return int(array.ctypes.data)

    def _matrix(self, name: str) -> Any:
        """Return a packed weight; a tied one is packed once."""
        packed = self._matrices.get(name)
        if packed is None:
            dtype, rows = TensorType(self._weights.dtype(name)), self._weights.stored_rows(name)
            inputs = rows.shape[1] * dtype.block_elements // dtype.block_bytes
            packed = self._packer.add(
                inputs, dtype.value, rows, self._formats[name],
                lambda matrix: self._finish(name, matrix, dtype.value, rows),
            )  # fmt: skip
            self._matrices[name] = packed
            self.kept.append(packed.panels)
        address = packed.panels.ctypes.data
        return self._library.Matrix(address, packed.outputs, packed.inputs, packed.format)

    def _finish(self, name: str, packed: PackedMatrix, dtype: str, rows: NDArray[np.uint8]) -> None:
        if dtype in FLOAT_TYPES and packed.format != "bf16":
            self._note_loss(name, packed, dtype, rows)
        self._weights.release(name)

    def _note_loss(
        self, name: str, packed: PackedMatrix, dtype: str, rows: NDArray[np.uint8]
    ) -> None:
        """Compare some rows, from all over a matrix, with what they were packed from."""
        some = np.unique(np.linspace(0, packed.outputs - 1, _ROWS_COMPARED).astype(np.intp))
        found = np.empty((len(some), packed.inputs), np.float32)
        shape = (packed.panels.ctypes.data, packed.outputs, packed.inputs, packed.format)
        for row, out in zip(some.tolist(), found, strict=True):
            self._library.unpack_row(*shape, row, out.ctypes.data)
        self.losses.add(name, floats_of(rows[some], dtype), found)

    # --- one method per kind of operation -------------------------------------------------------

    def _embed(self, native: Any, op: ops.Embed) -> None:
        native.out, native.scale = self._value(op.out), op.scale
        native.matrices = [self._matrix(op.table)]

    def _rms_norm(self, native: Any, op: ops.RMSNorm) -> None:
        native.x, native.out = self._value(op.x), self._value(op.out)
        native.eps, native.heads = op.eps, op.heads
        native.set_weight(self._address(self._weights(op.weight)))

    def _add_rms_norm(self, native: Any, op: ops.AddRMSNorm) -> None:
        native.x, native.y = self._value(op.x), self._value(op.y)
        native.total, native.out = self._value(op.total), self._value(op.out)
        native.eps = op.eps
        native.set_weight(self._address(self._weights(op.weight)))

    def _linear(self, native: Any, op: ops.Linear) -> None:
        native.x, native.out = self._value(op.x), self._value(op.out)
        native.matrices = [self._matrix(name) for name in op.weights]
        if op.addend:
            native.y = self._value(op.addend)
        if op.gate:
            native.is_gated, native.gate = True, _GATES.index(op.gate)
        native.set_biases(
            [0 if name is None else self._address(self._weights(name)) for name in op.biases]
        )

    def _rope(self, native: Any, op: ops.Rope) -> None:
        native.x, native.out = self._value(op.x), self._value(op.out)
        native.heads, native.head_dim = op.heads, op.head_dim
        if op.frequencies not in self._turns:
            angles = np.outer(np.arange(self._positions), np.array(op.frequencies))
            turns = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            self._turns[op.frequencies] = turns
            self.kept += turns
        cosines, sines = self._turns[op.frequencies]
        native.set_weight(cosines.ctypes.data)
        native.set_sines(sines.ctypes.data)

    def _write_kv(self, native: Any, op: ops.WriteKV) -> None:
        native.x, native.y, native.layer = self._value(op.k), self._value(op.v), op.layer

    def _attention(self, native: Any, op: ops.Attention) -> None:
        native.x, native.out, native.layer = self._value(op.q), self._value(op.out), op.layer
        native.heads, native.kv_heads, native.head_dim = op.heads, op.kv_heads, op.head_dim
        native.scale, native.window = op.scale, op.window or 0

    def _gated_activation(self, native: Any, op: ops.GatedActivation) -> None:
        native.x, native.y = self._value(op.gate), self._value(op.up)
        native.out, native.gate = self._value(op.out), _GATES.index(op.kind)

    def _add(self, native: Any, op: ops.Add) -> None:
        native.x, native.y, native.out = self._value(op.x), self._value(op.y), self._value(op.out)

    def _select_rows(self, native: Any, op: ops.SelectRows) -> None:
        native.x, native.out = self._value(op.x), self._value(op.out)

    def _sample(self, native: Any, op: ops.Sample) -> None:
        native.x = self._value(op.logits)


def _snake(name: str) -> Iterator[str]:
    """AddRMSNorm becomes add_rms_norm: the operation's name in C++."""
    for index, char in enumerate(name):
        begins_word = char.isupper() and (
            not name[index - 1].isupper() or name[index + 1 : index + 2].islower()
        )
        yield "_" * (index > 0 and begins_word) + char.lower()
