"""Runs steps on virtual time: computes nothing, and takes as long as the cost model says.

Decides how long a step takes and what it draws: one token, over and over. The engine and the
scheduler above it are the real ones. Knows neither weights nor the machine it runs on.

Invariant: the clock advances by exactly the predicted seconds of each step.
"""

from collections.abc import Sequence as Ordered
from concurrent.futures import Future

import numpy as np

from octavo.core.scheduler import StepPlan
from octavo.cost.steps import StepTimes
from octavo.executors.batch import MaskOf
from octavo.executors.executor import Batch, StepResult


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the present."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def advance_to(self, moment: float) -> None:
        """Let time pass until `moment`, unless that is past."""
        self.now = max(self.now, moment)


def build_lengths(plan: StepPlan, mask_of: MaskOf) -> Batch:
    """Return of a plan's arrays those that decide its cost; the others are empty.

    As `build_batch`, but a hundred thousand steps of a trace need no token ids. A row of logits
    stands for each sample.
    """
    starts, contexts, num_samples, row = [0], [], 0, 0
    for _, start, length, samples in plan.chunks:
        row += length
        starts.append(row)
        contexts.append(start + length)
        num_samples += samples
    return Batch(
        token_ids=_NONE,
        positions=_NONE,
        chunk_starts=np.array(starts, np.int32),
        block_tables=_NONE,
        context_lengths=np.array(contexts, np.int32),
        copies=_NONE,
        logit_rows=np.empty(num_samples, np.int32),
    )


_NONE = np.empty(0, np.int32)


class SimulatedExecutor:
    """An `Executor` without a model. spells: the token that every row draws."""

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        steps: StepTimes,
        clock: VirtualClock,
        *,
        num_blocks: int,
        block_size: int,
        spells: int = 0,
    ) -> None:
        self.name = f"simulated ({steps.machine.name})"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.fingerprint = self.name
        self._steps = steps
        self._clock = clock
        self._spells = spells

    def submit(self, batch: Batch) -> Future[StepResult]:
        """Let the predicted time of the step pass, and draw one token for each row of logits."""
        rows = batch.chunk_starts[1:] - batch.chunk_starts[:-1]
        contexts = batch.context_lengths.astype(np.int64)
        num_samples = len(batch.logit_rows)
        seconds = self._steps.seconds(rows.astype(np.int64), contexts, num_samples)
        self._clock.advance(seconds)
        future: Future[StepResult] = Future()
        drawn = StepResult([self._spells] * num_samples, [None] * num_samples, duration=seconds)
        future.set_result(drawn)
        return future

    def export_blocks(self, blocks: Ordered[int]) -> bytes:
        """Refuse: simulated blocks hold nothing."""
        raise NotImplementedError("a simulated executor has no blocks to export")

    def import_blocks(self, blocks: Ordered[int], content: bytes) -> None:
        """Refuse: simulated blocks hold nothing."""
        raise NotImplementedError("a simulated executor has no blocks to fill")

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
