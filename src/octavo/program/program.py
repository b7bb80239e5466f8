"""A model as a flat list of operations, and the builder that a family file writes it with.

Decides what a well-formed program is and what one step of it costs in operations and bytes. Knows
no arrays, no file format and no hardware.

Invariant: every value is defined once, before its first use and with one width; `SelectRows`, side
by side, part the program in a body, which runs on every row, and a head, which reads of the body
only what they select and ends in the vocabulary's product and the one `Sample`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from octavo.program.ops import (
    Add,
    Attention,
    ElementSizes,
    Embed,
    GatedActivation,
    Linear,
    Operation,
    RMSNorm,
    Rope,
    Sample,
    SelectRows,
    Traffic,
    Value,
    WriteKV,
)


class KVGroup(NamedTuple):
    """Layers that share one block table per sequence."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        """Numbers kept per token: a key and a value per layer and head."""
        return 2 * self.layers * self.kv_heads * self.head_dim


class Chunk(NamedTuple):
    """`rows` consecutive tokens of one sequence; the last sees `context` positions with itself."""

    rows: int
    context: int


@dataclass(frozen=True)
class Program:
    """A network. Raises `ValueError` that names the operation if it is not well formed.

    max_context: most positions that the model was made for. parameters: every weight's shape.
    """

    operations: tuple[Operation, ...]
    kv_groups: tuple[KVGroup, ...]
    vocab_size: int
    max_context: int
    parameters: Mapping[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", _check(self))

    @cached_property
    def body(self) -> tuple[Operation, ...]:
        """What runs on every row."""
        return self.operations[: self._select]

    @cached_property
    def head(self) -> tuple[Operation, ...]:
        """`SelectRows` and what runs on the selected rows; `Sample` is the last."""
        return self.operations[self._select :]

    @property
    def state(self) -> str:
        """Name of the final state of the selected rows: what the vocabulary's product reads."""
        return self.operations[-2].inputs[0].name

    @cached_property
    def _select(self) -> int:
        return next(i for i, op in enumerate(self.operations) if isinstance(op, SelectRows))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything above, in hexadecimal."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def kv_bytes_per_token(self, element_size: float = 2.0) -> float:
        """Bytes that one token's keys and values take in the pages."""
        return sum(group.elements_per_token for group in self.kv_groups) * element_size

    def flops(self, chunks: Iterable[Chunk], logit_rows: int) -> int:
        """Floating-point operations of one step over `chunks`, with logits for some rows."""
        body = sum(op.flops(*chunk) for chunk in chunks for op in self.body)
        return body + sum(op.flops(logit_rows) for op in self.head)

    def flops_per_token(self, context: int) -> int:
        """Floating-point operations of decoding one token that sees `context` positions."""
        return self.flops([Chunk(1, context)], logit_rows=1)

    def traffic(self, chunks: Iterable[Chunk], logit_rows: int, sizes: ElementSizes) -> Traffic:
        """Bytes moved by one step: weights once, everything else per chunk."""
        chunks = list(chunks)
        num_rows = sum(chunk.rows for chunk in chunks)
        total = Traffic()
        for op in self.body:
            total = total.plus(Traffic(weights=op.traffic(sizes, num_rows).weights))
            for chunk in chunks:
                total = total.plus(op.traffic(sizes, *chunk)._replace(weights=0.0))
        for op in self.head:
            total = total.plus(op.traffic(sizes, logit_rows))
        return total


