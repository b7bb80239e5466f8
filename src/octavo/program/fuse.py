"""Rewrites of a program into an equal one with fewer, larger operations.

Decides which neighbours become one: products of the same input, what is done to a product's columns
(the activation of two halves, a residual addition), and an addition with the norm that follows.
Knows no executor.

Invariant: parameters and flops are unchanged, and so is every value that is left.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby

from octavo.program.ops import Add, AddRMSNorm, GatedActivation, Linear, Operation, RMSNorm, Split
from octavo.program.program import Program


def fuse(program: Program) -> Program:
    """Return the program with every rewrite of this module applied."""
    operations = _fold_activations(_join_products(program.operations))
    operations = _fold_additions_into_products(operations)
    return replace(program, operations=tuple(_fold_additions_into_norms(operations)))


def _join_products(operations: Iterable[Operation]) -> list[Operation]:
    """Neighbouring products of one value become one product, split again by name."""

    def source(op: Operation) -> str | None:
        return op.x if isinstance(op, Linear) else None

    joined: list[Operation] = []
    for name, run in groupby(operations, source):
        members = list(run)
        joinable = name is not None and len(members) > 1
        joined += _joined(members) if joinable else members
    return joined


def _joined(operations: list[Operation]) -> Iterable[Operation]:
    products = [op for op in operations if isinstance(op, Linear)]
    if any(product.gate or product.addend for product in products):
        return operations
    outs = tuple(product.out for product in products)
    widths = tuple(product.width for product in products)
    product = replace(
        products[0],
        out="|".join(outs),
        weights=tuple(chain.from_iterable(p.weights for p in products)),
        out_widths=tuple(chain.from_iterable(p.out_widths for p in products)),
        biases=tuple(chain.from_iterable(p.biases for p in products)),
    )
    return product, Split(product.out, outs, widths)


def _fold_activations(operations: list[Operation]) -> list[Operation]:
    """Two products of which one gates the other become one operation that gives the result."""
    readers = _readers(operations)
    folded: list[Operation] = []
    for op in operations:
        match op, folded[-2:]:
            case (
                GatedActivation(gate=gate, up=up, kind=kind),
                [Linear(weights=(_, _)) as product, Split(outs=outs)],
            ) if outs == (gate, up) and readers[gate] == readers[up] == readers[product.out] == 1:
                folded[-2:] = [replace(product, out=op.out, gate=kind)]
            case _:
                folded.append(op)
    return folded


def _fold_additions_into_products(operations: list[Operation]) -> list[Operation]:
    """A product that is only added to something else becomes one operation with it."""
    readers = _readers(operations)
    folded: list[Operation] = []
    for op in operations:
        match op, folded[-1:]:
            case (
                Add(x=x, y=y),
                [Linear(gate=None, addend=None, out=out) as product],
            ) if x != y and out in (x, y) and readers[out] == 1:
                folded[-1] = replace(product, out=op.out, addend=x if out == y else y)
            case _:
                folded.append(op)
    return folded


def _readers(operations: Iterable[Operation]) -> Counter[str]:
    """Return by how many operations each value is read."""
    return Counter(value.name for op in operations for value in set(op.inputs))


def _fold_additions_into_norms(operations: Iterable[Operation]) -> Iterator[Operation]:
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
