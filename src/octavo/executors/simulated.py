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
from octavo.executors.executor import Batch, Done, StepResult, TokenLogprobs


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
    chunks = plan.chunks
    if plan.num_tokens == len(chunks):  # nearly always: everyone decodes
        starts = np.arange(len(chunks) + 1, dtype=np.int32)
    else:
        starts = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum([chunk.length for chunk in chunks], out=starts[1:])
    return Batch(
        token_ids=_NONE,
        positions=_NONE,
        chunk_starts=starts,
        block_tables=_NONE,
        context_lengths=np.array([c.start + c.length for c in chunks], np.int32),
        copies=_NONE,
        logit_rows=np.empty(sum([c.num_samples for c in chunks]), np.int32),
        state_rows=_NONE,
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
        starts, contexts = batch.chunk_starts, batch.context_lengths
        num_samples = len(batch.logit_rows)
        if starts[-1] == len(contexts):
            seconds = self._steps.of_decodes(contexts.tolist(), num_samples)
        else:
            seconds = self._steps.seconds(starts[1:] - starts[:-1], contexts, num_samples)
        self._clock.advance(seconds)
        nothing: list[TokenLogprobs | None] = [None] * num_samples
        return Done(StepResult([self._spells] * num_samples, nothing, duration=seconds))

    def export_blocks(self, blocks: Ordered[int]) -> bytes:
        """Refuse: simulated blocks hold nothing."""
        raise NotImplementedError("a simulated executor has no blocks to export")

    def import_blocks(self, blocks: Ordered[int], content: bytes) -> None:
        """Refuse: simulated blocks hold nothing."""
        raise NotImplementedError("a simulated executor has no blocks to fill")

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
