"""Runs a program in plain NumPy: the specification of the numerics.

Decides nothing that speed would ask for: weights are float32, every row takes the same path whether
it decodes or belongs to a prompt. `arithmetic` has the order of every sum, `pages` the memory.

Invariant: a row's logits have the same bits in every batch, chunking and block size.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from threadpoolctl import ThreadpoolController

from octavo.executors import arithmetic
from octavo.executors.arithmetic import SEGMENT, TILE, Floats, Int32, padded
from octavo.executors.executor import Batch, StepResult
from octavo.executors.limits import BatchLimits
from octavo.executors.pages import KVType, PageStore, element_size
from octavo.executors.sampling import sample_tiles
from octavo.program import ops
from octavo.program.fuse import fuse
from octavo.program.program import Program


@dataclass(frozen=True, slots=True)
class PreparedProgram:
    """What is executed: the program after its rewrites, its weights, and bytes per element."""

    program: Program
    weights: Mapping[str, Floats]
    sizes: ops.ElementSizes


def prepare(
    program: Program,
    weights: Callable[[str], Floats],
    *,
    dtype: type[np.floating[Any]] = np.float32,
    kv_dtype: KVType = "bfloat16",
    fused: bool = True,
) -> PreparedProgram:
    """Read every weight once, as `dtype`; fuse the program or leave it as it is."""
    program = fuse(program) if fused else program
    arrays = {name: np.ascontiguousarray(weights(name), dtype) for name in program.parameters}
    item = float(np.dtype(dtype).itemsize)
    kv = element_size(kv_dtype, program.kv_groups[0].head_dim)
    sizes = ops.ElementSizes(lambda _name: item, item, kv)
    return PreparedProgram(program, arrays, sizes)


class ReferenceExecutor:
    """An `Executor` that computes in the caller's thread, within `submit`.

    weights: from a parameter's name to its values. dtype: of the arithmetic, float64 to compare.
    weights_digest: tells models of one architecture apart. clock: seconds, for `duration`.
    """

    name = "reference"

    def __init__(
        self,
        program: Program,
        weights: Callable[[str], Floats],
        *,
        num_blocks: int,
        block_size: int = 32,
        kv_dtype: KVType = "bfloat16",
        dtype: type[np.floating[Any]] = np.float32,
        clock: Callable[[], float],
        fused: bool = True,
        weights_digest: str = "",
    ) -> None:
        if block_size < 1 or SEGMENT % block_size:
            raise ValueError(f"block_size must divide {SEGMENT}, which {block_size} does not")
        if len(program.kv_groups) != 1:
            raise ValueError(f"one KV group is supported, not {len(program.kv_groups)}")
        self.prepared = prepare(program, weights, dtype=dtype, kv_dtype=kv_dtype, fused=fused)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blas = ThreadpoolController().select(user_api="blas")
        parts = [self.name, f"numpy-{np.__version__}", *_blas_names(self._blas), platform.machine()]
        parts += [np.dtype(dtype).name, f"kv-{kv_dtype}"]
        parts += [f"program-{program.digest}", f"weights-{weights_digest}"]
        self.notes: tuple[str, ...] = ()
        self.fingerprint = " ".join(parts)
        group = program.kv_groups[0]
        self.pages = PageStore(group, num_blocks, block_size, kv_dtype, self.fingerprint)
        self._limits = BatchLimits(program, num_blocks, block_size)
        self._dtype = dtype
        self._clock = clock
        self._body = _with_last_uses(self.prepared.program)
        self._head = self.prepared.program.head

    def submit(self, batch: Batch) -> Future[StepResult]:
        """Copy blocks, run the whole step, sample. Errors arrive through the future."""
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._step(batch))
        except Exception as error:
            future.set_exception(error)
        return future

    def logits(self, batch: Batch) -> Floats:
        """Run the step and return the logits of `batch.logit_rows`, (R, vocab_size)."""
        vocab = self.prepared.program.vocab_size
        out = np.empty((len(batch.logit_rows), vocab), self._dtype)
        with self._one_thread():
            for first, tile in self._logit_tiles(self._run_body(batch)):
                out[first : first + TILE] = tile
        return out

    def export_blocks(self, blocks: Ordered[int]) -> bytes:
        """Return the keys and values of `blocks` as opaque bytes that `import_blocks` accepts."""
        return self.pages.export_blocks(blocks)

    def import_blocks(self, blocks: Ordered[int], content: bytes) -> None:
        """Overwrite `blocks`; raises `ValueError` if the content is of another model or format."""
        self.pages.import_blocks(blocks, content)

    def close(self) -> None:
        """Release the pool and the weights; nothing may be submitted afterwards."""
        self.__dict__.pop("pages", None)
        self.__dict__.pop("prepared", None)

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        """Where products are computed: the number of BLAS threads would change their bits."""
        with self._blas.limit(limits=1), np.errstate(over="ignore", invalid="ignore"):
            yield

    def _step(self, batch: Batch) -> StepResult:
        started = self._clock()
        with self._one_thread():
            run = self._run_body(batch)
            tiles = self._logit_tiles(run)
            floats = ((first, tile.astype(np.float32, copy=False)) for first, tile in tiles)
            result = sample_tiles(batch, floats)
            wanted, states = batch.state_rows, None
            if len(wanted):
                states = self._states(run, wanted)[: len(wanted)].astype(np.float32, copy=False)
        return replace(result, duration=self._clock() - started, states=states)

    def _run_body(self, batch: Batch) -> "_Run":
        """Run what concerns every row."""
        self._limits.check(batch)
        run = _Run(self.prepared.weights, self.pages, batch, self._dtype)
        for source, destination in batch.copies.tolist():
            self.pages.copy(source, destination)
        for op, dead in self._body:
            run.execute(op)
            for name in dead:
                del run.values[name]
        return run

    def _logit_tiles(self, run: "_Run") -> Iterator[tuple[int, Floats]]:
        """Give the logits of a tile of `logit_rows` at a time, and which comes first.

        A vocabulary of 262k takes 17 MB per tile, so all rows at once could take gigabytes.
        """
        product, rows = self._head[-2], run.batch.logit_rows
        (state,), (logits,) = product.inputs, product.outputs
        if not len(rows):
            return
        states = self._states(run, rows)
        for first in range(0, len(rows), TILE):
            run.values[state.name] = states[first : first + TILE]
            run.execute(product)
            yield first, run.values[logits.name][: len(rows) - first]

    def _states(self, run: "_Run", rows: Int32) -> Floats:
        """Return the final states of `rows`, padded: the head without the vocabulary's product."""
        run.selected = rows
        for op in self._head[:-2]:
            run.execute(op)
        return run.values[self.prepared.program.state]


