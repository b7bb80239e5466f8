"""Networks and weights for the native executor, and the reference on the very same numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.executors.cpu import CPUExecutor
from octavo.executors.packing import PackedMatrix, Scales, format_of, pack
from octavo.executors.reference import ReferenceExecutor
from octavo.native import library, why_missing
from octavo.program.program import Builder, KVGroup, Program
from octavo.weights.quants import dequantize
from octavo.weights.source import TensorType

SCALES: tuple[Scales, ...] = ("group", "channel")
SETS: list[str] = library.instruction_sets() if library else ["none"]
needs_library = pytest.mark.skipif(library is None, reason=why_missing)

# Where the halves of a block lie that scale all of it: random bytes there would be any number.
_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def network(
    *,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    inner: int = 96,
    layers: int = 2,
    vocab: int = 200,
    window: int | None = None,
    bias: bool = False,
    qk_norm: bool = False,
    kind: str = "silu",
    scale: float = 1.0,
    frequency: float = 1.0,
    selects_late: bool = False,
) -> Program:
    """A transformer with whatever shape a test needs; sliding and full layers take turns.

    selects_late: after the last layer instead of in it, so that all of it runs on every row.
    """
    b = Builder()
    turns = tuple(frequency * 100.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    x = b.embed("table", vocab, width, scale)
    for i in range(layers):
        a = b.norm(x, f"{i}.norm", 1e-5)
        q = b.linear(a, f"{i}.q", heads * head_dim, bias=bias)
        k = b.linear(a, f"{i}.k", kv_heads * head_dim, bias=bias)
        v = b.linear(a, f"{i}.v", kv_heads * head_dim, bias=bias)
        if qk_norm:
            q, k = b.norm(q, f"{i}.qn", 1e-6, heads), b.norm(k, f"{i}.kn", 1e-6, kv_heads)
        mixed = b.attention(
            b.rope(q, head_dim, turns),
            b.rope(k, head_dim, turns),
            v,
            out=f"{i}.mix",
            layer=i,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            window=None if i % 2 else window,
        )
        if i == layers - 1 and not selects_late:
            x, mixed = b.select_rows(x), b.select_rows(mixed)
        x = b.add(x, b.linear(mixed, f"{i}.o", width, bias=bias))
        a = b.norm(x, f"{i}.norm2", 1e-5)
        gate, up = b.linear(a, f"{i}.gate", inner), b.linear(a, f"{i}.up", inner)
        x = b.add(x, b.linear(b.gated(gate, up, kind), f"{i}.down", width))  # type: ignore[arg-type]
    x = b.select_rows(x) if selects_late else x
    head = b.linear(b.norm(x, "last", 1e-5), "head", vocab)
    return b.sample(head, KVGroup(layers, kv_heads, head_dim), max_context=2048)


@cache
def stored(dtype: str, shape: tuple[int, int], seed: int = 0, size: float = 1.0) -> np.ndarray:
    """Random weights of about `size` as a file would have them, (outputs, bytes per row)."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[dtype]
    if dtype not in _HALVES:
        values = size * rng.standard_normal(shape, np.float32)
        rows = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)
        rows.flags.writeable = False  # as of a file
        return rows
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, num_bytes), np.uint8)
    for start in _HALVES[dtype]:
        # K types scale twice: 6 or 8 bits times this half.
        halves = (size * rng.uniform(0.001, 0.002, blocks.shape[:2])).astype(np.float16)
        blocks[:, :, start : start + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


class RandomWeights:
    """Every matrix stored as `dtype`; norms near 1, biases near 0."""

    def __init__(self, program: Program, dtype: str = "BF16", seed: int = 0) -> None:
        self._program, self._dtype, self._seed = program, dtype, seed

    def dtype(self, parameter: str) -> str:
        return "F32" if len(self._program.parameters[parameter]) == 1 else self._dtype

    def stored_rows(self, parameter: str) -> np.ndarray:
        outputs, inputs = self._program.parameters[parameter]
        return stored(self._dtype, (outputs, inputs), self._number(parameter), inputs**-0.5)

    def release(self, parameter: str) -> None:
        """Nothing of it is a file."""

    def __call__(self, parameter: str) -> np.ndarray:
        shape = self._program.parameters[parameter]
        if len(shape) == 2:
            flat = np.ascontiguousarray(self.stored_rows(parameter)).reshape(-1)
            return dequantize(flat, TensorType(self._dtype)).reshape(shape)
        values = np.random.default_rng(self._number(parameter)).standard_normal(shape, np.float32)
        return 0.1 * values + (not parameter.endswith("_bias"))

    def _number(self, parameter: str) -> int:
        return 1000 * self._seed + list(self._program.parameters).index(parameter)


@dataclass(frozen=True)
class OneMatrix:
    """A float table, and a head stored as `dtype`."""

    head: RandomWeights
    others: Any

    def of(self, parameter: str) -> Any:
        return self.head if parameter == "head" else self.others

    def dtype(self, parameter: str) -> str:
        return self.of(parameter).dtype(parameter)

    def stored_rows(self, parameter: str) -> np.ndarray:
        return self.of(parameter).stored_rows(parameter)

    def release(self, parameter: str) -> None:
        self.of(parameter).release(parameter)

    def __call__(self, parameter: str) -> np.ndarray:
        return self.of(parameter)(parameter)


@dataclass(frozen=True)
class Table:
    """Float weights with a given table."""

    inner: RandomWeights
    table: np.ndarray

    def dtype(self, parameter: str) -> str:
        return self.inner.dtype(parameter)

    def stored_rows(self, parameter: str) -> np.ndarray:
        if parameter == "table":
            return self.table.view(np.uint8)
        return self.inner.stored_rows(parameter)

    def release(self, parameter: str) -> None:
        self.inner.release(parameter)

    def __call__(self, parameter: str) -> np.ndarray:
        return self.table if parameter == "table" else self.inner(parameter)


def packed(dtype: str, rows: np.ndarray, scales: Scales = "group") -> PackedMatrix:
    """Pack stored rows."""
    kind = TensorType(dtype)
    inputs = rows.shape[1] * kind.block_elements // kind.block_bytes
    return pack(library, inputs, dtype, rows, format_of(dtype, scales))


def unpacked(matrix: PackedMatrix) -> np.ndarray:
    """The numbers that a packed matrix stands for, (outputs, inputs)."""
    assert library is not None
    out = np.empty((matrix.outputs, matrix.inputs), np.float32)
    shape = (matrix.panels.ctypes.data, matrix.outputs, matrix.inputs, matrix.format)
    for number, row in enumerate(out):
        library.unpack_row(*shape, number, row.ctypes.data)
    return out


def packed_values(
    program: Program, weights: Any, scales: Scales = "group"
) -> dict[str, np.ndarray]:
    """Every parameter as the native executor has it: matrices once packed and taken out again."""
    return {
        name: weights(name)
        if len(shape) == 1
        else unpacked(packed(weights.dtype(name), weights.stored_rows(name), scales))
        for name, shape in program.parameters.items()
    }


SMALL: dict[str, Any] = {"num_blocks": 96, "block_size": 32, "kv_dtype": "float32"}


def native(program: Program, weights: Any, isa: str, **settings: Any) -> CPUExecutor:
    """A native executor with float32 pages and scales by group, unless `settings` say otherwise."""
    limits = {"max_rows": 1200, "max_positions": 1200, "num_threads": 1, "scales": "group"}
    return CPUExecutor(
        library,
        program,
        weights,
        instruction_set=isa,
        clock=lambda: 0.0,
        **(SMALL | limits | settings),
    )


def reference(
    program: Program, weights: Any, scales: Scales = "group", **settings: Any
) -> ReferenceExecutor:
    """The reference on the weights that the native executor has."""
    values = packed_values(program, weights, scales)
    return ReferenceExecutor(program, values.__getitem__, clock=lambda: 0.0, **(SMALL | settings))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the largest value."""
    assert np.isfinite(expected).all()
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())


def tables(lengths: list[int], block_size: int, seed: int = 0) -> Iterator[list[int]]:
    """Block tables for sequences of these lengths, in blocks that lie all over the pool."""
    sizes = [-(-length // block_size) for length in lengths]
    blocks = np.random.default_rng(seed).permutation(sum(sizes) + 5).tolist()
    for size in sizes:
        yield [blocks.pop() for _ in range(size)]


@cache
def token_ids(length: int, vocab: int = 200, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, length)


def bits(logits: np.ndarray) -> bytes:
    return np.ascontiguousarray(logits).tobytes()
