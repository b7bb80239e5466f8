"""The time of whole steps, fast enough for every step of a simulated day.

Decides nothing about cost: it adds up what `accounting` and `roofline` say, working out before what
depends on the number of rows alone. Only attention depends on which rows belong together.

Invariant: a step's time is that of the sum over its operations, to rounding.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.cost.accounting import OperationCost, PreparedProgram, account
from octavo.cost.hardware import Machine
from octavo.cost.roofline import (
    Bound,
    Floats,
    OperationTime,
    idle_flops,
    moved_bytes,
    near_seconds,
    operation_time,
    overlapped,
    product_rate,
)
from octavo.program.ops import Attention, Linear, Traffic
from octavo.program.program import Chunk

Counts = NDArray[np.integer[Any]]


class StepTimes:
    """Predicts the seconds of steps of one program on one machine."""

    def __init__(self, prepared: PreparedProgram, machine: Machine) -> None:
        machine = machine.holding(prepared.step_weight_bytes)
        self.prepared = prepared
        self.machine = machine
        body = prepared.program.body
        # Layers whose attention is alike are priced once.
        alike = Counter(_anonymous(op) for op in body if isinstance(op, Attention))
        self.attention = [AttentionTimes(op, n, prepared, machine) for op, n in alike.items()]
        self._body = _RowWise(prepared, machine, head=False)
        self._head = _RowWise(prepared, machine, head=True)
        # Of everything but attention, by rows and rows of logits.
        self.rows_seconds = lru_cache(maxsize=1 << 16)(self._price_rows)
        self.rows_bounds = lru_cache(maxsize=1 << 12)(self._bound_rows)

    def seconds(self, rows: Counts, contexts: Counts, logit_rows: int) -> float:
        """Return the time of a step.

        rows, contexts: (chunks,), tokens computed and positions seen by the last of them.
        """
        num_rows = int(rows.sum())  # sums of int32 are int64
        attention = sum(op.seconds(rows, contexts, num_rows) for op in self.attention)
        return self.rows_seconds(num_rows, logit_rows) + attention

    def of_decodes(self, contexts: Sequence[int], logit_rows: int) -> float:
        """Return the time of a step of one token for each of a few contexts.

        As `seconds`, but the sum of a list takes a tenth of the time of an array's.
        """
        num_rows = len(contexts)
        attention = sum([op.of_decodes(contexts) for op in self.attention])
        return self.rows_seconds(num_rows, logit_rows) + attention

    def of_chunks(self, chunks: list[Chunk], logit_rows: int) -> float:
        """Return the time of a step of `chunks`."""
        rows, contexts = np.array(chunks, np.int64).reshape(-1, 2).T
        return self.seconds(rows, contexts, logit_rows)

    def _price_rows(self, num_rows: int, logit_rows: int) -> float:
        """Everything but attention: all rows may as well be one chunk."""
        head = self._head.seconds(logit_rows) if logit_rows else 0.0
        return self._beside(logit_rows) + self._body.seconds(num_rows) + head

    def _beside(self, logit_rows: int) -> float:
        return self.machine.step_overhead + logit_rows * self.machine.row_overhead

    def _bound_rows(self, num_rows: int, logit_rows: int) -> Mapping[Bound, float]:
        """Return the seconds of operations by what most of each goes to."""
        bounds = self._body.bounds(num_rows)
        if logit_rows:
            bounds = bounds + self._head.bounds(logit_rows)
        compute, memory, overhead = bounds.tolist()
        overhead += self._beside(logit_rows)
        return {"compute": compute, "memory": memory, "overhead": overhead}


class AttentionTimes:
    """Layers whose attention is alike: a time for each pair seen, position read and row."""

    def __init__(
        self, op: Attention, count: int, prepared: PreparedProgram, machine: Machine
    ) -> None:
        self.operation = op
        self.count = count
        self._window = None if op.window is None else np.int64(op.window)
        self._overhead, self._is_cpu = machine.efficiency.overhead, machine.is_cpu
        sizes, form = prepared.sizes, prepared.form_of(op)
        row = Traffic(activations=2 * op.heads * op.head_dim * sizes.activation)
        position = Traffic(kv_read=2 * op.kv_heads * op.head_dim * sizes.kv)
        # One row that sees one position is one pair.
        pair = OperationCost(op, form, op.flops(1, 1), position)
        time = operation_time(pair, machine)
        self._pair, self._position, self._near_position = time.compute, time.memory, time.near
        self._idle = idle_flops(op, machine) / product_rate(pair, machine)
        far, near = moved_bytes(row, machine)
        self._row = far / (machine.bandwidth * machine.efficiency.memory)
        self._near_row = near_seconds(near, machine)

    def seconds(self, rows: Counts, contexts: Counts, num_rows: int) -> float:
        """Return the time of all these layers."""
        return self.of_counts(num_rows, *self._count_seen(rows, contexts, num_rows))

    def of_decodes(self, contexts: Sequence[int]) -> float:
        """Return the time of all these layers over rows that each see one of `contexts`."""
        seen = self.count_decodes(contexts)
        return self.of_counts(len(contexts), seen, seen)

    def count_decodes(self, contexts: Sequence[int]) -> int:
        """Return the positions that rows see and read, each of another sequence."""
        window = self.operation.window
        return sum(contexts if window is None else [min(c, window) for c in contexts])

    def of_counts(self, num_rows: int, pairs: int, positions: int) -> float:
        """Return the time of all these layers over what their rows see and read."""
        return self.count * self._time(num_rows, pairs, positions).seconds

    def bound(self, num_rows: int, pairs: int, positions: int) -> tuple[Bound, float]:
        """Return what most of the time goes to, and the time of all these layers."""
        time = self._time(num_rows, pairs, positions)
        return time.bound, self.count * time.seconds

    def _time(self, num_rows: int, pairs: int, positions: int) -> OperationTime:
        """One layer's."""
        return OperationTime(
            compute=pairs * self._pair + positions * self._idle,
            memory=num_rows * self._row + positions * self._position,
            overhead=self._overhead,
            near=num_rows * self._near_row + positions * self._near_position,
            is_core=self._is_cpu,
        )

    def _count_seen(self, rows: Counts, contexts: Counts, num_rows: int) -> tuple[int, int]:
        """Return the pairs of a row and a position that it sees, and the positions read."""
        window = self._window
        if num_rows == len(rows):  # every chunk is one token
            seen = contexts if window is None else np.minimum(contexts, window)
            return (total := int(seen.sum())), total
        rows, contexts = rows.astype(np.int64), contexts.astype(np.int64)
        if window is None:  # rows see all positions before them: an arithmetic series
            pairs = int(rows @ contexts) - (int(rows @ rows) - num_rows) // 2
            return pairs, int(contexts.sum())
        positions = np.minimum(contexts, window + rows - 1)
        return int(_seen(rows, contexts, window).sum()), int(positions.sum())


