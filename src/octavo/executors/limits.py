"""Which batches an executor may be given, so that no array is read or written astray.

Decides nothing about a model: it compares a batch's arrays with each other and with what there is.

Invariant: a batch that passes names only tokens, blocks, positions and rows that exist.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from octavo.executors.executor import Batch
from octavo.program.ops import Embed
from octavo.program.program import Program


@dataclass(frozen=True)
class BatchLimits:
    """What there is. max_rows, max_positions: most tokens of a step and of a sequence, or None.

    The native library checks the same by itself (csrc/limits.cpp), and leaves the words to this.
    """

    program: Program
    num_blocks: int
    block_size: int
    max_rows: int | None = None
    max_positions: int | None = None

    @cached_property
    def num_tokens(self) -> int:
        """The ids from 0 on that every table has."""
        lookups = (op for op in self.program.operations if isinstance(op, Embed))
        return min((op.vocab_size for op in lookups), default=self.program.vocab_size)

    def check(self, batch: Batch) -> None:
        """Raise `ValueError` for a batch that would make an executor read or write astray."""
        _check_arrays(batch)
        rows, starts = len(batch.token_ids), batch.chunk_starts
        most = rows if self.max_rows is None else self.max_rows
        if max(rows, len(batch.logit_rows), len(batch.state_rows)) > most:
            raise ValueError(f"a step has at most {most} rows, and as many of logits and of states")
        held = batch.block_tables.shape[1] * self.block_size
        within = {
            "token_ids": self.num_tokens,
            "block_tables": self.num_blocks,
            "copies": self.num_blocks,
            "logit_rows": rows,
            "state_rows": rows,
            "chunk_starts": rows + 1,
            "positions": held if self.max_positions is None else min(held, self.max_positions),
        }
        for name, limit in within.items():
            values = getattr(batch, name)
            if values.size and not 0 <= values.min() <= values.max() < limit:
                raise ValueError(f"{name} must be from 0 to {limit - 1}")
        lengths = np.diff(starts)
        if not rows or starts[0] != 0 or starts[-1] != rows or (lengths < 1).any():
            raise ValueError(f"chunk_starts {starts.tolist()} do not part {rows} rows")
        ends = np.repeat(batch.context_lengths - starts[1:], lengths)
        if not np.array_equal(batch.positions, ends + np.arange(rows)):
            raise ValueError("each chunk's positions must end where its context_length does")


def _check_arrays(batch: Batch) -> None:
    """Raise `ValueError` unless types and shapes are those that `Batch` documents."""
    rows, chunks = batch.token_ids.shape[:1], batch.context_lengths.shape[:1]
    shapes = {
        "token_ids": rows,
        "positions": rows,
        "context_lengths": chunks,
        "chunk_starts": (sum(chunks) + 1,),
        "block_tables": (*chunks, *batch.block_tables.shape[1:2]),
        "copies": (*batch.copies.shape[:1], 2),
        "logit_rows": batch.logit_rows.shape[:1],
        "state_rows": batch.state_rows.shape[:1],
    }
    for name, shape in shapes.items():
        array = getattr(batch, name)
        if array.dtype != np.int32 or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous int32")
        if array.shape != shape or array.ndim != (2 if name in ("block_tables", "copies") else 1):
            raise ValueError(f"{name} has the shape {array.shape} beside {sum(chunks)} chunks")