def _check(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes of a well-formed program; raise `ValueError` for another."""
    widths: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    written: set[tuple[int, int]] = set()
    for index, op in enumerate(program.operations):
        where = f"operation {index} ({type(op).__name__})"
        for name, width in op.inputs:
            if name not in widths:
                raise ValueError(f"{where} reads {name!r}, which nothing before it defines")
            if widths[name] != width:
                raise ValueError(f"{where} reads {name!r} {width} wide, but it is {widths[name]}")
        for name, width in op.outputs:
            if name in widths:
                raise ValueError(f"{where} defines {name!r} a second time")
            if width < 1:
                raise ValueError(f"{where} defines {name!r} with a width of {width}")
            widths[name] = width
        for name, shape in op.parameters:
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{where} reads {name!r} as {shape}, but it is {shapes[name]}")
        _check_heads(op, where)
        _check_pages(op, where, program.kv_groups, written)
    _check_rows(program.operations)
    _check_end(program.operations)
    return shapes


def _check_heads(op: Operation, where: str) -> None:
    match op:
        case RMSNorm(width=width, heads=heads) if width % heads:
            raise ValueError(f"{where} cannot part {width} elements among {heads} heads")
        case Rope(head_dim=size, frequencies=turns) if size != 2 * len(turns):
            raise ValueError(f"{where} has {len(turns)} frequencies for heads of {size}")
        case Attention(heads=heads, kv_heads=kv_heads) if heads % kv_heads:
            raise ValueError(f"{where} cannot share {kv_heads} KV heads among {heads} heads")
        case Attention(window=int(window)) if window < 1:
            raise ValueError(f"{where} has a window of {window}")
        case _:
            pass


def _check_pages(
    op: Operation, where: str, groups: tuple[KVGroup, ...], written: set[tuple[int, int]]
) -> None:
    if not isinstance(op, WriteKV | Attention):
        return
    place = (op.group, op.layer)
    if not (0 <= op.group < len(groups) and 0 <= op.layer < groups[op.group].layers):
        raise ValueError(
            f"{where} uses layer {op.layer} of KV group {op.group}, which is not there"
        )
    if (op.kv_heads, op.head_dim) != groups[op.group][1:]:
        raise ValueError(f"{where} does not fit its KV group {groups[op.group]}")
    if isinstance(op, Attention) and place not in written:
        raise ValueError(f"{where} reads pages of layer {op.layer} before they are written")
    if isinstance(op, WriteKV) and place in written:
        raise ValueError(f"{where} writes the pages of layer {op.layer} a second time")
    written.add(place)


def _check_rows(operations: tuple[Operation, ...]) -> None:
    """Require that selected rows are all that the head needs, and that it knows no others."""
    selects = [i for i, op in enumerate(operations) if isinstance(op, SelectRows)]
    if not selects:
        raise ValueError("a program has SelectRows, and this one has none")
    first = selects[0]
    if selects[-1] - first >= len(selects):
        raise ValueError(f"SelectRows stand side by side, but operations {selects} do not")
    of_every_row = {value.name for op in operations[:first] for value in op.outputs}
    for index, op in enumerate(operations[first:], first):
        where = f"operation {index} ({type(op).__name__})"
        if isinstance(op, Embed | Rope | WriteKV | Attention):
            raise ValueError(f"{where} needs every row: it comes before SelectRows")
        for name, _ in op.inputs:
            if (name in of_every_row) != isinstance(op, SelectRows):
                rows = "every row" if name in of_every_row else "selected rows"
                raise ValueError(f"{where} cannot read {name!r}, which has {rows}")


def _check_end(operations: tuple[Operation, ...]) -> None:
    kinds = [type(op) for op in operations]
    if kinds.count(Sample) != 1 or kinds[-1] is not Sample:
        raise ValueError("a program has one Sample, and it is the last operation")
    product = operations[-2]
    is_plain = isinstance(product, Linear) and len(product.inputs) == 1
    if not is_plain or product.outputs != operations[-1].inputs:
        raise ValueError("Sample reads the plain product that stands before it")


class Builder:
    """Writes a program one operation at a time; each method returns the value that it defines.

    A value is named after the weight that made it, or its input and what was done to that.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def _add(self, op: Operation) -> Value:
        self.operations.append(op)
        return op.outputs[0]

    def embed(self, table: str, vocab_size: int, width: int, scale: float = 1.0) -> Value:
        """Look the batch's tokens up."""
        return self._add(Embed(table, table, vocab_size, width, scale))

    def norm(self, x: Value, weight: str, eps: float, heads: int = 1) -> Value:
        """RMS norm of the whole row, or of each of `heads` heads."""
        return self._add(RMSNorm(x.name, weight, weight, x.width, eps, heads))

    def linear(
        self, x: Value, weight: str, width: int, *, bias: bool = False, out: str | None = None
    ) -> Value:
        """Multiply by one matrix to `width` columns; the bias is named WEIGHT_bias."""
        biases = (f"{weight}_bias" if bias else None,)
        return self._add(Linear(x.name, out or weight, (weight,), x.width, (width,), biases))

    def rope(self, x: Value, head_dim: int, frequencies: tuple[float, ...]) -> Value:
        """Turn each head by the row's position."""
        out = f"{x.name}.rope"
        return self._add(Rope(x.name, out, x.width // head_dim, head_dim, frequencies))

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        out: str,
        layer: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
    ) -> Value:
        """Write the row's keys and values, then attend to the pages."""
        heads, kv_heads = q.width // head_dim, k.width // head_dim
        self.operations.append(WriteKV(k.name, v.name, layer, kv_heads, head_dim))
        return self._add(Attention(q.name, out, layer, heads, kv_heads, head_dim, scale, window))

    def gated(self, gate: Value, up: Value, kind: Literal["silu", "gelu_tanh"]) -> Value:
        """Multiply `up` by the activated `gate`."""
        return self._add(GatedActivation(gate.name, up.name, f"{up.name}.gated", up.width, kind))

    def add(self, x: Value, y: Value) -> Value:
        """Add y to the residual stream x."""
        return self._add(Add(x.name, y.name, f"{y.name}.sum", x.width))

    def select_rows(self, x: Value, out: str | None = None) -> Value:
        """Keep the rows that need logits."""
        return self._add(SelectRows(x.name, out or f"{x.name}.selected", x.width))

    def sample(self, logits: Value, kv_group: KVGroup, max_context: int) -> Program:
        """Close the program with `Sample` and check it."""
        self.operations.append(Sample(logits.name, logits.width))
        return Program(tuple(self.operations), (kv_group,), logits.width, max_context)
