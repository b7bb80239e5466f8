"""A plan's predictions beside what the engine does on this machine.

Decides which points are run: one prompt on an idle engine, then decoding at a few batch sizes, each
until enough steps were seen in which everybody decodes. Knows no executor, and no clock but the
engine's. Invariant: predicted and measured are of the same tokens at the same positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.cost.steps import Counts, StepTimes
from octavo.engine.engine import Engine
from octavo.errors import BadRequestError
from octavo.planning.latency import Latency, Lengths
from octavo.request import SamplingParams

Progress = Callable[[str], None]
BATCHES = (1, 4, 16)
_STEPS = 8
_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRow:
    """One point. Seconds: predicted, and the median of what was measured.

    batch: streams that decode; 0 is the first token of a prompt on an idle engine.
    """

    name: str
    batch: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one: above 0 the engine is faster than predicted."""
        return self.predicted / self.measured - 1


def verify(
    engine: Engine,
    steps: StepTimes,
    lengths: Lengths,
    clock: Callable[[], float],
    progress: Progress = lambda _: None,
    batches: Sequence[int] = BATCHES,
) -> list[VerifiedRow]:
    """Run the engine, which must be idle, and return predicted beside measured.

    lengths: prompts have so many tokens; answers as many as are needed. clock: in seconds.
    """
    prompt = lengths.prompt_tokens
    sizes = [batch for batch in batches if _fits(engine, prompt, batch)]
    if not sizes:
        raise BadRequestError(
            f"A prompt of {prompt:,} tokens and {_num_output(engine, prompt, 1)} to generate do "
            f"not fit: the engine holds {engine.intake.max_model_len:,} in a request. Verify with "
            "a smaller --prompt-tokens."
        )
    run = _Run(engine, clock, np.random.default_rng(0), prompt)
    progress("warming up")
    run.first_token(min(prompt, _WARM_TOKENS))
    latency = Latency(steps, lengths, engine.scheduler.max_num_batched_tokens)
    progress(f"the first token of a prompt of {prompt:,}")
    rows = [
        VerifiedRow(
            name="first token",
            batch=0,
            predicted=latency.first_token(),
            measured=run.first_token(prompt),
        )
    ]
    for batch in sizes:
        progress(f"decoding at batch {batch}")
        found = run.decode(batch)
        ones = np.ones(batch, np.int64)
        predicted = [steps.seconds(ones, contexts, batch) for contexts, _ in found]
        rows.append(
            VerifiedRow(
                name=f"decode, batch {batch}",
                batch=batch,
                predicted=float(np.median(predicted)),
                measured=float(np.median([seconds for _, seconds in found])),
            )
        )
    return rows


def _num_output(engine: Engine, prompt: int, batch: int) -> int:
    """Return enough tokens for the first stream to see the prompts of all others, and the steps."""
    room = max(1, engine.scheduler.max_num_batched_tokens - batch)
    return -(-batch * prompt // room) + batch + _STEPS + 2


def _fits(engine: Engine, prompt: int, batch: int) -> bool:
    scheduler, total = engine.scheduler, prompt + _num_output(engine, prompt, batch)
    needed = batch * (scheduler.blocks.blocks_for(total) + 1)
    return (
        batch <= scheduler.max_num_seqs
        and total <= engine.intake.max_model_len
        and needed <= scheduler.blocks.pool.num_blocks
    )


@dataclass(frozen=True, slots=True)
class _Run:
    engine: Engine
    clock: Callable[[], float]
    random: np.random.Generator
    prompt: int

    def add(self, num_tokens: int, num_output: int) -> str:
        """Add a request that shares nothing with any other, and return its id."""
        ids = self.random.integers(0, self.engine.intake.vocab_size, num_tokens).tolist()
        params = SamplingParams(
            temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False
        )
        return self.engine.add({"prompt_token_ids": ids}, params).request_id

    def step(self) -> float:
        """Run one step; return its seconds, and raise what fails."""
        started = self.clock()
        for delta in self.engine.step():
            if delta.error is not None:
                raise delta.error
        return self.clock() - started

    def first_token(self, num_tokens: int) -> float:
        """Return the seconds from a prompt's arrival to its only token."""
        started = self.clock()
        self.add(num_tokens, 1)
        while self.engine.has_unfinished:
            self.step()
        return self.clock() - started

    def decode(self, batch: int) -> list[tuple[Counts, float]]:
        """Return contexts and seconds of steps in which `batch` streams decode, and end them."""
        num_output = _num_output(self.engine, self.prompt, batch)
        ids = [self.add(self.prompt, num_output) for _ in range(batch)]
        found: list[tuple[Counts, float]] = []
        while len(found) < _STEPS and self.engine.has_unfinished:
            running = self.engine.scheduler.running
            contexts = np.array([s.num_computed + 1 for s in running], np.int64)
            decodes = len(running) == batch and all(s.num_output_tokens for s in running)
            seconds = self.step()
            if decodes:
                found.append((contexts, seconds))
        for request_id in ids:
            self.engine.abort(request_id)
        while self.engine.has_unfinished:
            self.step()
        return found
