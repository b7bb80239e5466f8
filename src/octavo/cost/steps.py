"""The time of whole steps, fast enough for every step of a simulated day.

Decides nothing about cost: it adds up what `accounting` and `roofline` say, working out before what
depends on the number of rows alone. Only attention depends on which rows belong together.

Invariant: a step's time is that of the sum over its operations, to rounding.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octavo.cost.accounting import OperationCost, PreparedProgram, account
from octavo.cost.hardware import Machine
from octavo.cost.roofline import Bound, OperationTime, memory_seconds, operation_time
from octavo.program.ops import Attention, Traffic
from octavo.program.program import Chunk

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


class StepTimes:
    """Predicts the seconds of steps of one program on one machine."""

    def __init__(self, prepared: PreparedProgram, machine: Machine) -> None:
        self.prepared = prepared
        self.machine = machine
        body = prepared.program.body
        # Layers whose attention is alike are priced once.
        alike = Counter(_anonymous(op) for op in body if isinstance(op, Attention))
        self.attention = [AttentionTimes(op, n, prepared, machine) for op, n in alike.items()]
        self._body = _Linear(prepared, machine, head=False)
        self._head = _Linear(prepared, machine, head=True)
        # Of everything but attention, by rows and rows of logits.
        self.rows_seconds = lru_cache(maxsize=1 << 16)(self._price_rows)
        self.rows_bounds = lru_cache(maxsize=1 << 12)(self._bound_rows)

    def seconds(self, rows: Counts, contexts: Counts, logit_rows: int) -> float:
        """Return the time of a step.

        rows, contexts: (chunks,), tokens computed and positions seen by the last of them.
        """
        num_rows = int(rows.sum())
        attention = sum(op.seconds(rows, contexts, num_rows) for op in self.attention)
        return self.rows_seconds(num_rows, logit_rows) + attention

    def of_chunks(self, chunks: list[Chunk], logit_rows: int) -> float:
        """Return the time of a step of `chunks`."""
        rows, contexts = np.array(chunks, np.int64).reshape(-1, 2).T
        return self.seconds(rows, contexts, logit_rows)

    def _price_rows(self, num_rows: int, logit_rows: int) -> float:
        """Everything but attention: all rows may as well be one chunk."""
        head = self._head.seconds(logit_rows) if logit_rows else 0.0
        return self.machine.step_overhead + self._body.seconds(num_rows) + head

    def _bound_rows(self, num_rows: int, logit_rows: int) -> Mapping[Bound, float]:
        """Return the seconds of operations by what most of each goes to."""
        bounds = self._body.bounds(num_rows)
        if logit_rows:
            bounds = bounds + self._head.bounds(logit_rows)
        compute, memory, overhead = bounds.tolist()
        overhead += self.machine.step_overhead
        return {"compute": compute, "memory": memory, "overhead": overhead}


class AttentionTimes:
    """Layers whose attention is alike: a time for each pair seen, position read and row."""

    def __init__(
        self, op: Attention, count: int, prepared: PreparedProgram, machine: Machine
    ) -> None:
        self.operation = op
        self.count = count
        self._window = None if op.window is None else np.int64(op.window)
        self._overhead = machine.efficiency.overhead
        sizes, form = prepared.sizes, prepared.form_of(op)
        row = Traffic(activations=2 * op.heads * op.head_dim * sizes.activation)
        position = Traffic(kv_read=2 * op.kv_heads * op.head_dim * sizes.kv)
        # One row that sees one position is one pair.
        pair = OperationCost(op, form, op.flops(1, 1), position)
        time = operation_time(pair, machine)
        self._pair, self._position = time.compute, time.memory
        self._row = memory_seconds(row, machine)

    def seconds(self, rows: Counts, contexts: Counts, num_rows: int) -> float:
        """Return the time of all these layers."""
        return self.of_counts(num_rows, *self._count_seen(rows, contexts, num_rows))

    def of_counts(self, num_rows: int, pairs: int, positions: int) -> float:
        """Return the time of all these layers over what their rows see and read."""
        memory = num_rows * self._row + positions * self._position
        return self.count * (max(pairs * self._pair, memory) + self._overhead)

    def read(self, rows: int, context: int) -> int:
        """Return the positions that a chunk reads."""
        window = self.operation.window
        return context if window is None else min(context, window + rows - 1)

    def bound(self, num_rows: int, pairs: int, positions: int) -> Bound:
        """Return what most of the time goes to."""
        memory = num_rows * self._row + positions * self._position
        return OperationTime(pairs * self._pair, memory, self._overhead).bound

    def _count_seen(self, rows: Counts, contexts: Counts, num_rows: int) -> tuple[int, int]:
        """Return the pairs of a row and a position that it sees, and the positions read."""
        window = self._window
        if num_rows == len(rows):  # every chunk is one token
            seen = contexts if window is None else np.minimum(contexts, window)
            return (total := int(seen.sum())), total
        if window is None:  # rows see all positions before them: an arithmetic series
            pairs = int(rows @ contexts) - (int(rows @ rows) - num_rows) // 2
            return pairs, int(contexts.sum())
        positions = np.minimum(contexts, window + rows - 1)
        return int(_seen(rows, contexts, window).sum()), int(positions.sum())


class _Linear:
    """Operations whose flops and bytes are a fixed part and one for each row."""

    def __init__(self, prepared: PreparedProgram, machine: Machine, *, head: bool) -> None:
        self._overhead = machine.efficiency.overhead
        one, two = (row_costs(prepared, rows, head=head) for rows in (1, 2))
        seconds = np.array([_parts(one, machine), _parts(two, machine)])
        self._each = seconds[1] - seconds[0]
        self._fixed = seconds[0] - self._each

    def seconds(self, num_rows: int) -> float:
        """Return the time of all operations on so many rows."""
        parts = self._fixed + num_rows * self._each
        return float(parts.max(axis=0).sum() + parts.shape[1] * self._overhead)

    def bounds(self, num_rows: int) -> Floats:
        """Return the time of operations that products, memory and overhead bound."""
        parts = self._fixed + num_rows * self._each
        each = np.vstack([parts, np.full(parts.shape[1], self._overhead)])
        seconds = parts.max(axis=0) + self._overhead
        return np.bincount(each.argmax(axis=0), seconds, minlength=3).astype(np.float64)


def row_costs(prepared: PreparedProgram, num_rows: int, *, head: bool) -> list[OperationCost]:
    """Return the costs of the head, or of the rest without attention."""
    both = account(prepared, [Chunk(num_rows, num_rows)], num_rows)
    body = len(account(prepared, [Chunk(1, 1)], 0))
    chosen = both[body:] if head else both[:body]
    return [cost for cost in chosen if not isinstance(cost.operation, Attention)]


def _parts(costs: list[OperationCost], machine: Machine) -> list[list[float]]:
    times = [operation_time(cost, machine) for cost in costs]
    return [[time.compute for time in times], [time.memory for time in times]]


def _seen(rows: Counts, contexts: Counts, window: np.int64) -> Counts:
    """`Attention.seen` for every chunk at once."""
    whole = np.clip(contexts - window, 0, rows)
    longest = np.minimum(contexts - whole, window)
    ramp = rows - whole
    seen: Counts = whole * window + ramp * longest - ramp * (ramp - 1) // 2
    return seen


def _anonymous(op: Attention) -> Attention:
    return replace(op, q="", out="", layer=0)
