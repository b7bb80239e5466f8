"""A program as a table of plain rows.

Decides how operations are grouped by layer, and which layers are shown as one. Prints nothing.
Invariant: the rows' flops and bytes, times how often each stands for, are the program's.
"""

import re
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from octavo.program.ops import Attention, ElementSizes, Operation
from octavo.program.program import Program

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Row:
    """One operation, or the same one of several equal neighbouring layers.

    layers: first and last layer, or None outside layers. operation: its kind. reads, writes:
    values with their widths. parameters: names with their shapes; in all three, N is the layer's
    number and P the one before. num_parameters: numbers in them. flops, bytes: of one token and
    one layer. window: positions seen at most, where there is a limit.
    """

    layers: tuple[int, int] | None
    operation: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[str, ...]
    num_parameters: int
    flops: int
    bytes: float
    window: int | None = None

    @property
    def count(self) -> int:
        """How many operations the row stands for."""
        return 1 if self.layers is None else self.layers[1] - self.layers[0] + 1


def describe(
    program: Program,
    context: int = 1,
    sizes: ElementSizes | None = None,
    *,
    fold: bool = True,
) -> list[Row]:
    """Return the table for decoding one token that sees `context` positions.

    sizes: bytes per element, by default float32 and 16-bit keys and values. fold: show equal
    neighbouring layers once.
    """
    sizes = sizes or ElementSizes()
    layers = [(number, list(run)) for number, run in groupby(program.operations, _layer_of)]
    rows: list[Row] = []
    for _, equal in groupby(layers, _likeness if fold else itemgetter(0)):
        members = list(equal)
        (first, operations), (last, _) = members[0], members[-1]
        span = None if first is None or last is None else (first, last)
        rows += [_row(op, span, context, sizes) for op in operations]
    return rows


def _layer_of(op: Operation) -> int | None:
    """The layer of what an operation writes last: a fused sum and norm opens the next layer."""
    name = (op.outputs or op.inputs)[-1].name
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def _likeness(layer: tuple[int | None, list[Operation]]) -> tuple[str, ...]:
    """What equal layers share: everything but their number."""
    number, operations = layer
    return tuple(re.sub(r"layer=\d+", "", _anonymous(repr(op), number)) for op in operations)


def _anonymous(text: str, number: int | None) -> str:
    if number is None:
        return text
    return text.replace(f"layers.{number}.", "layers.N.").replace(
        f"layers.{number - 1}.", "layers.P."
    )


def _row(op: Operation, layers: tuple[int, int] | None, context: int, sizes: ElementSizes) -> Row:
    number = layers[0] if layers else None
    return Row(
        layers=layers,
        operation=type(op).__name__,
        reads=tuple(f"{_anonymous(name, number)} {width}" for name, width in op.inputs),
        writes=tuple(f"{_anonymous(name, number)} {width}" for name, width in op.outputs),
        parameters=tuple(
            f"{_anonymous(name, number)} {'x'.join(map(str, shape))}"
            for name, shape in op.parameters
        ),
        num_parameters=sum(parameter.size for parameter in op.parameters),
        flops=op.flops(1, context),
        bytes=op.traffic(sizes, 1, context).total,
        window=op.window if isinstance(op, Attention) else None,
    )
