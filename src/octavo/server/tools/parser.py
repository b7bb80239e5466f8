"""From a model's text, piece by piece, to content and tool calls.

Decides what of a text is shown, what is a call, and each call's index and id. Knows no tokens, no
HTTP and no schemas.

Invariant: the events, joined, are the same however the text is cut into pushes; a whole reply is
their sum.
"""

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass

from octavo.server.tools.formats import ToolFormat
from octavo.server.tools.scanners import JsonCall, NamedCall, Progress, PythonCall


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call begins: the `index`-th of the answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments; all of them joined are JSON if the model wrote JSON."""

    index: int
    text: str


ToolEvent = ContentDelta | CallStarted | ArgumentsDelta


def call_id(form: ToolFormat) -> str:
    """Return a new id, as long as the format's templates want it."""
    unique = uuid.uuid4().hex
    return unique[: form.id_length] if form.id_length else f"call_{unique[:24]}"


class ToolCallParser:
    """Reads one answer.

    names: of the tools that may be called. Without a marker, only their calls are calls; between
    markers, a call of another name is one too, for the caller to answer. make_id: a new id.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        make_id: Callable[[ToolFormat], str] = call_id,
    ) -> None:
        self._form = form
        self._names = frozenset(names)
        self._make_id = make_id
        self._events: list[ToolEvent] = []
        self._read: Callable[[str], None] = self._read_content
        self._held = ""  # may become a marker, or is blank before one
        self._marked = False  # between markers, or in a part that needs none
        self._lead = ""  # of a part without markers: what is shown if no call comes of it
        self._may_be_bare = form.is_bare
        self._scanner: JsonCall | NamedCall | PythonCall | None = None
        self._after_call = self._has_shown = False
        self._num_sent = 0  # characters of the open call's arguments
        self._is_started = False
        self.num_calls = 0

    def push(self, text: str) -> list[ToolEvent]:
        """Return what is certain after `text`."""
        for char in text:
            self._read(char)
        return self._drain()

    def finish(self) -> list[ToolEvent]:
        """Return what was held back. A call cut short keeps the arguments it has."""
        if self._scanner is not None and not self._is_started:
            self._show(self._lead + self._scanner.raw)
        elif self._scanner is None and self._read == self._read_bare:
            self._show(self._lead)
        elif self._scanner is None and self._read == self._read_content:
            self._show(self._held)
        self._held, self._scanner, self._lead = "", None, ""
        return self._drain()

    def _drain(self) -> list[ToolEvent]:
        """Return the events since the last time, neighbours of one kind joined."""
        joined: list[ToolEvent] = []
        for event in self._events:
            match joined[-1:], event:
                case [ContentDelta(before)], ContentDelta(text):
                    joined[-1] = ContentDelta(before + text)
                case [ArgumentsDelta(index, before)], ArgumentsDelta(same, text) if index == same:
                    joined[-1] = ArgumentsDelta(index, before + text)
                case _:
                    joined.append(event)
        self._events = []
        return joined

    def _show(self, text: str) -> None:
        if text:
            self._has_shown = True
            self._events.append(ContentDelta(text))

    # --- outside of calls -----------------------------------------------------------------------

    def _read_content(self, char: str) -> None:
        """Show text, except a marker and the blanks before it."""
        self._held += char
        while self._held and self._read == self._read_content:
            solid = self._held.lstrip()
            if not solid:
                return  # blanks: what follows decides
            if solid in self._form.opens:
                self._open()
            elif solid in self._form.closes and self.num_calls:
                self._held = ""
            elif any(marker.startswith(solid) and marker != solid for marker in self._form.markers):
                return
            elif self._may_be_bare and solid[0] in ("[" if self._is_python else "{["):
                self._open_bare()
            else:
                self._show_one(len(self._held) - len(solid))

    def _show_one(self, num_blanks: int) -> None:
        """Show the first character held that is no blank, and the blanks before it.

        Blanks after a call are shown only if there is a text before it.
        """
        self._may_be_bare = False
        first = num_blanks if self._after_call and not self._has_shown else 0
        self._show(self._held[first : num_blanks + 1])
        self._held = self._held[num_blanks + 1 :]
        self._after_call = False

    @property
    def _is_python(self) -> bool:
        return self._form.notation == "python"

    def _open(self) -> None:
        # A fence is a marker only if a call of one of the tools follows.
        self._marked = self._form.name != "json"
        self._lead = "" if self._marked else self._held
        self._held, self._may_be_bare = "", False
        self._read = self._read_between if self._marked else self._read_bare

    def _open_bare(self) -> None:
        """The answer begins like a call: see whether it is one of the tools' calls."""
        held, self._held = self._held, ""
        self._lead, self._marked = "", False
        self._read = self._read_bare
        for char in held:
            self._read(char)

    def _read_bare(self, char: str) -> None:
        """Between the answer's beginning and its first call."""
        if char in " \t\r\n" or (char == "[" and "[" not in self._lead):
            self._lead += char
        elif self._is_python and (char.isalpha() or char == "_") and "[" in self._lead:
            self._begin(PythonCall(self._names), char)
        elif not self._is_python and char == "{":
            self._begin(JsonCall(self._names), char)
        else:
            self._give_up(char)

    def _give_up(self, rest: str) -> None:
        """What looked like a call is text."""
        lead, self._lead, self._scanner = self._lead, "", None
        self._may_be_bare = False
        self._read = self._read_content
        self._show(lead)
        for char in rest:
            self._read(char)

    # --- between and in calls -------------------------------------------------------------------

    def _read_between(self, char: str) -> None:
        """After an opening marker or a call: separators, another call, or a closing marker."""
        self._held += char
        while (solid := self._held.strip()) and self._read == self._read_between:
            if solid in self._form.markers:
                self._held = ""
                if solid in self._form.closes:
                    self._read = self._read_content
            elif any(marker.startswith(solid) for marker in self._form.markers):
                return
            elif solid[0] in ",;[]":
                self._held = solid[1:]
            else:
                self._held = ""
                self._after_blank(solid)

    def _after_blank(self, text: str) -> None:
        first, names = text[0], None if self._marked else self._names
        if first == "{" and not self._is_python:
            self._begin(JsonCall(names), text)
        elif self._is_python and (first.isalpha() or first == "_"):
            self._begin(PythonCall(names), text)
        elif self._form.name == "mistral" and (first.isalpha() or first == "_"):
            self._begin(NamedCall(), text)
        else:
            self._give_up(f" {text}" if self._has_shown and not self.num_calls else text)

    def _begin(self, scanner: JsonCall | NamedCall | PythonCall, text: str) -> None:
        self._scanner, self._num_sent, self._is_started = scanner, 0, False
        self._read = self._read_call
        for char in text:
            self._read(char)

    def _read_call(self, char: str) -> None:
        scanner = self._scanner
        assert scanner is not None
        progress = scanner.feed(char)
        if progress is Progress.BROKEN and not self._is_started:
            self._give_up_call(scanner.raw)
            return
        if scanner.name is not None and not self._is_started:
            self._is_started = True
            self._lead = ""
            identity = self._make_id(self._form)
            self._events.append(CallStarted(self.num_calls, identity, scanner.name))
            self.num_calls += 1
        if progress is not Progress.OPEN and not scanner.arguments:
            scanner.arguments = "{}"
        if self._is_started:
            self._send(scanner.arguments)
        if progress is not Progress.OPEN:
            self._scanner, self._read, self._after_call = None, self._read_between, True

    def _give_up_call(self, raw: str) -> None:
        self._show(self._lead + raw[:1])
        self._lead = ""
        self._give_up(raw[1:])

    def _send(self, arguments: str) -> None:
        index = self.num_calls - 1
        if len(arguments) > self._num_sent:
            self._events.append(ArgumentsDelta(index, arguments[self._num_sent :]))
            self._num_sent = len(arguments)
