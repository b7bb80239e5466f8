"""What a batch wants drawn, as the native library reads it, and what it drew as a `StepResult`.

Decides nothing: `sampling` specifies what is drawn. A request's parameters cross once, not in every
step. Invariant: what is kept belongs to requests of the last batch alone, so nothing grows.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError
from octavo.executors.executor import Batch, PromptRow, SampleRow, StepResult, TokenLogprobs
from octavo.executors.sampling import no_token_left, unusable
from octavo.request import Request

_UINT64 = 2**64 - 1


class NativeSampling:
    """The native side of the requests of one executor."""

    def __init__(self, library: Any, vocab_size: int) -> None:
        self._library = library
        self._vocab_size = vocab_size
        self._asked: dict[Request, Any] = {}

    def prepare(self, batch: Batch) -> Any:
        """Return the draws of `batch`; raises `ValueError` for rows or tokens that do not exist.

        They borrow the rows' masks.
        """
        draws = self._library.Draws(self._vocab_size, len(batch.logit_rows))
        self._add_samples(draws, batch.samples)
        if batch.prompt_rows:
            rows = batch.prompt_rows
            draws.add_known(
                [row.logit_row for row in rows],
                [row.token_id for row in rows],
                [self._vocab_size if row.num_top is None else row.num_top for row in rows],
            )
        return draws

    def collect(
        self,
        batch: Batch,
        draws: Any,
        duration: float = 0.0,
        states: NDArray[np.float32] | None = None,
    ) -> StepResult:
        """Return what the library drew; the rest of the result is the caller's."""
        token_ids, reports, failures = draws.drawn()
        errors: dict[str, OctavoError] = {}
        for place, largest in _in_order(failures, batch.samples):
            sample = batch.samples[place]
            name = sample.request.request_id
            errors[name] = (
                no_token_left(sample)
                if largest is None
                else unusable(name, sample.position, largest)
            )
        known: list[TokenLogprobs | None] = []
        if batch.prompt_rows:
            _, found, failures = draws.reported()
            known = _reports(found)
            for place, largest in _in_order(failures, batch.prompt_rows):
                row = batch.prompt_rows[place]
                errors[row.request_id] = unusable(row.request_id, row.position, largest)
        return StepResult(token_ids, _reports(reports), known, errors, duration, states)

    def _add_samples(self, draws: Any, rows: tuple[SampleRow, ...]) -> None:
        before, self._asked = self._asked, {}
        for row in rows:
            request = row.request
            if request not in self._asked:
                self._asked[request] = before.get(request) or self._pack(request)
        draws.add_samples(
            [self._asked[row.request] for row in rows],
            [row.logit_row for row in rows],
            [row.index for row in rows],
            [row.position for row in rows],
            [row.num_output for row in rows],
        )
        for place, row in enumerate(rows):
            if row.history:
                draws.set_history(place, row.history[len(row.request.prompt_token_ids) :])
            if row.mask is not None:
                if row.mask.dtype != np.uint32 or not row.mask.flags.c_contiguous:
                    raise ValueError("a mask must be contiguous uint32")
                draws.set_mask(place, row.mask.ctypes.data, len(row.mask))

    def _pack(self, request: Request) -> Any:
        """Return what `request` asked for; of ids only those in the vocabulary."""
        params, asked = request.params, self._library.Sampling()
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "min_tokens",
        ):  # fmt: skip
            setattr(asked, name, getattr(params, name))
        asked.top_k = min(max(params.top_k, 0), self._vocab_size)
        asked.seed = request.seed & _UINT64
        asked.reports = params.logprobs is not None
        if params.logprobs is not None:
            asked.num_top = self._vocab_size if params.logprobs == -1 else params.logprobs
        asked.is_limited = params.allowed_token_ids is not None
        asked.allowed = self._known(params.allowed_token_ids or ())
        asked.stop_ids = self._known(request.stop_ids)
        bias = params.logit_bias or {}
        asked.biased_ids = self._known(bias)
        asked.biases = [bias[token_id] for token_id in asked.biased_ids]
        asked.bad_words = [
            word for word in request.bad_word_ids if len(self._known(word)) == len(word)
        ]
        if params.repetition_penalty != 1.0:
            asked.prompt = self._known(dict.fromkeys(request.prompt_token_ids))
        return asked

    def _known(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id < self._vocab_size]


def _reports(found: list[tuple[Any, ...] | None]) -> list[TokenLogprobs | None]:
    return [None if report is None else TokenLogprobs(*report) for report in found]


def _in_order(
    failures: list[tuple[int, Any]], rows: tuple[SampleRow, ...] | tuple[PromptRow, ...]
) -> list[tuple[int, Any]]:
    """Sort by logit row: of a request's errors the last one stays, as in the specification."""
    return sorted(failures, key=lambda failure: rows[failure[0]].logit_row)
