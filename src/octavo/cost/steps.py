"""The time of whole steps, fast enough for every step of a simulated day.

Decides nothing about cost: it adds up what `accounting` and `roofline` say, once per number of rows
instead of once per step. Only attention depends on which rows belong together.

Invariant: a step's time is that of the sum over its operations, to rounding.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octavo.cost.accounting import PreparedProgram, account
from octavo.cost.hardware import Machine
from octavo.cost.roofline import OperationTime, memory_seconds, operation_time
from octavo.program.ops import Attention, Traffic
from octavo.program.program import Chunk

Counts = NDArray[np.int64]


class StepTimes:
    """Predicts the seconds of steps of one program on one machine."""

    def __init__(self, prepared: PreparedProgram, machine: Machine) -> None:
        self.prepared = prepared
        self.machine = machine
        body = prepared.program.body
        # Layers whose attention is alike are priced once.
        alike = Counter(_anonymous(op) for op in body if isinstance(op, Attention))
        self._attention = tuple(alike.items())
        self._rows_seconds = lru_cache(maxsize=1 << 16)(self._price_rows)

    def seconds(self, rows: Counts, contexts: Counts, logit_rows: int) -> float:
        """Return the time of a step.

        rows, contexts: (chunks,), tokens computed and positions seen by the last of them.
        """
        linear = self._rows_seconds(int(rows.sum()), logit_rows)
        return linear + sum(
            count * self._attention_time(op, rows, contexts).seconds
            for op, count in self._attention
        )

    def of_chunks(self, chunks: list[Chunk], logit_rows: int) -> float:
        """Return the time of a step of `chunks`."""
        rows, contexts = np.array(chunks, np.int64).reshape(-1, 2).T
        return self.seconds(rows, contexts, logit_rows)

    def _price_rows(self, num_rows: int, logit_rows: int) -> float:
        """Everything but attention: all rows may as well be one chunk."""
        costs = account(self.prepared, [Chunk(num_rows, num_rows)], logit_rows)
        return self.machine.step_overhead + sum(
            operation_time(cost, self.machine).seconds
            for cost in costs
            if not isinstance(cost.operation, Attention)
        )

    def _attention_time(self, op: Attention, rows: Counts, contexts: Counts) -> OperationTime:
        sizes, machine = self.prepared.sizes, self.machine
        window = contexts if op.window is None else np.int64(op.window)
        pairs = float(_seen(rows, contexts, window).sum())
        positions = float(np.minimum(contexts, window + rows - 1).sum())
        traffic = Traffic(
            activations=float(rows.sum()) * 2 * op.heads * op.head_dim * sizes.activation,
            kv_read=positions * 2 * op.kv_heads * op.head_dim * sizes.kv,
        )
        flops = pairs * op.heads * (4 * op.head_dim + 4)
        rate = machine.rate(self.prepared.form_of(op)) * machine.efficiency.products
        return OperationTime(
            flops / rate, memory_seconds(traffic, machine), machine.efficiency.overhead
        )


def _seen(rows: Counts, contexts: Counts, window: Counts | np.int64) -> Counts:
    """`Attention.seen` for every chunk at once."""
    whole = np.clip(contexts - window, 0, rows)
    longest = np.minimum(contexts - whole, window)
    ramp = rows - whole
    seen: Counts = whole * window + ramp * longest - ramp * (ramp - 1) // 2
    return seen


def _anonymous(op: Attention) -> Attention:
    return replace(op, q="", out="", layer=0)
