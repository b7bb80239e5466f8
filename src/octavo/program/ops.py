"""The operation set: what a network is made of, one frozen dataclass per kind.

Decides each operation's operands, parameters, floating-point operations and bytes. Knows no arrays,
no model family and no hardware. A value is named and has a width, its elements per row; one row is
one token of the batch. Token ids, positions and pages are the batch's and are not named.

Invariant: an output row depends on the same row of the inputs and on its sequence's pages alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Gate = Literal["silu", "gelu_tanh"]
# Of one element, the product included.
_GATE_FLOPS: dict[Gate, int] = {"silu": 5, "gelu_tanh": 10}


class Value(NamedTuple):
    """An operand: its name and its number of elements per row."""

    name: str
    width: int


class Parameter(NamedTuple):
    """A weight: its name and shape; a matrix is (outputs, inputs)."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Traffic(NamedTuple):
    """Bytes that an operation moves between memory and the arithmetic units."""

    weights: float = 0.0
    activations: float = 0.0
    kv_read: float = 0.0
    kv_written: float = 0.0

    @property
    def total(self) -> float:
        """All bytes together."""
        return sum(self)

    def plus(self, other: "Traffic") -> "Traffic":
        """Add kind by kind."""
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes per element; `weight` maps a parameter's name to its own (4.5 / 8 for 4 bits)."""

    weight: Callable[[str], float] = lambda _name: 4.0
    activation: float = 4.0
    kv: float = 2.0


class Operation:
    """What every kind offers. A kind says what it reads, writes and computes per row."""

    __slots__ = ()

    def _inputs(self) -> tuple[Value, ...]:
        raise NotImplementedError

    def _outputs(self) -> tuple[Value, ...]:
        raise NotImplementedError

    def _parameters(self) -> tuple[Parameter, ...]:
        return ()

    def _flops_per_row(self) -> int:
        return 0

    def _traffic(self, sizes: ElementSizes, rows: int, context: int) -> Traffic:
        weights = sum(p.size * sizes.weight(p.name) for p in self.parameters)
        elements = sum(value.width for value in self.inputs + self.outputs)
        return Traffic(weights=weights, activations=rows * elements * sizes.activation)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Values read, with their widths."""
        return self._inputs()

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Values defined, with their widths."""
        return self._outputs()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Weights read, with their shapes."""
        return self._parameters()

    def flops(self, rows: int = 1, context: int = 0) -> int:
        """Floating-point operations for one chunk: `rows` rows, of which the last sees `context`
        positions, itself included. Additions, products, roots and exponentials count one each.
        """
        return rows * self._flops_per_row()

    def traffic(self, sizes: ElementSizes, rows: int = 1, context: int = 0) -> Traffic:
        """Bytes moved for one chunk, as if nothing stayed in a cache between two operations."""
        return self._traffic(sizes, rows, context)


@dataclass(frozen=True, slots=True)
class Embed(Operation):
    """out = table[token id] * scale."""

    out: str
    table: str
    vocab_size: int
    width: int
    scale: float = 1.0

    def _inputs(self) -> tuple[Value, ...]:
        return ()

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.out, self.width),)

    def _parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.table, (self.vocab_size, self.width)),)

    def _flops_per_row(self) -> int:
        return 0 if self.scale == 1.0 else self.width

    def _traffic(self, sizes: ElementSizes, rows: int, context: int) -> Traffic:
        elements = rows * self.width
        return Traffic(elements * sizes.weight(self.table), elements * sizes.activation)


@dataclass(frozen=True, slots=True)
class RMSNorm(Operation):
    """out = x / sqrt(mean(x^2) + eps) * weight, over each of `heads` equal parts of a row.

    Zhang and Sennrich 2019 (arXiv 1910.07467); more than one head is "QK norm".
    """

    x: str
    out: str
    weight: str
    width: int
    eps: float
    heads: int = 1

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.x, self.width),)

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.out, self.width),)

    def _parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.weight, (self.width // self.heads,)),)

    def _flops_per_row(self) -> int:
        return 4 * self.width + 4 * self.heads


@dataclass(frozen=True, slots=True)
class AddRMSNorm(Operation):
    """total = x + y; out = RMSNorm(total). The fused form of Add and RMSNorm."""

    x: str
    y: str
    total: str
    out: str
    weight: str
    width: int
    eps: float

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.x, self.width), Value(self.y, self.width))

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.total, self.width), Value(self.out, self.width))

    def _parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.weight, (self.width,)),)

    def _flops_per_row(self) -> int:
        return 5 * self.width + 4


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """out = the columns of x W^T + b for each weight W in turn.

    weights: names of (out_widths[i], in_width) matrices. biases: parallel, or None. Fused forms:
    with a `gate`, of two weights, out = gate(the first's columns) * the second's, see
    GatedActivation; with an `addend`, out = addend + columns. No operation has both.
    Flops: two per weight and row (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
    """

    x: str
    out: str
    weights: tuple[str, ...]
    in_width: int
    out_widths: tuple[int, ...]
    biases: tuple[str | None, ...]
    gate: Gate | None = None
    addend: str | None = None

    @property
    def width(self) -> int:
        """Columns of `out`."""
        return self.out_widths[0] if self.gate else sum(self.out_widths)

    def _inputs(self) -> tuple[Value, ...]:
        x = Value(self.x, self.in_width)
        return (x, Value(self.addend, self.width)) if self.addend else (x,)

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.out, self.width),)

    def _parameters(self) -> tuple[Parameter, ...]:
        named = zip(self.weights, self.out_widths, strict=True)
        matrices = (Parameter(name, (width, self.in_width)) for name, width in named)
        named_biases = zip(self.biases, self.out_widths, strict=True)
        return (*matrices, *(Parameter(name, (width,)) for name, width in named_biases if name))

    def _flops_per_row(self) -> int:
        products = sum((2 if len(p.shape) == 2 else 1) * p.size for p in self.parameters)
        each = _GATE_FLOPS[self.gate] if self.gate else 1 if self.addend else 0
        return products + each * self.width


@dataclass(frozen=True, slots=True)
class Split(Operation):
    """Name consecutive columns of x. Moves nothing: the parts are views."""

    x: str
    outs: tuple[str, ...]
    widths: tuple[int, ...]

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.x, sum(self.widths)),)

    def _outputs(self) -> tuple[Value, ...]:
        return tuple(map(Value, self.outs, self.widths))

    def _traffic(self, sizes: ElementSizes, rows: int, context: int) -> Traffic:
        return Traffic()


@dataclass(frozen=True, slots=True)
class Rope(Operation):
    """Turn the pairs (x[i], x[i + head_dim/2]) of each head by position * frequencies[i] radians.

    Su et al. 2021 (arXiv 2104.09864), in the "rotate half" order of Hugging Face.
    """

    x: str
    out: str
    heads: int
    head_dim: int
    frequencies: tuple[float, ...]

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.x, self.heads * self.head_dim),)

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.out, self.heads * self.head_dim),)

    def _flops_per_row(self) -> int:
        return 3 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class WriteKV(Operation):
    """Store this row's keys and values in the pages of `layer` of KV group `group`."""

    k: str
    v: str
    layer: int
    kv_heads: int
    head_dim: int
    group: int = 0

    def _inputs(self) -> tuple[Value, ...]:
        width = self.kv_heads * self.head_dim
        return (Value(self.k, width), Value(self.v, width))

    def _outputs(self) -> tuple[Value, ...]:
        return ()

    def _traffic(self, sizes: ElementSizes, rows: int, context: int) -> Traffic:
        elements = rows * 2 * self.kv_heads * self.head_dim
        return Traffic(activations=elements * sizes.activation, kv_written=elements * sizes.kv)


@dataclass(frozen=True, slots=True)
class Attention(Operation):
    """out = softmax(q K^T * scale) V over the pages of `layer`: causal, grouped-query.

    A row at position p sees positions (p - window, p], or [0, p] where `window` is None. Keys and
    values count as read once per chunk.
    """

    q: str
    out: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    group: int = 0

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.q, self.heads * self.head_dim),)

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.out, self.heads * self.head_dim),)

    def seen(self, rows: int, context: int) -> int:
        """Pairs of a row and a position that it sees, in one chunk (arithmetic series)."""
        window = context if self.window is None else self.window
        whole = max(0, min(rows, context - window))  # rows that see `window` positions, no fewer
        longest = min(context - whole, window)
        ramp = rows - whole
        return whole * window + ramp * longest - ramp * (ramp - 1) // 2

    def flops(self, rows: int = 1, context: int = 0) -> int:
        """Two products of 2 head_dim flops and four for the softmax, per pair seen and head."""
        return self.seen(rows, context) * self.heads * (4 * self.head_dim + 4)

    def read(self, rows: int, context: int) -> int:
        """Positions whose keys and values one chunk reads."""
        return context if self.window is None else min(context, self.window + rows - 1)

    def _traffic(self, sizes: ElementSizes, rows: int, context: int) -> Traffic:
        activations = rows * 2 * self.heads * self.head_dim * sizes.activation
        kv_read = self.read(rows, context) * 2 * self.kv_heads * self.head_dim * sizes.kv
        return Traffic(activations=activations, kv_read=kv_read)


