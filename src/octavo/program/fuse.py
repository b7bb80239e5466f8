"""Rewrites of a program into an equal one with fewer, larger operations.

Decides which neighbours become one: products of the same input, and a residual addition with the
norm that follows. Knows no executor.

Invariant: parameters, flops, and the values that both programs name are unchanged.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby

from octavo.program.ops import Add, AddRMSNorm, Linear, Operation, RMSNorm, Split
from octavo.program.program import Program


def fuse(program: Program) -> Program:
    """Return the program with every rewrite of this module applied."""
    operations = _join_products(program.operations)
    return replace(program, operations=tuple(_fold_additions(operations)))


def _join_products(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Neighbouring products of one value become one product, split again by name."""

    def source(op: Operation) -> str | None:
        return op.x if isinstance(op, Linear) else None

    for name, run in groupby(operations, source):
        members = list(run)
        joinable = name is not None and len(members) > 1
        yield from _joined(members) if joinable else members


def _joined(operations: list[Operation]) -> tuple[Operation, ...]:
    products = [op for op in operations if isinstance(op, Linear)]
    outs = tuple(product.out for product in products)
    widths = tuple(sum(product.out_widths) for product in products)
    product = replace(
        products[0],
        out="|".join(outs),
        weights=tuple(chain.from_iterable(p.weights for p in products)),
        out_widths=tuple(chain.from_iterable(p.out_widths for p in products)),
        biases=tuple(chain.from_iterable(p.biases for p in products)),
    )
    return product, Split(product.out, outs, widths)


def _fold_additions(operations: Iterable[Operation]) -> Iterator[Operation]:
    """An addition whose sum the next operation normalises becomes one operation with it."""
    held: Add | None = None  # never the last operation: a program ends in Sample
    for op in operations:
        if held and isinstance(op, RMSNorm) and op.x == held.out and op.heads == 1:
            yield AddRMSNorm(held.x, held.y, held.out, op.out, op.weight, op.width, op.eps)
            held = None
            continue
        if held:
            yield held
        held = op if isinstance(op, Add) else None
        if not held:
            yield op
