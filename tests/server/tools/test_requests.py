"""What a chat request says of tools, formats and earlier messages."""

import pytest

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.request import StructuredOutputs
from octavo.server.tools import FORMATS
from octavo.server.tools.requests import (
    checked_tools,
    chosen_tools,
    finish_reason,
    normalised_messages,
    response_format_constraint,
    tool_instructions,
)


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def deep(levels):
    schema = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_response_formats_become_constraints():
    schema = {"type": "object"}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert response_format_constraint(None) is None
    assert response_format_constraint({"type": "text"}) is None
    assert response_format_constraint({"type": "json_object"}) == StructuredOutputs(
        json_object=True
    )
    assert response_format_constraint(asked) == StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ("json", "response_format"),
        ({}, "response_format"),
        ({"type": "xml"}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "response_format.json_schema"),
    ],
)
def test_response_format_that_is_none_is_an_error_that_names_the_field(asked, field):
    with pytest.raises(InvalidParameterError, match=field):
        response_format_constraint(asked)


def test_tools_that_are_in_order_are_taken_as_they_are():
    tools = [tool("get-it_1", description="x", parameters={"type": "object"}), tool("g")]
    assert checked_tools(tools) == tools
    assert checked_tools(None) == []


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ({}, "tools"),
        ([tool()] * 129, "tools"),
        ([3], r"tools\[0\]"),
        ([{"type": "web_search"}], r"tools\[0\]"),
        ([{"type": "function"}], r"tools\[0\]\.function"),
        ([tool(""), tool()], r"tools\[0\]\.function\.name"),
        ([tool("a b")], r"tools\[0\]\.function\.name"),
        ([tool("a" * 65)], r"tools\[0\]\.function\.name"),
        ([tool(), tool()], r"tools\[1\]\.function\.name"),
        ([tool(description=3)], r"tools\[0\]\.function\.description"),
        ([tool(parameters=[])], r"tools\[0\]\.function\.parameters"),
        ([tool(parameters=deep(5000))], r"tools\[0\]\.function\.parameters"),
    ],
)
def test_tool_that_cannot_be_used_is_an_error_that_names_the_field(tools, field):
    with pytest.raises(InvalidParameterError, match=field):
        checked_tools(tools)


def test_choice_of_tools():
    tools = [tool("f"), tool("g")]
    assert chosen_tools(tools, None) == ("auto", tools)
    assert chosen_tools([], None) == ("none", [])
    assert chosen_tools(tools, "none") == ("none", [])
    assert chosen_tools([], "auto") == ("none", [])
    assert chosen_tools(tools, "required") == ("required", tools)
    assert chosen_tools(tools, {"type": "function", "function": {"name": "g"}}) == (
        "named",
        tools[1:],
    )


@pytest.mark.parametrize("choice", ["any", 3, {"function": {"name": "h"}}, {"function": 1}, {}])
def test_choice_of_no_tool_is_an_error(choice):
    with pytest.raises(BadRequestError, match="tool_choice"):
        chosen_tools([tool("f")], choice)
    with pytest.raises(BadRequestError, match="tool_choice"):
        chosen_tools([], "required")


@pytest.mark.case("V34", "S14")
def test_finish_reason_says_tool_calls_only_after_calls():
    assert finish_reason("stop", 1, "auto") == "tool_calls"
    assert finish_reason("stop", 2, "required") == "tool_calls"
    assert finish_reason("stop", 0, "auto") == "stop"
    assert finish_reason("stop", 1, "named") == "stop"
    assert finish_reason("length", 1, "required") == "length"
    assert finish_reason(None, 1, "auto") is None


@pytest.mark.case("S17", "S18", "S19")
def test_earlier_messages_are_brought_into_one_form():
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    assert normalised_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "content": "x", "tool_calls": [], "name": None},
            {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [call]},
            {"role": "assistant"},
        ]
    ) == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [call]},
        {"role": "assistant", "content": ""},
    ]
    with pytest.raises(InvalidParameterError, match="messages"):
        normalised_messages(["hello"])


@pytest.mark.parametrize("form", FORMATS)
def test_instructions_name_every_tool_and_show_the_notation(form):
    text = tool_instructions(FORMATS[form], [tool("first"), tool("second")])
    assert "first" in text
    assert "second" in text
    assert FORMATS[form].is_bare or FORMATS[form].opens[0] in text
