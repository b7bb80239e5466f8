"""From the token ids of one sequence to its text, piece by piece.

Decides when bytes are a whole character, when text may be shown and where a stop string ends it.
Knows nothing of requests, streams or models; a tokenizer is only a source of bytes.

Invariant: the pieces joined are the same however the tokens were cut into pushes, and equal the
bytes of all tokens decoded at once, up to the stop string.
"""

import codecs
from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet
from typing import Protocol

from octavo.request import Reasoning, SamplingParams

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What this module needs of a tokenizer."""

    @property
    def special_ids(self) -> AbstractSet[int]:
        """Ids that are not text, such as the end of a turn."""
        ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return exactly the bytes that the token adds to a text in progress."""
        ...


class IncrementalDetokenizer:
    """Bytes of tokens to whole characters; special tokens add nothing if `skip_special_tokens`.

    A character split over tokens is held back until it is whole. Invalid bytes become U+FFFD as in
    `bytes.decode("utf-8", "replace")`, which is what all pieces joined equal.

    A leading space is kept, also on the first token: the output continues a prompt, so "▁the" is
    " the" here, as in decode(prompt + output) without decode(prompt). Only decode(output) alone
    would strip it, and would lose a space in the midst of a text.
    """

    __slots__ = ("_decoder", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped: AbstractSet[int] = (
            tokenizer.special_ids if skip_special_tokens else frozenset()
        )
        self._decoder = _UTF8("replace")

    def push(self, token_ids: Ordered[int]) -> str:
        """Return the characters that became whole with these tokens."""
        token_bytes = self._tokenizer.token_bytes
        skipped = self._skipped
        content = b"".join([token_bytes(i) for i in token_ids if i not in skipped])
        return self._decoder.decode(content)

    def finish(self) -> str:
        """Return one U+FFFD if the tokens end inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text at the stop string that is complete first.

    Of stop strings complete at the same character, the first in the list counts, as in vLLM.
    Matching sees text, so how it was cut into tokens or pushes does not matter. Unless `include`,
    the longest tail that may still become a stop string is held back, and nothing else is.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Ordered[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, count: bool = True) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that ended it, if one did.

        A stop string must end in a text pushed with `count`; it may begin before. What follows it
        is dropped, and so is every later push.
        """
        if self.matched is not None:
            return "", self.matched
        num_held = len(self._held)
        text = self._held + text
        shown = num_held if self._include else 0  # text[:shown] has been returned before
        if count and (found := self._first_match(text, num_held)):
            start, self.matched = found
            self._held = ""
            return text[shown : start + len(self.matched) * self._include], self.matched
        start = self._tail_start(text)
        self._held = text[start:]
        return text[shown : None if self._include else start], None

    def finish(self) -> str:
        """Return the text held back: no stop string came of it."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return start and stop string of the match that ends first, after `num_old` characters."""
        best: tuple[int, str] | None = None
        end = len(text)
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1), end)
            if start >= 0:
                best = start, stop
                # A later one in the list counts only if it ends sooner.
                end = start + len(stop) - 1
        return best

    def _tail_start(self, text: str) -> int:
        """Return where the longest tail begins that is a proper beginning of a stop string."""
        best = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), best)
            while start >= 0:
                if stop.startswith(text[start:]):
                    best = start
                    break
                start = text.find(stop[0], start + 1, best)
        return best


class AnswerStart:
    """Finds where the answer begins in an output with reasoning (see `Reasoning`)."""

    __slots__ = ("_held", "_reasoning", "_state")

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._held = ""
        self._state = "thought" if reasoning.is_open else "start"

    def push(self, text: str) -> tuple[str, str]:
        """Return the text that is none of the answer, its markers with it, and the answer's."""
        if self._state == "answer":
            return "", text
        self._held += text
        before = ""
        if self._state == "start":
            start = self._reasoning.start
            if self._held.startswith(start):
                before, self._held, self._state = start, self._held[len(start) :], "thought"
            elif not start.startswith(self._held):
                self._state = "answer"
                return "", self._held
        if self._state == "thought":
            thought, end, answer = self._held.partition(self._reasoning.end)
            if end:
                self._state = "answer"
                return before + thought + end, answer
            certain = max(0, len(thought) - len(self._reasoning.end) + 1)
            before, self._held = before + thought[:certain], thought[certain:]
        return before, ""

    def finish(self) -> str:
        """Return what was held back."""
        return "" if self._state == "answer" else self._held


class OutputText:
    """The text of one sequence: its tokens through both classes above.

    num_tokens: tokens pushed so far, up to and with the one that completed the stop string; those
    after it, of the same push, are no part of the output. Stop strings do not count in the first
    `params.min_tokens` tokens: as in vLLM, one must end in the text of a later token. Nor do they
    count in the reasoning part.
    """

    __slots__ = ("_answer", "_detokenizer", "_min_tokens", "_parts", "_stops", "num_tokens")

    def __init__(self, tokenizer: TokenBytes, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        stops = params.stop_strings
        self._stops = (
            StopStrings(stops, include=params.include_stop_str_in_output) if stops else None
        )
        self._answer = AnswerStart(params.reasoning) if params.reasoning and stops else None
        self._min_tokens = params.min_tokens
        self._parts: list[str] = []
        self.num_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched if self._stops is not None else None

    @property
    def text(self) -> str:
        """All that was returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_ids: Ordered[int]) -> tuple[str, str | None]:
        """Add generated tokens; return the new text (often "") and the stop string that matched."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            delta, matched = self._detokenizer.push(token_ids), None
        else:
            delta, matched = self._push_until_stop(self._stops, token_ids)
        if delta:
            self._parts.append(delta)
        return delta, matched

    def _push_until_stop(
        self, stops: StopStrings, token_ids: Ordered[int]
    ) -> tuple[str, str | None]:
        delta = ""
        for token_id in token_ids:
            if stops.matched is not None:
                break
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if text and self._answer is not None:
                before, text = self._answer.push(text)
                delta += before
            if text:
                delta += stops.push(text, count=self.num_tokens > self._min_tokens)[0]
        return delta, stops.matched

    def finish(self) -> str:
        """Return what was held back, unless a stop string ended the text. Call once, at the end.

        The U+FFFD of a cut character is never part of a stop string.
        """
        if self._stops is None:
            delta = self._detokenizer.finish()
        elif self._stops.matched is None:
            thought = self._answer.finish() if self._answer is not None else ""
            delta = thought + self._stops.finish() + self._detokenizer.finish()
        else:
            delta = ""
        if delta:
            self._parts.append(delta)
        return delta


def token_display(content: bytes) -> str:
    """Return a token's exact bytes as a text to show beside its log-probability.

    Whole characters are shown as they are; a token that holds a part of one is shown as OpenAI
    does, "bytes:\\xe6\\xb1", because half a character has no text of its own.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + content.decode("ascii", errors="backslashreplace")
