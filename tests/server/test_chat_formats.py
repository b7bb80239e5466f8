"""Tools, response formats and reasoning through the chat route, on a model that knows none."""

import json
from typing import Any

import pytest

from octavo.request import Reasoning
from octavo.server.pieces import Parts, ToolCallPart
from octavo.server.reasoning import ReasoningSplitter
from octavo.server.tools import FORMATS, ToolCallParser
from octavo.server.turns import AnswerText
from tests.server.serving import Calls, chat, checked, completion

PATH = "/v1/chat/completions"


def tool(name: str = "look", **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


SMALL = {"enum": ["a", "b"]}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TOOLS = [tool("look", where=SMALL), tool("wait"), tool("count", to=NUMBER)]


def calls_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the parts of calls as a client does."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for part in choice["delta"].get("tool_calls", []):
                call = calls.setdefault(part["index"], {"arguments": ""})
                call["id"] = part.get("id", call.get("id"))
                call["name"] = part["function"].get("name", call.get("name"))
                call["arguments"] += part["function"]["arguments"]
    return [calls[i] for i in sorted(calls)]


@pytest.mark.case("V34", "S14", "V31", "V32")
@pytest.mark.parametrize("name", ["look", "wait", "count"])
def test_named_tool_is_called_with_valid_arguments(calls: Calls, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    fields = chat(tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=1.0, seed=3)
    fields["ignore_eos"] = False
    whole = checked(calls.post(PATH, json=fields))
    (answer,) = whole["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == name
    assert set(json.loads(call["function"]["arguments"])) == set(
        next(t for t in TOOLS if t["function"]["name"] == name)["function"]["parameters"][
            "properties"
        ]
    )
    assert answer["finish_reason"] == "stop", "as OpenAI says after a named call"
    (streamed,) = calls_of(calls.events(PATH, fields))
    assert streamed["name"] == name
    assert streamed["arguments"] == call["function"]["arguments"]
    assert streamed["id"]


@pytest.mark.case("V34", "S12")
def test_required_tools_end_with_tool_calls(calls: Calls) -> None:
    fields = chat(tools=TOOLS, tool_choice="required", max_tokens=400, temperature=1.0, seed=1)
    fields["ignore_eos"] = False
    chunks = calls.events(PATH, fields)
    found = calls_of(chunks)
    assert found
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert reasons[-1] == "tool_calls"
    assert len({call["id"] for call in found}) == len(found)
    whole = checked(calls.post(PATH, json=fields))["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert [c["function"]["arguments"] for c in whole["message"]["tool_calls"]] == [
        c["arguments"] for c in found
    ]


@pytest.mark.case("S15", "S16")
def test_content_streams_although_tools_are_given(calls: Calls) -> None:
    fields = chat(tools=TOOLS, logprobs=True, max_tokens=20)
    chunks = calls.events(PATH, fields)
    assert len(chunks) > 3
    entries = [e for c in chunks for ch in c["choices"] for e in ch["logprobs"]["content"]]
    assert len(entries) == 20


@pytest.mark.case("V25", "V28", "S04")
def test_json_schema_is_kept_to(calls: Calls) -> None:
    schema = {
        "type": "object",
        "properties": {"a": NUMBER, "b": SMALL},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = chat(response_format=form, max_tokens=200, temperature=1.0, seed=2, n=3)
    fields["ignore_eos"] = False
    whole = checked(calls.post(PATH, json=fields))
    for choice in whole["choices"]:
        found = json.loads(choice["message"]["content"])
        assert found["b"] in ("a", "b")
        assert 0 <= found["a"] <= 99
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "word"),
    [({"type": "string", "pattern": "^(?=a)b"}, "pattern"), ({"$ref": "http://x/y"}, "$ref")],
)
@pytest.mark.case("S01", "V29")
def test_keyword_that_cannot_be_enforced_is_400_before_the_stream(
    calls: Calls, schema: dict[str, Any], word: str, stream: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = calls.refusal(PATH, chat(response_format=form, stream=stream))
    assert word in error["message"]


def test_completions_take_structured_outputs_by_both_names(calls: Calls) -> None:
    for fields in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"guided_choice": ["yes"]}):
        reply = calls.complete("Is it?", ignore_eos=False, **fields)
        assert reply["choices"][0]["text"] in ("yes", "no")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"yaml": 1}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("wrong", "field"), BAD, ids=str)
def test_wrong_field_is_named(calls: Calls, wrong: dict[str, Any], field: str) -> None:
    assert calls.refusal(PATH, chat(**wrong))["param"] == field
    if "structured_outputs" in wrong:
        assert calls.refusal("/v1/completions", completion(**wrong))["param"] == field


def test_tools_stand_in_the_prompt_of_a_template_without_them(calls: Calls) -> None:
    fields = {"messages": chat("Hi")["messages"], "tools": TOOLS}
    prompt = checked(calls.post("/apply-template", json=fields))["prompt"]
    assert '"look"' in prompt
    told = checked(calls.post("/tokenize", json=fields))
    reply = checked(calls.post(PATH, json=chat("Hi", tools=TOOLS)))
    assert reply["usage"]["prompt_tokens"] == told["count"]


@pytest.mark.case("S11", "V36")
def test_answer_text_is_the_same_at_every_split() -> None:
    text = 'x</think>Hi <tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'

    def parts(pieces: list[str]) -> tuple[str, str, list[tuple[int, str | None, str]]]:
        parser = ToolCallParser(FORMATS["hermes"], ["wait"], make_id=lambda form: "id")
        stage = AnswerText(ReasoningSplitter(Reasoning(is_open=True)), parser, parallel=True)
        found: list[Parts] = [*map(stage.push, pieces), stage.finish()]
        arguments: dict[int, str] = {}
        names: dict[int, str | None] = {}
        for call in (c for part in found for c in part.tool_calls):
            assert isinstance(call, ToolCallPart)
            names.setdefault(call.index, call.name)
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
        return (
            "".join(p.content for p in found),
            "".join(p.reasoning for p in found),
            [(i, names[i], arguments[i]) for i in names],
        )

    whole = parts([text])
    assert whole[1:] == ("x", [(0, "wait", "{}")])
    assert whole[0].strip() == "Hi"
    for cut in range(len(text)):
        assert parts([text[:cut], text[cut:]]) == whole
    assert parts(list(text)) == whole


def test_metrics_count_what_was_served(calls: Calls) -> None:
    def count(name: str) -> float:
        text = calls.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    before = count("vllm:generation_tokens_total")
    calls.complete(max_tokens=11)
    assert count("vllm:generation_tokens_total") == before + 11
    assert count("vllm:num_requests_running") == 0
