"""From a step plan to arrays.

Decides which rows need logits and for what: the last row of a chunk that draws, and the rows of a
prompt whose log-probabilities are wanted. Knows no model and draws nothing.

Invariant: rows appear in the order of the plan's chunks, so results are parallel to its samples.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.core.scheduler import Chunk, StepPlan
from octavo.executors.executor import Batch, Int32, PromptRow, SampleRow, StateSpan
from octavo.request import Sequence

MaskOf = Callable[[Sequence], NDArray[np.uint32] | None]


def build_batch(plan: StepPlan, mask_of: MaskOf = lambda _: None) -> Batch:
    """Return `plan` as arrays; see `Batch` for their shapes.

    mask_of: which tokens a sequence that draws may draw (see `SampleRow.mask`); its samples share
    the mask.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    starts, contexts = [0], []
    logit_rows: list[int] = []
    samples: list[SampleRow] = []
    prompt_rows: list[PromptRow] = []
    state_rows: list[int] = []
    state_spans: list[StateSpan] = []
    for chunk in plan.chunks:
        sequence, first_row = chunk.sequence, starts[-1]
        request, end = sequence.request, chunk.start + chunk.length
        token_ids += sequence.token_ids[chunk.start : end]
        positions += range(chunk.start, end)
        contexts.append(end)
        starts.append(first_row + chunk.length)
        if request.params.prompt_logprobs is not None:
            _add_prompt_rows(chunk, first_row, logit_rows, prompt_rows)
        if request.pooling is not None:
            _add_state_rows(chunk, first_row, state_rows, state_spans)
        if chunk.num_samples:
            _add_samples(chunk, first_row, logit_rows, samples, mask_of)
    return Batch(
        token_ids=_ints(token_ids),
        positions=_ints(positions),
        chunk_starts=_ints(starts),
        block_tables=_block_tables(plan.chunks),
        context_lengths=_ints(contexts),
        copies=np.array(plan.copies, np.int32) if plan.copies else _NO_COPIES,
        logit_rows=_ints(logit_rows),
        samples=tuple(samples),
        prompt_rows=tuple(prompt_rows),
        state_rows=_ints(state_rows),
        state_spans=tuple(state_spans),
    )


def _ints(values: list[int]) -> Int32:
    return np.array(values, np.int32) if values else _NONE


def _block_tables(chunks: list[Chunk]) -> Int32:
    widest = max([len(chunk.sequence.block_table) for chunk in chunks])
    blocks: list[int] = []
    for row, chunk in enumerate(chunks, 1):
        blocks += chunk.sequence.block_table
        blocks += [0] * (row * widest - len(blocks))
    return np.array(blocks, np.int32).reshape(len(chunks), widest)


# Most steps have none of these.
_NONE, _NO_COPIES = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
_NONE.flags.writeable = _NO_COPIES.flags.writeable = False


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
    position, num_output = len(sequence.token_ids), sequence.num_output_tokens
    for index in range(sequence.index, sequence.index + chunk.num_samples):
        row = len(logit_rows)
        samples.append(SampleRow(row, request, index, position, num_output, history, mask))
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
