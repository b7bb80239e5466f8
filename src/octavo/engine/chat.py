"""Chat messages to prompts, by the model's own Jinja template.

Decides how messages are brought into the form a template expects, what a template may do (it is
code from a model file: it runs in Jinja's sandbox, with bounded ranges, powers, repetitions and
output; a nest of bounded loops can still keep one thread busy for long), and which parts of the
rendered prompt came from the user. It does not know HTTP or the engine.

Invariant: as long as a template writes a user's strings as they are or trimmed, none of their
characters is ever part of a guarded token, unless `allow_special` says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import ChatTemplateError, InvalidParameterError
from octavo.weights.guarded import GuardedTexts
from octavo.weights.tokenizer import Tokenizer

Message = Mapping[str, Any]

MAX_PROMPT_CHARS = 16 << 20  # of one rendered prompt
MAX_REPEATED = 1 << 20  # items of a sequence times a number, and bits of a power
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Code points that Unicode reserves for uses like this one, and never for text.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_RESERVED = frozenset({"messages", "bos_token", "eos_token", "raise_exception", "strftime_now"})


class ChatTemplate:
    """A compiled chat template.

    `source` is the Jinja text from the model or from `--chat-template`; `bos_token` and `eos_token`
    are what it writes for them. `now` is the time that `strftime_now` tells; without it the
    template sees no such function (and templates then use a date of their own).
    Raises ChatTemplateError where the source does not parse.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        now: datetime | None = None,
    ) -> None:
        self.source = source
        self._now = now
        self._globals = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _Environment()
        try:
            self._template = environment.from_string(source)
            self.words = frozenset(_constants(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ChatTemplateError(f"The chat template does not parse: {_reason(error)}") from None

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        *,
        override: str | None = None,
        with_tools: bool = False,
        now: datetime | None = None,
    ) -> ChatTemplate:
        """Return the template that `tokenizer`'s model brings, or the source `override`.

        `with_tools` prefers the variant "tool_use" where there is one.
        Raises ChatTemplateError where the model has none.
        """
        templates = tokenizer.chat_templates
        source = override
        if source is None and with_tools:
            source = templates.get("tool_use")
        if source is None:
            source = templates.get("default")
        if source is None:
            raise ChatTemplateError(
                "The model has no chat template. Use completions, or start with --chat-template."
            )
        return ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token, now=now)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        now: datetime | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt as text; `kwargs` are further variables of the template.

        A generation prompt is added unless the final message is to be continued, which ends the
        text with that message's content. Raises ChatTemplateError with the template's own message
        where it refuses, InvalidParameterError for arguments that contradict each other.
        """
        variables = {"tools": tools, "documents": documents, **_checked(kwargs)}
        generates = _generates(add_generation_prompt, continue_final_message)
        marks = _unused_marks(self.source, messages, variables)
        guard = _Guard(GuardedTexts(()), marks, self.words)
        return self._render(messages, guard, variables, generates, continue_final_message, now)

    def _render(
        self,
        messages: Sequence[Message],
        guard: _Guard,
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
        now: datetime | None,
    ) -> str:
        prepared = [self._prepare(message, guard) for message in messages]
        end = guard.spare_mark if continue_final_message else ""
        tail = _mark_end(prepared, end) if end else ""
        text = self._run(
            {
                "messages": prepared,
                **{name: guard.tree(value) for name, value in variables.items()},
                "add_generation_prompt": add_generation_prompt,
            },
            self._now if now is None else now,
        )
        if not end:
            return text
        before, found, after = text.rpartition(end)
        if not found:
            raise ChatTemplateError("The chat template leaves out the message to be continued.")
        return before + (tail if after.startswith(tail) else "")

    def _run(self, variables: Mapping[str, Any], now: datetime | None) -> str:
        functions: dict[str, Any] = {} if now is None else {"strftime_now": now.strftime}
        pieces, size = [], 0
        try:
            for piece in self._template.generate({**self._globals, **functions, **variables}):
                size += len(piece)
                if size > MAX_PROMPT_CHARS:
                    raise SecurityError(f"it wrote more than {MAX_PROMPT_CHARS:,} characters")
                pieces.append(piece)
        except Exception as error:  # a template may fail in any way that Python can
            raise ChatTemplateError(f"The chat template failed: {_reason(error)}") from None
        return "".join(pieces)

    def _prepare(self, message: Message, guard: _Guard) -> dict[str, Any]:
        """A message as templates expect it: see `_content` and `_tool_calls`; a missing or null
        content is "", and null or empty tool calls are none."""
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidParameterError("A message's role", role, "a string")
        ready = {key: value for key, value in message.items() if key not in ("role", "tool_calls")}
        ready["content"] = self._content(message.get("content"))
        calls = message.get("tool_calls")
        if calls:
            ready["tool_calls"] = self._tool_calls(calls)
        guarded: dict[str, Any] = guard.tree(ready)
        return {"role": role if role in ROLES else guard.text(role), **guarded}

    def _content(self, content: object) -> object:
        """Text, or text parts as a list where the template loops over them, else joined by line."""
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        texts = []
        for part in content if isinstance(content, list | tuple) else [content]:
            match part:
                case {"type": "text", "text": str(text)} | str(text):
                    texts.append(text)
                case _:
                    allowed = "a string or a list of text parts (this model reads text only)"
                    raise InvalidParameterError("A message's content", part, allowed)
        if self._takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _tool_calls(self, calls: object) -> list[dict[str, Any]]:
        """Calls with arguments as an object, or as JSON text where the template wants text."""
        if not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls):
            raise InvalidParameterError("tool_calls", calls, "a list of objects")
        ready = []
        for call in map(dict, calls):
            function = call.get("function")
            if isinstance(function, Mapping) and "arguments" in function:
                arguments = self._arguments(function["arguments"])
                call["function"] = {**function, "arguments": arguments}
            ready.append(call)
        return ready

    def _arguments(self, arguments: object) -> object:
        if self._takes_argument_text:
            if isinstance(arguments, str):
                return arguments
            return json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            return arguments
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes the text of content parts (tried on a message with one)."""
        parts = [{"type": "text", "text": "needle"}]
        shown = self._try([{"role": "user", "content": parts}])
        return "needle" in shown and "'text'" not in shown and '"text"' not in shown

    @cached_property
    def _takes_argument_text(self) -> bool:
        """Whether the template writes a call's arguments right only if they are JSON text."""
        as_object, as_text = (
            self._try(
                [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]},
                ]
            )
            for arguments in ({"needle": "n"}, '{"needle": "n"}')
        )
        return ("needle" not in as_object or "{'needle'" in as_object) and ('{"needle"' in as_text)

    def _try(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._run({"messages": messages, "add_generation_prompt": False}, self._now)
        except ChatTemplateError:
            return ""


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    allow_special: bool = False,
    now: datetime | None = None,
    **kwargs: Any,
) -> list[int]:
    """Return the token ids of `messages`, begun with exactly one BOS where the model wants one.

    The template's own token texts become tokens; those in messages, tools, documents and `kwargs`
    stay text, unless `allow_special`. Errors are those of `ChatTemplate.render`.
    """
    variables = {"tools": tools, "documents": documents, **_checked(kwargs)}
    generates = _generates(add_generation_prompt, continue_final_message)
    guard = _Guard(
        GuardedTexts(()) if allow_special else tokenizer.guarded,
        _unused_marks(template.source, messages, variables),
        template.words,
    )
    text = template._render(messages, guard, variables, generates, continue_final_message, now)
    return tokenizer.encode(text, parse_special=True, mark=guard.mark)


