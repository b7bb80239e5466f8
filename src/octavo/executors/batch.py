"""From a step plan to arrays.

Decides which rows need logits and for what: the last row of a chunk that draws, and the rows of a
prompt whose log-probabilities are wanted. Knows no model and draws nothing.

Invariant: rows appear in the order of the plan's chunks, so results are parallel to its samples.
"""

from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from octavo.core.scheduler import Chunk, StepPlan
from octavo.executors.executor import Batch, PromptRow, SampleRow, StateSpan
from octavo.request import Sequence

MaskOf = Callable[[Sequence], NDArray[np.uint32] | None]


def build_batch(plan: StepPlan, mask_of: MaskOf = lambda _: None) -> Batch:
    """Return `plan` as arrays; see `Batch` for their shapes.

    mask_of: which tokens a sequence that draws may draw (see `SampleRow.mask`); its samples share
    the mask.
    """
    chunks = plan.chunks
    lengths = [chunk.length for chunk in chunks]
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    token_ids = chain.from_iterable(
        c.sequence.token_ids[c.start : c.start + c.length] for c in chunks
    )
    positions = chain.from_iterable(range(c.start, c.start + c.length) for c in chunks)
    logit_rows: list[int] = []
    samples: list[SampleRow] = []
    prompt_rows: list[PromptRow] = []
    state_rows: list[int] = []
    state_spans: list[StateSpan] = []
    for chunk, first_row in zip(chunks, starts.tolist(), strict=False):
        if chunk.sequence.request.params.prompt_logprobs is not None:
            _add_prompt_rows(chunk, first_row, logit_rows, prompt_rows)
        if chunk.sequence.request.pooling is not None:
            _add_state_rows(chunk, first_row, state_rows, state_spans)
        if chunk.num_samples:
            _add_samples(chunk, first_row, logit_rows, samples, mask_of)
    return Batch(
        token_ids=np.fromiter(token_ids, np.int32, plan.num_tokens),
        positions=np.fromiter(positions, np.int32, plan.num_tokens),
        chunk_starts=starts,
        block_tables=_block_tables(chunks),
        context_lengths=np.array([c.start + c.length for c in chunks], np.int32),
        copies=np.array(plan.copies, np.int32).reshape(-1, 2),
        logit_rows=np.array(logit_rows, np.int32),
        samples=tuple(samples),
        prompt_rows=tuple(prompt_rows),
        state_rows=np.array(state_rows, np.int32),
        state_spans=tuple(state_spans),
    )


def _block_tables(chunks: list[Chunk]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    tables = [chunk.sequence.block_table for chunk in chunks]
    widest = max(map(len, tables))
    arrays = np.zeros((len(tables), widest), np.int32)
    for row, table in enumerate(tables):
        arrays[row, : len(table)] = table
    return arrays


def _add_samples(
    chunk: Chunk,
    first_row: int,
    logit_rows: list[int],
    samples: list[SampleRow],
    mask_of: MaskOf,
) -> None:
    """Ask for the logits of the chunk's last row once, however many sequences draw from them."""
    sequence = chunk.sequence
    request = sequence.request
    history = tuple(sequence.token_ids) if request.params.needs_history else ()
    mask = mask_of(sequence)
    samples.extend(
        SampleRow(
            logit_row=len(logit_rows),
            request=request,
            index=sequence.index + sample,
            position=len(sequence.token_ids),
            num_output=sequence.num_output_tokens,
            history=history,
            mask=mask,
        )
        for sample in range(chunk.num_samples)
    )
    logit_rows.append(first_row + chunk.length - 1)


def _add_prompt_rows(
    chunk: Chunk, first_row: int, logit_rows: list[int], prompt_rows: list[PromptRow]
) -> None:
    """Ask for the log-probability of each prompt token that follows one of the chunk's rows."""
    sequence = chunk.sequence
    num_top = sequence.request.params.prompt_logprobs
    last = min(chunk.start + chunk.length, sequence.num_prompt_tokens - 1)
    for position in range(chunk.start, last):
        prompt_rows.append(
            PromptRow(
                logit_row=len(logit_rows),
                request_id=sequence.request.request_id,
                position=position + 1,
                token_id=sequence.token_ids[position + 1],
                num_top=None if num_top == -1 else num_top,
            )
        )
        logit_rows.append(first_row + position - chunk.start)


def _add_state_rows(
    chunk: Chunk, first_row: int, state_rows: list[int], state_spans: list[StateSpan]
) -> None:
    """Ask for the states that the request pools: of every prompt token, or of the last alone."""
    request, end = chunk.sequence.request, chunk.start + chunk.length
    length = chunk.length
    if request.pooling == "last":
        length = int(end == len(request.prompt_token_ids))
    if length:
        last_row = first_row + chunk.length
        state_rows.extend(range(last_row - length, last_row))
        state_spans.append(StateSpan(request.request_id, end - length, length))
