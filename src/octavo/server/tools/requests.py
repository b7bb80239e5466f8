"""What a chat request says of tools and formats, checked and brought into one form.

Decides which tools, choices and response formats are allowed, and what the engine is told of them.
Pure functions over plain JSON; knows no HTTP and no engine.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from octavo.engine.schema import MAX_DEPTH
from octavo.errors import InvalidParameterError
from octavo.request import StructuredOutputs
from octavo.server.tools.constraint import calls_constraint
from octavo.server.tools.formats import ToolFormat

Json = dict[str, Any]
Tool = Mapping[str, Any]

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = ("auto", "none", "required")


def response_format_constraint(response_format: object) -> StructuredOutputs | None:
    """Return what `response_format` asks of the answer; None is nothing.

    Raises InvalidParameterError that names the field, BadRequestError for what cannot be enforced.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        allowed = "an object of type text, json_object or json_schema"
        raise InvalidParameterError("response_format", response_format, allowed)
    assert isinstance(response_format, Mapping)
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidParameterError(
            "response_format.json_schema.schema", schema, "a JSON schema, an object"
        )
    return StructuredOutputs(json=dict(schema))


def checked_tools(tools: object) -> list[Json]:
    """Return the tools of a request: each a function with a name of its own.

    Raises InvalidParameterError that names the field.
    """
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidParameterError("tools", tools, f"a list of at most {MAX_TOOLS} tools")
    names: set[str] = set()
    for place, tool in enumerate(tools):
        _check_tool(tool, f"tools[{place}]")
        name = tool["function"]["name"]
        if name in names:
            raise InvalidParameterError(f"tools[{place}].function.name", name, "different for each")
        names.add(name)
    return tools


def _check_tool(tool: object, where: str) -> None:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise InvalidParameterError(where, tool, "an object of type function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameterError(f"{where}.function", function, "an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = "1 to 64 letters, digits, dots, underscores or dashes"
        raise InvalidParameterError(f"{where}.function.name", name, allowed)
    if not isinstance(function.get("description"), str | None):
        raise InvalidParameterError(
            f"{where}.function.description", function["description"], "a text"
        )
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise InvalidParameterError(
            f"{where}.function.parameters", parameters, "a JSON schema, an object"
        )
    _check_depth(parameters, f"{where}.function.parameters")


def _check_depth(value: object, where: str) -> None:
    """A template writes tools by recursion, so their depth is bounded (objects and lists count)."""
    level: list[object] = [value]
    # A level of schemas is at most two of JSON: the keyword's value, and the schema within it.
    for _ in range(2 * MAX_DEPTH + 1):
        below: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = below
        if not level:
            return
    raise InvalidParameterError(where, "deeper", f"nested at most {2 * MAX_DEPTH} deep")


def chosen_tools(
    tools: Sequence[Json], choice: object
) -> tuple[Literal["auto", "none", "required", "named"], list[Json]]:
    """Return the mode of `tool_choice`, and the tools that may be called in it.

    Without a choice it is "auto" where there are tools, else "none".
    """
    if choice is None:
        return ("auto" if tools else "none"), list(tools)
    if isinstance(choice, str) and choice in _CHOICES:
        if choice == "required" and not tools:
            raise InvalidParameterError("tool_choice", choice, "none where there are no tools")
        mode: Any = choice if tools else "none"
        return mode, [] if choice == "none" else list(tools)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        known = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        raise InvalidParameterError(
            "tool_choice", choice, f"{', '.join(_CHOICES)} or a function among the tools ({known})"
        )
    return "named", found


def tools_constraint(
    form: ToolFormat,
    mode: Literal["auto", "none", "required", "named"],
    tools: Sequence[Json],
    *,
    special: Mapping[str, int],
    parallel: bool = True,
) -> StructuredOutputs | None:
    """Return what makes an answer a call, where `mode` says that it must be one."""
    if mode not in ("required", "named"):
        return None
    return calls_constraint(form, tools, special=special, parallel=parallel and mode == "required")


def finish_reason(reason: str | None, num_calls: int, mode: str) -> str | None:
    """Return OpenAI's reason: "tool_calls" after calls, but "stop" after a named one."""
    return "tool_calls" if reason == "stop" and num_calls and mode != "named" else reason


def normalised_messages(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return messages with a null content as "", and without empty tool calls or null fields."""
    ready = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidParameterError("messages", message, "a list of objects with a role")
        kept = {k: v for k, v in message.items() if v is not None}
        if not kept.get("tool_calls"):
            kept.pop("tool_calls", None)
        if "content" not in kept:
            kept["content"] = ""
        ready.append(kept)
    return ready


def tool_instructions(form: ToolFormat, tools: Sequence[Tool]) -> str:
    """Return what a system message can say of tools, for a chat template that knows none."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    opening, closing = form.opens[0], form.closes[0] if form.closes else ""
    if form.notation == "python":
        example = "name(key=value)"
    else:
        example = f'{{"name": "...", "{form.arguments}": {{...}}}}'
    if form.is_bare:
        opening = closing = ""
    call = "\n".join(filter(None, (opening, example, closing)))
    return f"You can call these functions:\n{listed}\nTo call one, answer only with:\n{call}"
