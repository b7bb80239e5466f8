"""The contract between the engine and whatever computes a step.

Decides how a plan looks as arrays (`Batch`) and what comes back (`StepResult`). Knows no model. One
row of a batch is one token to compute; the rows of a chunk are consecutive and their positions are
too. Invariant: a row's result depends on its own sequence alone, never on the rest of the batch.
"""

from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError
from octavo.request import Request

Int32 = NDArray[np.int32]


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """Draw one token from the logits of row `logit_row` (an index into `Batch.logit_rows`).

    index: which of the request's n sequences draws. position: the place in the sequence that the
    token will take; the draw is u(request.seed, index, position). num_output: tokens generated so
    far. history: prompt and generated ids; empty unless `request.params.needs_history`.
    mask: (ceil(vocab_size / 32),) words; token i is allowed if bit i % 32 of word i // 32 is set.
    None allows every token.
    """

    logit_row: int
    request: Request
    index: int
    position: int
    num_output: int
    history: Ordered[int] = ()
    mask: NDArray[np.uint32] | None = None


class PromptRow(msgspec.Struct, frozen=True, gc=False):
    """Report the log-probability of the known token `token_id` under row `logit_row`.

    position: the place of `token_id` in its prompt (so the row is that of position - 1).
    num_top: how many of the likeliest tokens to report beside it; None is the whole vocabulary.
    """

    logit_row: int
    request_id: str
    position: int
    token_id: int
    num_top: int | None


class StateSpan(msgspec.Struct, frozen=True):
    """Return the final states of `length` rows of a request, the first at `position`."""

    request_id: str
    position: int
    length: int


class Batch(msgspec.Struct, frozen=True, eq=False):
    """One step as arrays, for T rows in S chunks.

    token_ids, positions: (T,). chunk_starts: (S + 1,), chunk i is rows
    [chunk_starts[i], chunk_starts[i + 1]). block_tables: (S, widest), of which chunk i uses the
    first ceil(context_lengths[i] / block_size) entries. context_lengths: (S,), tokens in the cache
    once the step has written its own. copies: (C, 2) blocks as (source, destination), to be done
    in order before anything is written. logit_rows: (R,) rows of the batch that need logits.
    state_rows: (P,) rows whose final state is wanted, those of each of `state_spans` in order.
    """

    token_ids: Int32
    positions: Int32
    chunk_starts: Int32
    block_tables: Int32
    context_lengths: Int32
    copies: Int32
    logit_rows: Int32
    samples: tuple[SampleRow, ...] = ()
    prompt_rows: tuple[PromptRow, ...] = ()
    state_rows: Int32 = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    state_spans: tuple[StateSpan, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural log-probabilities at one position, of the distribution before any sampling parameter.

    rank: 1 is the likeliest. top_ids, top_logprobs: the likeliest first, ties by smaller id.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: Ordered[int]
    top_logprobs: Ordered[float]


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced: one token per `Batch.samples`, in order.

    logprobs: parallel to `token_ids`; None where the request did not ask. prompt_logprobs: parallel
    to `Batch.prompt_rows`; None where the row failed. errors: by request id, what went wrong with
    its rows alone; their tokens mean nothing. duration: seconds, measured or simulated. states:
    (P, width), of `Batch.state_rows`, as the program's last norm leaves them; None without any.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[TokenLogprobs | None] = []
    errors: dict[str, OctavoError] = {}
    duration: float = 0.0
    states: NDArray[np.float32] | None = None


class Done(Future[StepResult]):
    """A future that nobody waited for: it holds its result from the start, and takes no lock."""

    def __init__(self, result: StepResult) -> None:
        self._known = result

    def result(self, timeout: float | None = None) -> StepResult:
        """Return the result."""
        return self._known

    def exception(self, timeout: float | None = None) -> None:
        """Return None: there is a result."""

    def done(self) -> bool:
        """Return True."""
        return True


class Executor(Protocol):
    """Runs batches against a block pool of its own.

    Bits may differ between executors, never within one. notes: what a user should know of how the
    weights were loaded, a line each.
    """

    name: str
    num_blocks: int
    block_size: int
    fingerprint: str
    notes: tuple[str, ...]

    def submit(self, batch: Batch) -> Future[StepResult]:
        """Copy blocks, run the whole step, sample. Errors arrive through the future."""
        ...

    def export_blocks(self, blocks: Ordered[int]) -> bytes:
        """Return the keys and values of `blocks` as opaque bytes that `import_blocks` accepts."""
        ...

    def import_blocks(self, blocks: Ordered[int], content: bytes) -> None:
        """Overwrite `blocks` with what `export_blocks` returned for as many blocks."""
        ...

    def close(self) -> None:
        """Release the pool and the weights."""
        ...
