"""One tool call at a time, character by character.

Decides where a call's name and arguments begin and end. Knows no markers and no ids. Each scanner
is fed one character and says what it has become; what it has read so far is `raw`.

Invariant: what is said depends on the characters alone, so however a text is cut into pieces, the
calls are the same.
"""

import ast
import enum
import json
from collections.abc import Callable, Collection
from typing import Any

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("id", "type", "name", *_ARGUMENTS)
_WORDS = {"true": True, "false": False, "null": None}
_BLANK = " \t\r\n"


class Progress(enum.Enum):
    """What a scanner has become with a character."""

    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"  # it is no call; its text is `raw`


class JsonValue:
    """Follows one JSON value to its end; numbers and words end before the next character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._escaped = self._is_word = False

    def feed(self, char: str) -> bool:
        """Take a character of the value; return whether the value is complete with it."""
        if self._in_text:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_text = False
                return self._depth == 0
            return False
        if char == '"':
            self._in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        elif self._depth == 0:
            self._is_word = True
        return False

    def ends_before(self, char: str) -> bool:
        """Whether a number or a word is complete, since `char` is none of it."""
        return self._is_word and char in ",}] \t\r\n"


class JsonCall:
    """An object with a name and arguments, in any order.

    name: None until it is known. arguments: JSON as far as it is known. names: if given, an object
    that is certain to be a call of none of them is broken.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self.raw = ""
        self.name: str | None = None
        self.arguments = ""
        self._key = self._text = ""
        self._value = JsonValue()
        self._read: Callable[[str], Progress] = self._open

    def feed(self, char: str) -> Progress:
        """Take the next character, the first of which is `{`."""
        self.raw += char
        return self._read(char)

    def _open(self, _: str) -> Progress:
        return self._go_on(self._read_key)

    def _go_on(self, read: Callable[[str], Progress]) -> Progress:
        self._read, self._text, self._value = read, "", JsonValue()
        return Progress.OPEN

    def _read_key(self, char: str) -> Progress:
        if not self._text and char in _BLANK + ",":
            return Progress.OPEN
        if not self._text and char == "}":
            return Progress.DONE if self.name is not None else Progress.BROKEN
        if not self._text and char != '"':
            return Progress.BROKEN
        self._text += char
        if not self._value.feed(char):
            return Progress.OPEN
        self._key = _text_of(self._text) or ""
        if self._names is not None and self._key not in _KEYS:
            return Progress.BROKEN
        return self._go_on(self._read_colon)

    def _read_colon(self, char: str) -> Progress:
        if char in _BLANK:
            return Progress.OPEN
        return self._go_on(self._read_value) if char == ":" else Progress.BROKEN

    def _read_value(self, char: str) -> Progress:
        if not self._text and char in _BLANK:
            return Progress.OPEN
        if self._value.ends_before(char):
            progress = self._keep_value()
            return self._read_key(char) if progress is Progress.OPEN else progress
        self._text += char
        is_complete = self._value.feed(char)
        if self._key in _ARGUMENTS and self._text[0] == "{":
            self.arguments += char
        return self._keep_value() if is_complete else Progress.OPEN

    def _keep_value(self) -> Progress:
        if self._key == "name":
            self.name = _text_of(self._text)
            if self.name is None or (self._names is not None and self.name not in self._names):
                return Progress.BROKEN
        elif self._key in _ARGUMENTS and self._text[0] != "{":
            # Some models write the arguments as a text that holds JSON.
            text = _text_of(self._text)
            self.arguments = text if text is not None else self._text.replace("null", "")
        return self._go_on(self._read_key)


class NamedCall:
    """A name and then an object: `name{...}` or `name[ARGS]{...}`."""

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.arguments = ""
        self._value = JsonValue()

    def feed(self, char: str) -> Progress:
        """Take the next character."""
        self.raw += char
        if self.name is None:
            if char != "{":
                return Progress.BROKEN if char in '"\n' else Progress.OPEN
            self.name = self.raw[:-1].partition("[")[0].strip()
            if not self.name:
                return Progress.BROKEN
        self.arguments += char
        return Progress.DONE if self._value.feed(char) else Progress.OPEN


class PythonCall:
    """A call with keywords, `name(key=value)`; its arguments are known once it is complete.

    Values are Python's literals, and JSON's. names: as in `JsonCall`.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self.raw = ""
        self.name: str | None = None
        self.arguments = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, char: str) -> Progress:
        """Take the next character, the first of which begins a name."""
        self.raw += char
        if self._quote:
            self._follow_text(char)
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            if not self._depth and not self._is_known(char):
                return Progress.BROKEN
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            if self._depth <= 0:
                return self._finish()
        elif not self._depth and not (char.isalnum() or char in "_. "):
            return Progress.BROKEN
        return Progress.OPEN

    def _follow_text(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""

    def _is_known(self, char: str) -> bool:
        name = self.raw[:-1].strip()
        return char == "(" and (self._names is None or name in self._names or name == "print")

    def _finish(self) -> Progress:
        try:
            call = ast.parse(self.raw.strip(), mode="eval").body
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "print":
                call = call.args[0]
            if not isinstance(call, ast.Call) or call.args:
                return Progress.BROKEN
            name = ast.unparse(call.func)
            values = {str(word.arg): _literal(word.value) for word in call.keywords}
            self.arguments = json.dumps(values, ensure_ascii=False)
        except (ValueError, SyntaxError, RecursionError, IndexError, MemoryError, TypeError):
            return Progress.BROKEN
        if self._names is not None and name not in self._names:
            return Progress.BROKEN
        self.name = name
        return Progress.DONE


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal in which JSON's true, false and null may stand."""

    class Words(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant(_WORDS[name.id]) if name.id in _WORDS else name

    return ast.literal_eval(Words().visit(node))


def _text_of(value: str) -> str | None:
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