@dataclass(frozen=True, slots=True)
class GatedActivation(Operation):
    """out = kind(gate) * up (Shazeer 2020, arXiv 2002.05202).

    silu(x) = x / (1 + exp(-x)); gelu_tanh is the approximation with tanh of Hendrycks and Gimpel
    2016 (arXiv 1606.08415).
    """

    gate: str
    up: str
    out: str
    width: int
    kind: Gate

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.gate, self.width), Value(self.up, self.width))

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.out, self.width),)

    def _flops_per_row(self) -> int:
        return self.width * _GATE_FLOPS[self.kind]


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """out = x + y: a residual connection."""

    x: str
    y: str
    out: str
    width: int

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.x, self.width), Value(self.y, self.width))

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.out, self.width),)

    def _flops_per_row(self) -> int:
        return self.width


@dataclass(frozen=True, slots=True)
class SelectRows(Operation):
    """Keep the rows that need logits; what follows runs on those alone.

    It stands after the last attention: from there on, a row is of use to nobody but itself.
    """

    x: str
    out: str
    width: int

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.x, self.width),)

    def _outputs(self) -> tuple[Value, ...]:
        return (Value(self.out, self.width),)


@dataclass(frozen=True, slots=True)
class Sample(Operation):
    """Draw tokens and report log-probabilities from the logits: the last operation.

    Priced as greedy with one log-sum-exp: a comparison, a subtraction, an exponential, an addition.
    """

    logits: str
    vocab_size: int

    def _inputs(self) -> tuple[Value, ...]:
        return (Value(self.logits, self.vocab_size),)

    def _outputs(self) -> tuple[Value, ...]:
        return ()

    def _flops_per_row(self) -> int:
        return 4 * self.vocab_size