# --- user text


class _Guard:
    """Protects every string of a message; `spare_mark` is a second character that none contains."""

    def __init__(self, texts: GuardedTexts, marks: tuple[str, str], words: frozenset[str]) -> None:
        self._texts, self.words = texts, words
        self.mark, self.spare_mark = marks

    def text(self, text: str) -> str:
        return self._texts.protect(text, self.mark, self.words)

    def tree(self, value: Any) -> Any:
        """The same JSON value with its strings and keys protected."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.tree(key): self.tree(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(child) for child in value]
        return value


def _unused_marks(source: str, *values: object) -> tuple[str, str]:
    """Two reserved characters that neither the template nor any string of the request has."""
    try:
        used = {char for text in (source, *_strings(values)) for char in _MARKS if char in text}
    except RecursionError:
        raise ChatTemplateError("The messages or tools are nested too deeply.") from None
    free = [char for char in _MARKS if char not in used]
    if len(free) < 2:
        raise ChatTemplateError("The messages use up the characters U+FDD0 to U+FDEF.")
    return free[0], free[1]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _strings(key)
            yield from _strings(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _strings(child)


def _mark_end(messages: list[dict[str, Any]], mark: str) -> str:
    """Put `mark` behind the last message's text, before its trailing space, and return that."""
    if not messages:
        raise ChatTemplateError("There is no message to be continued.")
    holder, key = messages[-1], "content"
    if isinstance(holder[key], list):
        if not holder[key]:
            raise ChatTemplateError("The message to be continued has no text.")
        holder, key = holder[key][-1], "text"
    text: str = holder[key]
    solid = text.rstrip()
    holder[key] = solid + mark + text[len(solid) :]
    return text[len(solid) :]


def _generates(add_generation_prompt: bool | None, continue_final_message: bool) -> bool:
    if add_generation_prompt and continue_final_message:
        raise InvalidParameterError(
            "add_generation_prompt", True, "false together with continue_final_message"
        )
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


def _checked(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in kwargs:
        if name in _RESERVED:
            raise InvalidParameterError("A template variable", name, "another than Octavo's own")
    return kwargs


def _call(arguments: object) -> dict[str, Any]:
    return {
        "id": "call_0",
        "type": "function",
        "function": {"name": "probe", "arguments": arguments},
    }


# --- Jinja


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it only makes a scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that Hugging Face documents for templates, with more bounds."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            size = bits * right if operator == "**" else bits + right.bit_length()
        elif operator == "*":
            size = _length(left) * _length(right)
        if size > MAX_REPEATED:
            raise SecurityError(f"{operator} makes a value of {size:,} items or bits")
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int:
    """What a factor contributes to the length of a repeated sequence."""
    if isinstance(value, int):
        return value
    return len(value) if isinstance(value, str | list | tuple) else 1


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: no HTML escapes, and other scripts as they are."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:  # marks must stay characters, so that they can be taken out again
        text = re.sub(r"[^\x00-\x7f]", lambda c: c[0] if c[0] in _MARKS else _escape(c[0]), text)
    return text


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1]


def _constants(template: nodes.Template) -> Iterator[str]:
    """The names and strings that a template may compare something with."""
    for const in template.find_all(nodes.Const):
        if isinstance(const.value, str):
            yield const.value
    for attribute in template.find_all(nodes.Getattr):
        yield attribute.attr


def _reason(error: Exception) -> str:
    """One line: the template's own message where it raised one, else the kind of error too."""
    message = " ".join(str(error).split())
    line = getattr(error, "lineno", None)
    where = f"line {line}: " if line else ""
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    text = f"{where}{kind}{message}" if message else type(error).__name__
    return text if len(text) <= 500 else f"{text[:499]}…"
