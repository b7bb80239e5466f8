"""From the engine's deltas to what a reply is made of, piece by piece.

Decides when a piece is due: when there is text to show, or at an answer's end. Text goes through
stages, which may hold it back or split it. Knows neither the shape of replies nor HTTP.

Invariant: the pieces of an answer hold each of its tokens, and their log-probabilities, exactly
once and in order; its last piece, and no other, has a finish reason.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.engine.outputs import OutputDelta, PromptLogprobs, PromptProgress
from octavo.request import Logprob, RequestMetrics


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of a tool call; id and name come with its first part."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """What a stage makes of text: content, reasoning, parts of tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class TextStage(Protocol):
    """Splits the text of one answer; the parts do not depend on how the text was cut."""

    def push(self, text: str) -> Parts:
        """Return what is certain after `text`."""
        ...

    def finish(self) -> Parts:
        """Return what was held back."""
        ...


class PlainText:
    """All text is content."""

    def push(self, text: str) -> Parts:
        """See `TextStage`."""
        return Parts(text)

    def finish(self) -> Parts:
        """See `TextStage`."""
        return Parts()


@dataclass(slots=True)
class Piece:
    """What is added to one answer. `choice` is its number in the reply.

    prompt: number of the prompt. prompt_logprobs: with the first piece, if asked for. finish_reason
    and stop_reason: with the last, as is is_ending_forced: a structured output was near its limit
    and got a short valid ending.
    """

    choice: int
    prompt: int
    parts: Parts
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    is_first: bool
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    is_ending_forced: bool = False


class _Answer:
    """Tokens of one answer that are still to go out with a piece."""

    __slots__ = ("_logprobs", "_stage", "_token_ids", "has_begun", "has_tool_calls")

    def __init__(self, stage: TextStage) -> None:
        self._stage = stage
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self.has_begun = False
        self.has_tool_calls = False

    def push(self, delta: OutputDelta, choice: int, prompt: int) -> Piece | None:
        """Return the piece that is due after `delta`, if one is."""
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        parts = self._stage.push(delta.text) if delta.text else Parts()
        if delta.finish_reason is not None:
            parts = _joined(parts, self._stage.finish())
        if not parts and delta.finish_reason is None:
            return None
        self.has_tool_calls = self.has_tool_calls or bool(parts.tool_calls)
        ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        is_first, self.has_begun = not self.has_begun, True
        return Piece(
            choice,
            prompt,
            parts,
            ids,
            logprobs or None,
            is_first,
            delta.finish_reason,
            delta.stop_reason,
            is_ending_forced=delta.is_ending_forced,
        )


def _joined(first: Parts, second: Parts) -> Parts:
    return Parts(
        first.content + second.content,
        first.reasoning + second.reasoning,
        first.tool_calls + second.tool_calls,
    )


@dataclass(slots=True)
class Totals:
    """What a reply has used so far, in tokens, and the times of its prompts."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    metrics: list[RequestMetrics] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)


class PieceMaker:
    """Turns the deltas of all prompts of one reply into pieces, and counts.

    n: answers per prompt. prompt_lengths: tokens of each prompt. stage: makes each answer's text
    stage. counts_generated: False where nothing that is generated is shown.
    A delta with an error raises it.
    """

    def __init__(
        self,
        n: int,
        prompt_lengths: Sequence[int],
        stage: Callable[[], TextStage] = PlainText,
        *,
        counts_generated: bool = True,
    ) -> None:
        self._n = n
        self._counts_generated = counts_generated
        self._answers = [_Answer(stage()) for _ in range(n * len(prompt_lengths))]
        self._cached = [0] * len(prompt_lengths)
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._num_open = len(prompt_lengths)
        self.totals = Totals(num_prompt_tokens=sum(prompt_lengths))

    @property
    def is_over(self) -> bool:
        """Whether the last piece of the last prompt has been made."""
        return self._num_open == 0

    def push(self, prompt: int, delta: OutputDelta) -> Piece | None:
        """Return the piece that is due after a delta of a prompt, if one is."""
        if delta.error is not None:
            raise delta.error
        totals = self.totals
        if self._counts_generated:
            totals.num_generated_tokens += len(delta.token_ids)
        self._cached[prompt] = delta.num_cached_tokens
        totals.num_cached_tokens = sum(self._cached)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        if delta.is_last:
            self._num_open -= 1
            if delta.metrics is not None:
                totals.metrics.append(delta.metrics)
        choice = prompt * self._n + delta.index
        piece = self._answers[choice].push(delta, choice, prompt)
        if piece is not None and piece.is_first:
            piece.prompt_logprobs = self._prompt_logprobs.get(prompt)
        if piece is not None and piece.finish_reason is not None:
            totals.finish_reasons.append(piece.finish_reason)
        return piece

    def called_tools(self, choice: int) -> bool:
        """Whether an answer holds a tool call so far."""
        return self._answers[choice].has_tool_calls


Item = tuple[int, OutputDelta | PromptProgress]
Items = AsyncIterator[Item]
