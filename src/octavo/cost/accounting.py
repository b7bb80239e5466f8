"""How many operations and bytes each operation of a prepared program takes in a step.

Decides what a batch costs, exactly: the formulas are those of `program.ops`, the sizes those that
an executor packs. Knows no machine and no seconds.

Invariant: the costs of a plain and of a fused program have equal flops, whatever the batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from octavo.program.ops import Attention, ElementSizes, Linear, Operation, Split, Traffic
from octavo.program.program import Chunk, Program


@dataclass(frozen=True)
class PreparedProgram:
    """A program as an executor runs it.

    weight_bytes: what each parameter takes in memory, scales and padding included. formats: of the
    matrices. kv_element, activation_element: bytes of a number in the pages, and between
    operations.
    """

    program: Program
    weight_bytes: Mapping[str, int]
    formats: Mapping[str, str]
    kv_element: float = 2.0
    activation_element: float = 4.0

    @cached_property
    def sizes(self) -> ElementSizes:
        """Bytes per element, as `program.ops` wants them."""
        parameters = (p for op in self.program.operations for p in op.parameters)
        numbers = {parameter.name: parameter.size for parameter in parameters}
        each = {name: size / numbers[name] for name, size in self.weight_bytes.items()}
        return ElementSizes(each.__getitem__, self.activation_element, self.kv_element)

    @property
    def total_weight_bytes(self) -> int:
        """Memory of all weights; one that is used twice counts once."""
        return sum(self.weight_bytes.values())

    @cached_property
    def step_weight_bytes(self) -> float:
        """Weights that every step with logits reads: all but a table of which it needs rows."""
        return sum(cost.traffic.weights for cost in account(self, [Chunk(1, 1)], 1))

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory of one token's keys and values in all layers."""
        return round(self.program.kv_bytes_per_token(self.kv_element))

    def form_of(self, op: Operation) -> str:
        """Return the format that decides how fast an operation computes."""
        if isinstance(op, Linear):
            return self.formats[op.weights[0]]
        return "attention" if isinstance(op, Attention) else "bf16"


@dataclass(frozen=True, slots=True)
class OperationCost:
    """One operation in one step.

    form: the format of its products. rows: that it runs on. positions: whose pages attention reads.
    """

    operation: Operation
    form: str
    flops: int
    traffic: Traffic
    rows: int = 1
    positions: int = 0

    @property
    def intensity(self) -> float:
        """Flops per byte moved; 0 for an operation that computes nothing."""
        return self.flops / self.traffic.total if self.flops else 0.0


def account(
    prepared: PreparedProgram, chunks: Iterable[Chunk], logit_rows: int
) -> list[OperationCost]:
    """Return the cost of each operation of a step over `chunks`, with logits for some rows.

    Weights are read once per step, however many rows use them. A `Split` is a view and is left
    out; without rows of logits, so is the program's head.
    """
    chunks = list(chunks)
    num_rows = sum(chunk.rows for chunk in chunks)
    program = prepared.program
    body = [_cost(prepared, op, chunks, num_rows) for op in program.body if not _is_view(op)]
    head = program.head if logit_rows else ()
    return body + [_cost(prepared, op, (), logit_rows) for op in head if not _is_view(op)]


def _is_view(op: Operation) -> bool:
    return isinstance(op, Split)


def _cost(
    prepared: PreparedProgram, op: Operation, chunks: Iterable[Chunk], num_rows: int
) -> OperationCost:
    """Only attention depends on how the rows are parted in chunks."""
    sizes, form = prepared.sizes, prepared.form_of(op)
    if not isinstance(op, Attention):
        flops = op.flops(num_rows)
        return OperationCost(op, form, flops, op.traffic(sizes, num_rows), num_rows)
    traffic = Traffic()
    for chunk in chunks:
        traffic = traffic.plus(op.traffic(sizes, *chunk))
    flops = sum(op.flops(*chunk) for chunk in chunks)
    positions = sum(op.read(*chunk) for chunk in chunks)
    return OperationCost(op, form, flops, traffic, num_rows, positions)
