"""Reasoning and answer of one output, split as the text comes.

Decides what of a text is reasoning, drops the markers and the blanks beside them. Knows no tokens
and no HTTP.

Invariant: the parts, joined, are the same however the text is cut into pushes.
"""

from typing import NamedTuple

from octavo.request import Reasoning

_STYLES = (("<think>", "</think>"), ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"))


class Parts(NamedTuple):
    """More of an output: its reasoning, and its answer."""

    reasoning: str
    content: str


def find_reasoning(template: str | None, prompt: str) -> Reasoning | None:
    """Return how a model sets its reasoning apart, by its chat template; None if it does not.

    prompt: the rendered prompt, whose end shows whether the template has opened the part.
    """
    for start, end in _STYLES:
        if end in (template or "") or start in (template or ""):
            opened, closed = prompt.rfind(start), prompt.rfind(end)
            is_open = opened > closed and not prompt[opened + len(start) :].strip()
            if not is_open and closed >= 0 and not prompt[closed + len(end) :].strip():
                return None  # the template has closed it: the model is to answer at once
            return Reasoning(start=start, end=end, is_open=is_open)
    return None


class ReasoningSplitter:
    """Splits one output; without `reasoning` it is all answer."""

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._reasoning = reasoning or Reasoning()
        self._state = "answer"
        if reasoning is not None:
            self._state = "thought" if reasoning.is_open else "start"
        self._held = ""
        self._at_edge = True  # blanks here belong to a marker
        self._had_thought = self._state == "thought"

    def push(self, text: str) -> Parts:
        """Return what is certain after `text`."""
        self._held += text
        thought = answer = ""
        if self._state == "start":
            self._look_for_start()
        if self._state == "thought":
            thought = self._look_for_end()
        if self._state == "answer":
            answer = self._take_answer()
        return Parts(thought, answer)

    def finish(self) -> Parts:
        """Return what was held back."""
        held, self._held = self._held, ""
        if self._state == "thought":
            return Parts(held.lstrip() if self._at_edge else held, "")
        return Parts("", held if self._state == "start" or not self._had_thought else held.lstrip())

    def _look_for_start(self) -> None:
        start, solid = self._reasoning.start, self._held.lstrip()
        if solid.startswith(start):
            self._held, self._state, self._had_thought = solid[len(start) :], "thought", True
        elif not start.startswith(solid):
            self._state = "answer"

    def _look_for_end(self) -> str:
        """Return reasoning that can no longer be part of the end marker or the blanks before it."""
        before, found, after = self._held.partition(self._reasoning.end)
        if found:
            self._held, self._state = after, "answer"
            shown = before.strip() if self._at_edge else before.rstrip()
            self._at_edge = True
            return shown
        certain = before[: _tail_start(before, self._reasoning.end)].rstrip()
        shown = certain.lstrip() if self._at_edge else certain
        self._held = before[len(certain) :]
        self._at_edge = self._at_edge and not shown
        return shown

    def _take_answer(self) -> str:
        text, self._held = self._held, ""
        if self._at_edge and self._had_thought:
            text = text.lstrip()
            self._at_edge = not text
        return text


def _tail_start(text: str, marker: str) -> int:
    """Return where the longest tail begins that is a beginning of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return len(text) - length
    return len(text)
