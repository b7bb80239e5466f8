"""What the engine says of a request: pieces as they come, and the whole they add up to.

Decides how log-probabilities and text reach a caller. There is one path: a whole reply is the sum
of the pieces that would have been streamed. Knows neither blocks nor arrays.

Invariant: each sequence gets exactly one delta with a `finish_reason`, its last; the last of a
request has `is_last`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from octavo.executors.executor import TokenLogprobs
from octavo.request import CompletionOutput, Logprob, Request, RequestMetrics, RequestOutput

PromptLogprobs = list[dict[int, Logprob] | None]


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one sequence.

    text: whole characters that no stop string can take back any more. logprobs: one dict per token
    of `token_ids`, or None if not asked for. stop_reason: the stop string or stop token id.
    prompt_logprobs: with the first delta of the request, if asked for. is_ending_forced: see
    `CompletionOutput`; it comes with the last delta of the sequence. pooled: with the last delta of
    the request, if asked for: the prompt's state as little-endian float32.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_last: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: Exception | None = None
    is_ending_forced: bool = False
    pooled: bytes | None = None


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How many of a running request's prompt tokens are in the cache, and were when it started."""

    request_id: str
    num_computed: int
    num_cached: int


class OutputCollector:
    """Adds up the deltas of one request."""

    def __init__(self, request: Request, prompt: str | None) -> None:
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[
                CompletionOutput(index=i, text="", token_ids=[]) for i in range(request.params.n)
            ],
            finished=False,
        )

    def add(self, delta: OutputDelta) -> None:
        """Append what one delta brings."""
        output, completion = self.output, self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self._add_logprobs(completion, delta)
        if delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason
            completion.stop_reason = delta.stop_reason
            completion.is_ending_forced = delta.is_ending_forced
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
        output.num_cached_tokens = delta.num_cached_tokens
        output.metrics = delta.metrics
        output.error = output.error or delta.error
        output.finished = delta.is_last

    @staticmethod
    def _add_logprobs(completion: CompletionOutput, delta: OutputDelta) -> None:
        assert delta.logprobs is not None
        if completion.logprobs is None:
            completion.logprobs, completion.cumulative_logprob = [], 0.0
        completion.logprobs += delta.logprobs
        drawn = zip(delta.token_ids, delta.logprobs, strict=True)
        added = sum(entry[token_id].logprob for token_id, entry in drawn)
        completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + added


def to_logprobs(found: TokenLogprobs, text_of: Callable[[int], str] | None) -> dict[int, Logprob]:
    """Return vLLM's dict for one position: the actual token first, then the likeliest."""
    entries = {found.token_id: (found.logprob, found.rank)}
    for rank, (token_id, logprob) in enumerate(
        zip(found.top_ids, found.top_logprobs, strict=True), 1
    ):
        entries.setdefault(token_id, (logprob, rank))
    return {
        token_id: Logprob(logprob, rank, text_of(token_id) if text_of else None)
        for token_id, (logprob, rank) in entries.items()
    }
