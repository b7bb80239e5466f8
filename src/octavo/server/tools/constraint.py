"""A grammar of tool calls: what a model may write when it must call a tool.

Decides how the calls of each format are written and that the arguments fit the tools' schemas.
What a grammar of this module accepts, `ToolCallParser` reads as calls and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.grammar import json_options, marker
from octavo.engine.schema import checked_schema
from octavo.request import StructuredOutputs
from octavo.server.tools.formats import ToolFormat

Json = dict[str, Any]
Tool = Mapping[str, Any]

MAX_CALLS = 16


def calls_constraint(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    special: Mapping[str, int],
    parallel: bool = True,
) -> StructuredOutputs:
    """Return what an answer of calls alone must be: one call, or with `parallel` several.

    tools: in OpenAI's form, checked. special: texts that are tokens of their own, and their ids.
    Raises BadRequestError for a schema that cannot be enforced.
    """
    rules = [_envelope(form, special, parallel)]
    calls = []
    for number, tool in enumerate(tools):
        schema = _parameters(tool, f"tools[{number}].function.parameters")
        name = tool["function"]["name"]
        calls.append(f"call_{number}")
        write = _python_call if form.notation == "python" else _json_call
        rules.extend(write(form, f"call_{number}", name, schema))
    rules.append(f"call: {' | '.join(calls)}")
    return StructuredOutputs(grammar="\n".join(rules))


def _envelope(form: ToolFormat, special: Mapping[str, int], parallel: bool) -> str:
    """The rule `start`: markers and separators around `call`."""
    more = f"{{0,{MAX_CALLS - 1}}}"

    def calls(separator: str) -> str:
        return f'call ("{separator}" call){more}' if parallel else "call"

    opening = marker(form.opens[0], special)
    listed = f'"[" {calls(", ")} "]"'
    match form.name:
        case "hermes":
            closing = marker(form.closes[0], special)
            ones = f'one ("\\n" one){more}' if parallel else "one"
            return f'start: {ones}\none: {opening} "\\n" call "\\n" {closing}'
        case "mistral":
            return f"start: {opening} {listed}"
        case "pythonic":
            return f"start: {listed}"
        case "gemma":
            lines = calls(r"\n")
            return f'start: {opening} "\\n" {lines} "\\n```"'
        case "llama3_json":
            return f"start: {calls('; ')}"
        case _:
            return f"start: call | {listed}" if parallel else "start: call"


def _parameters(tool: Tool, where: str) -> Json:
    """Return the schema of a tool's arguments; a tool without one takes none."""
    schema = tool["function"].get("parameters")
    if not schema:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **checked_schema(schema, where)}


def _rule(name: str, schema: Json) -> str:
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': json_options(compact=False)})}"


def _json_call(form: ToolFormat, rule: str, name: str, schema: Json) -> list[str]:
    head = json.dumps(f'{{"name": {json.dumps(name)}, "{form.arguments}": ')
    return [f'{rule}: {head} {rule}_arguments "}}"', _rule(f"{rule}_arguments", schema)]


def _python_call(form: ToolFormat, rule: str, name: str, schema: Json) -> list[str]:
    """Keywords in the order of the schema, the required ones first; values are written as JSON."""
    shared: Json = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties: Json = schema.get("properties", {})
    required = [key for key in properties if key in schema.get("required", ())]
    words = required + [key for key in properties if key not in required]
    rules = []
    for place, key in enumerate(words):
        value = properties[key] if isinstance(properties[key], dict) else {}
        rules.append(f"{rule}_word_{place}: {json.dumps(f'{key}=')} {rule}_value_{place}")
        rules.append(_rule(f"{rule}_value_{place}", {**shared, **value}))
    sequence = _keywords([f"{rule}_word_{place}" for place in range(len(words))], len(required))
    return [f'{rule}: {json.dumps(f"{name}(")} {sequence} ")"', *rules]


def _keywords(words: list[str], num_required: int) -> str:
    """The first `num_required` words and any of the others, in order, between commas."""
    others = [f'(", " {word})?' for word in words[num_required:]]
    if num_required:
        return ' ", " '.join(words[:num_required]) + " " + " ".join(others)
    beginnings = (" ".join([word, *others[i + 1 :]]) for i, word in enumerate(words))
    return f"({' | '.join(beginnings)})?" if words else ""