def _with_last_uses(program: Program) -> list[tuple[ops.Operation, tuple[str, ...]]]:
    """Pair each operation of the body with the values that nothing after it reads, to be freed."""
    operations = program.body
    last: dict[str, int] = {}
    for index, op in enumerate(operations):
        last.update(dict.fromkeys([name for name, _ in op.inputs + op.outputs], index))
    read_after = [name for op in program.head for name, _ in op.inputs]
    last.update(dict.fromkeys(read_after, len(operations)))
    return [
        (
            op,
            tuple(n for n in dict.fromkeys(v.name for v in op.inputs + op.outputs) if last[n] == i),
        )
        for i, op in enumerate(operations)
    ]


def _blas_names(blas: ThreadpoolController) -> list[str]:
    """Library, version and instruction set: what decides the bits of a product."""
    keys = ("internal_api", "version", "architecture")
    return ["-".join(str(library.get(key)) for key in keys) for library in blas.info()]


class _Run:
    """One batch on its way through the program: named values of whole tiles of rows."""

    def __init__(
        self, weights: Mapping[str, Floats], pages: PageStore, batch: Batch, dtype: Any
    ) -> None:
        self.weights = weights
        self.pages = pages
        self.batch = batch
        self.dtype = dtype
        self.num_rows = len(batch.token_ids)
        self.values: dict[str, Floats] = {}
        self.selected = batch.logit_rows
        self._turns: dict[tuple[float, ...], tuple[Floats, Floats]] = {}
        lengths = np.diff(batch.chunk_starts)
        chunk_of_row = np.repeat(np.arange(len(lengths)), lengths)
        self._blocks = batch.block_tables[chunk_of_row, batch.positions // pages.block_size]
        self._slots = batch.positions % pages.block_size
        self._chunks = list(
            zip(
                batch.chunk_starts[:-1].tolist(),
                batch.chunk_starts[1:].tolist(),
                batch.context_lengths.tolist(),
                batch.block_tables,
                strict=True,
            )
        )

    def execute(self, op: ops.Operation) -> None:
        """Define the operation's outputs from its inputs."""
        _KINDS[type(op)](self, op)

    def embed(self, op: ops.Embed) -> None:
        rows = np.zeros((padded(self.num_rows), op.width), self.dtype)
        rows[: self.num_rows] = self.weights[op.table][self.batch.token_ids]
        if op.scale != 1.0:
            rows *= self.dtype(op.scale)
        self.values[op.out] = rows

    def rms_norm(self, op: ops.RMSNorm) -> None:
        x = self.values[op.x]
        heads = x.reshape(len(x), op.heads, -1)
        normalised = arithmetic.rms_norm(heads, self.weights[op.weight], op.eps)
        self.values[op.out] = normalised.reshape(x.shape)

    def add_rms_norm(self, op: ops.AddRMSNorm) -> None:
        self.values[op.total] = total = self.values[op.x] + self.values[op.y]
        self.values[op.out] = arithmetic.rms_norm(total, self.weights[op.weight], op.eps)

    def linear(self, op: ops.Linear) -> None:
        """One product per weight, whether fused or not: BLAS never sees the joint width."""
        x = self.values[op.x]
        out = np.empty((len(x), sum(op.out_widths)), self.dtype)
        end = 0
        for weight, bias, width in zip(op.weights, op.biases, op.out_widths, strict=True):
            columns = out[:, end : end + width]
            arithmetic.linear(x, self.weights[weight], columns)
            if bias:
                columns += self.weights[bias]
            end += width
        if op.gate:
            out = _ACTIVATIONS[op.gate](out[:, : op.width]) * out[:, op.width :]
        self.values[op.out] = self.values[op.addend] + out if op.addend else out

    def split(self, op: ops.Split) -> None:
        ends = np.cumsum(op.widths)[:-1]
        self.values.update(zip(op.outs, np.split(self.values[op.x], ends, axis=1), strict=True))

    def rope(self, op: ops.Rope) -> None:
        x = self.values[op.x]
        if op.frequencies not in self._turns:
            positions = np.zeros(len(x), np.int32)
            positions[: self.num_rows] = self.batch.positions
            self._turns[op.frequencies] = arithmetic.turns(positions, op.frequencies, self.dtype)
        heads = x.reshape(len(x), op.heads, op.head_dim)
        turned = arithmetic.rope(heads, *self._turns[op.frequencies])
        self.values[op.out] = turned.reshape(x.shape)

    def write_kv(self, op: ops.WriteKV) -> None:
        shape = (self.num_rows, op.kv_heads, op.head_dim)
        k, v = (self.values[name][: self.num_rows].reshape(shape) for name in (op.k, op.v))
        self.pages.write(op.layer, self._blocks, self._slots, k, v)

    def attention(self, op: ops.Attention) -> None:
        q = self.values[op.q].reshape(-1, op.heads, op.head_dim)
        self.values[op.out] = out = np.zeros((len(q), op.heads * op.head_dim), self.dtype)
        for first, last, context, table in self._chunks:
            mixed = arithmetic.attention(
                q[first:last],
                context - (last - first),
                self._reader(op.layer, context, table),
                kv_heads=op.kv_heads,
                scale=op.scale,
                window=op.window,
            )
            out[first:last] = mixed.reshape(last - first, -1)

    def _reader(
        self, layer: int, context: int, table: Int32
    ) -> Callable[[int], tuple[Floats, Floats]]:
        size = self.pages.block_size

        def read(start: int) -> tuple[Floats, Floats]:
            end = min(context, start + SEGMENT)
            blocks = table[start // size : -(-end // size)]
            k, v = self.pages.read(layer, blocks, end - start, SEGMENT)
            return k.astype(self.dtype, copy=False), v.astype(self.dtype, copy=False)

        return read

    def gated_activation(self, op: ops.GatedActivation) -> None:
        self.values[op.out] = _ACTIVATIONS[op.kind](self.values[op.gate]) * self.values[op.up]

    def add(self, op: ops.Add) -> None:
        self.values[op.out] = self.values[op.x] + self.values[op.y]

    def select_rows(self, op: ops.SelectRows) -> None:
        rows = np.zeros((padded(len(self.selected)), op.width), self.dtype)
        rows[: len(self.selected)] = self.values[op.x][self.selected]
        self.values[op.out] = rows


_ACTIVATIONS: Mapping[ops.Gate, Callable[[Floats], Floats]] = {
    "silu": arithmetic.silu,
    "gelu_tanh": arithmetic.gelu_tanh,
}
_KINDS: Mapping[type[ops.Operation], Callable[[_Run, Any], None]] = {
    ops.Embed: _Run.embed,
    ops.RMSNorm: _Run.rms_norm,
    ops.AddRMSNorm: _Run.add_rms_norm,
    ops.Linear: _Run.linear,
    ops.Split: _Run.split,
    ops.Rope: _Run.rope,
    ops.WriteKV: _Run.write_kv,
    ops.Attention: _Run.attention,
    ops.GatedActivation: _Run.gated_activation,
    ops.Add: _Run.add,
    ops.SelectRows: _Run.select_rows,
}