class _RowWise:
    """Operations whose flops and bytes are a fixed part and one for each row."""

    def __init__(self, prepared: PreparedProgram, machine: Machine, *, head: bool) -> None:
        self._machine = machine
        one, two = (row_costs(prepared, rows, head=head) for rows in (1, 2))
        self._is_product = np.array([isinstance(cost.operation, Linear) for cost in one])
        self._flop = np.array([cost.flops / product_rate(cost, machine) for cost in one])
        of_one, of_two = (
            np.array([moved_bytes(cost.traffic, machine) for cost in costs]).T
            for costs in (one, two)
        )
        each = of_two - of_one
        rate = machine.bandwidth * machine.efficiency.memory
        self._fixed, self._each = (of_one - each)[0] / rate, each[0] / rate
        self._near = np.array([near_seconds(float(near), machine) for near in each[1]])

    def seconds(self, num_rows: int) -> float:
        """Return the time of all operations on so many rows."""
        compute, memory, near = self._parts(num_rows)
        overhead = len(near) * self._machine.efficiency.overhead
        return float((overlapped(compute, memory, self._machine) + near).sum()) + overhead

    def bounds(self, num_rows: int) -> Floats:
        """Return the time of operations that products, memory and overhead bound."""
        compute, memory, near = self._parts(num_rows)
        overhead = np.full(len(near), self._machine.efficiency.overhead)
        longest = np.vstack([compute, memory + near, overhead]).argmax(axis=0)
        seconds = overlapped(compute, memory, self._machine) + near + overhead
        return np.bincount(longest, seconds, minlength=3).astype(np.float64)

    def _parts(self, num_rows: int) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of each operation's products, memory and cache."""
        worked = np.where(self._is_product, self._machine.worked_rows(num_rows), num_rows)
        return worked * self._flop, self._fixed + num_rows * self._each, num_rows * self._near


def row_costs(prepared: PreparedProgram, num_rows: int, *, head: bool) -> list[OperationCost]:
    """Return the costs of the head, or of the rest without attention."""
    both = account(prepared, [Chunk(num_rows, num_rows)], num_rows)
    body = len(account(prepared, [Chunk(1, 1)], 0))
    chosen = both[body:] if head else both[:body]
    return [cost for cost in chosen if not isinstance(cost.operation, Attention)]


def _seen(rows: Counts, contexts: Counts, window: np.int64) -> Counts:
    """`Attention.seen` for every chunk at once."""
    whole = np.clip(contexts - window, 0, rows)
    longest = np.minimum(contexts - whole, window)
    ramp = rows - whole
    seen: Counts = whole * window + ramp * longest - ramp * (ramp - 1) // 2
    return seen


def _anonymous(op: Attention) -> Attention:
    return replace(op, q="", out="", layer=0)
