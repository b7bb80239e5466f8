"""A program as a table of plain rows.

Decides how operations are grouped by layer, and which layers are shown as one. Prints nothing.
Invariant: the rows' flops and bytes, times how often each stands for, are the program's.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from octavo.program.ops import ElementSizes, Operation
from octavo.program.program import Program

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Row:
    """One operation, or the same one of several equal neighbouring layers.

    layers: first and last layer, or None outside layers. operation: its kind. reads, writes:
    values with their widths. parameters: names with their shapes; in both, N is the layer's number.
    num_parameters: numbers in them. flops, bytes: of one token, of one of the layers.
    """

    layers: tuple[int, int] | None
    operation: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[str, ...]
    num_parameters: int
    flops: int
    bytes: float

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
    layers = groupby(program.operations, _layer_of)
    groups = [(layer, [_row(op, layer, context, sizes) for op in ops]) for layer, ops in layers]
    return [row for rows in (_folded(groups) if fold else (g[1] for g in groups)) for row in rows]


def _layer_of(op: Operation) -> int | None:
    """The layer of what the operation writes last: a fused sum and norm opens the next layer."""
    for name, _ in (*reversed(op.outputs), *op.inputs):
        if match := _LAYER.match(name):
            return int(match[1])
        if op.outputs:
            return None
    return None


def _row(op: Operation, layer: int | None, context: int, sizes: ElementSizes) -> Row:
    def anonymous(name: str) -> str:
        return name.replace(f"layers.{layer}.", "layers.N.")

    return Row(
        layers=None if layer is None else (layer, layer),
        operation=type(op).__name__,
        reads=tuple(f"{anonymous(name)} {width}" for name, width in op.inputs),
        writes=tuple(f"{anonymous(name)} {width}" for name, width in op.outputs),
        parameters=tuple(
            f"{anonymous(p.name)} {'x'.join(map(str, p.shape))}" for p in op.parameters
        ),
        num_parameters=sum(p.size for p in op.parameters),
        flops=op.flops(1, context),
        bytes=op.traffic(sizes, 1, context).total,
    )


def _folded(groups: list[tuple[int | None, list[Row]]]) -> Iterator[list[Row]]:
    """Join runs of layers whose rows differ in nothing but the layer."""

    def shape(group: tuple[int | None, list[Row]]) -> tuple[bool, list[Row]]:
        layer, rows = group
        return layer is None, [replace(row, layers=None) for row in rows]

    for _, run in groupby(groups, shape):
        members = list(run)
        first, last = members[0][0], members[-1][0]
        if first is None or last is None:
            yield from (rows for _, rows in members)
        else:
            yield [replace(row, layers=(first, last)) for row in members[0][1]]
