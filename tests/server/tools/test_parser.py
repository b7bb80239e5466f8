"""Text to tool calls: the same for every way of cutting the text."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidParameterError
from octavo.server.tools import (
    FORMATS,
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    ToolCallParser,
    choose_format,
)

NAMES = ("f", "g", "get_weather")


def parse(form, pieces, names=NAMES):
    """Return content, and (index, id, name, arguments) per call, of a text in pieces."""
    numbers = itertools.count()
    parser = ToolCallParser(FORMATS[form], names, make_id=lambda _: f"id{next(numbers)}")
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    started = [event for event in events if isinstance(event, CallStarted)]
    assert parser.num_calls == len(started)
    calls = []
    for call in started:
        first = events.index(call)
        deltas = [
            (place, e)
            for place, e in enumerate(events)
            if isinstance(e, ArgumentsDelta) and e.index == call.index
        ]
        assert all(place > first for place, _ in deltas), "arguments come after their call began"
        calls.append((call.index, call.id, call.name, "".join(e.text for _, e in deltas)))
    return "".join(e.text for e in events if isinstance(e, ContentDelta)), calls


def wrap(form, calls):
    """Write calls, (name, arguments) each, as a model of that format does."""
    objects = [
        json.dumps({"name": n, FORMATS[form].arguments: a}, ensure_ascii=False) for n, a in calls
    ]
    python = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return {
        "hermes": "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects),
        "llama3_json": "; ".join(objects),
        "pythonic": f"[{', '.join(python)}]",
        "mistral": f"[TOOL_CALLS] [{', '.join(objects)}]",
        "gemma": "```tool_code\n" + "\n".join(python) + "\n```",
        "json": f"[{', '.join(objects)}]",
    }[form]


TEXT = st.text(st.sampled_from("ab{}[]\"'\\\n<>/`é😀_=,:() "), max_size=12) | st.sampled_from(
    ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "```", "<|python_tag|>", "}\n</tool_call>"]
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "long_name"]), VALUE, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


@st.composite
def pieces_of(draw, text):
    """Cut a text anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.case("V31", "V32", "S09", "S10", "S11", "S12")
@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data(), calls=CALLS)
def test_calls_are_read_back_however_the_text_is_cut(form, data, calls):
    text = wrap(form, calls)
    content, found = parse(form, data.draw(pieces_of(text)))
    assert content == ""
    assert [(index, name) for index, _, name, _ in found] == [
        (index, name) for index, (name, _) in enumerate(calls)
    ]
    assert [json.loads(arguments) for *_, arguments in found] == [a for _, a in calls]
    assert [identity for _, identity, *_ in found] == [f"id{i}" for i in range(len(calls))]


PART = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "```tool_code\n",
        "```",
        "```json\n",
        "<tool",
        "[TOOL_",
        "[ARGS]",
        "; ",
        '{"name": "f", "arguments": {"a": "}"}}',
        '{"name": "zz", "parameters": {}}',
        "f(a=1)",
        '{"answer": [1]}',
        '{"name": "g"}',
        "[f(a='x'), g()]",
        "[1, 2]",
        "f{",
        '"',
        "}",
        "]",
        " ",
        "\n",
        "word",
        "é😀",
        '{"arguments": {"b": 2}, "name": "f"}',
        '{"name": 1}',
        "print(g(b=2))",
    ]
)


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data(), parts=st.lists(PART, max_size=8))
def test_any_text_gives_the_same_at_every_split(form, data, parts):
    text = "".join(parts)
    whole = parse(form, [text])
    assert parse(form, data.draw(pieces_of(text))) == whole
    assert parse(form, text) == whole


@pytest.mark.parametrize("form", FORMATS)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{`"), max_size=40)
)
def test_text_without_calls_is_content_unchanged(form, text):
    assert parse(form, [text]) == (text, [])


@pytest.mark.case("S15")
@pytest.mark.parametrize("form", FORMATS)
def test_content_streams_at_once(form):
    parser = ToolCallParser(FORMATS[form], NAMES)
    assert parser.push("Let me") == [ContentDelta("Let me")]
    assert parser.push(" see.") == [ContentDelta(" see.")]


@pytest.mark.parametrize(
    ("form", "text", "content", "names"),
    [
        ("hermes", 'Ok.\n<tool_call>{"name": "f"}</tool_call>', "Ok.", ["f"]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\nDone', "Done", ["f"]),
        ("hermes", "a <tool call", "a <tool call", []),
        ("hermes", "<tool_call> no call </tool_call>", "no call </tool_call>", []),
        ("hermes", '<tool_call>{"na', '{"na', []),
        ("hermes", '<tool_call>{"name": "other"}</tool_call>', "", ["other"]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", ["f"]),
        ("llama3_json", '{"answer": 1}', '{"answer": 1}', []),
        ("llama3_json", '{"name": "other"}', '{"name": "other"}', []),
        ("llama3_json", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[other(a=1)] text", "[other(a=1)] text", []),
        ("pythonic", "[f(1)]", "[f(1)]", []),
        ("pythonic", "<|python_start|>[f(a=true)]<|python_end|>", "", ["f"]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "", ["f", "g"]),
        ("gemma", "x\n```tool_code\nprint(f(a=1))\n```", "x", ["f"]),
        ("gemma", "```python\nf(a=1)\n```", "```python\nf(a=1)\n```", []),
        ("json", '```json\n{"name": "f", "arguments": {}}\n```', "", ["f"]),
        ("json", '```json\n{"foo": 1}\n``` text', '```json\n{"foo": 1}\n``` text', []),
        ("json", '{"name": "f", "arguments": "{}"}', "", ["f"]),
    ],
)  # fmt: skip
def test_what_is_a_call_and_what_is_text(form, text, content, names):
    found, calls = parse(form, [text])
    assert (found, [call[2] for call in calls]) == (content, names)


def test_arguments_of_a_call_cut_short_are_kept():
    _, calls = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": 1'])
    assert [call[3] for call in calls] == ['{"a": 1']


def test_arguments_stream_as_they_are_written():
    parser = ToolCallParser(FORMATS["hermes"], NAMES)
    parser.push('<tool_call>{"name": "f", "arguments": {"a"')
    assert parser.push(': "x') == [ArgumentsDelta(0, ': "x')]


def test_ids_are_unique_and_as_long_as_the_format_wants():
    for form, length in (("hermes", 29), ("mistral", 9)):
        parser = ToolCallParser(FORMATS[form], NAMES)
        events = parser.push(wrap(form, [("f", {}), ("g", {})]))
        ids = {event.id for event in events if isinstance(event, CallStarted)}
        assert [len(identity) for identity in ids] == [length, length]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call> ...", "hermes"),
        ("... [TOOL_CALLS] ...", "mistral"),
        ('{"name": function name, "parameters": dictionary of ...}', "llama3_json"),
        ("[func_name1(params_name1=params_value1)] <|eom_id|>", "pythonic"),
        ("<start_of_turn>user", "gemma"),
        ("<|im_start|>", "json"),
        (None, "json"),
    ],
)
def test_format_is_that_of_the_template(template, form):
    assert choose_format("auto", template).name == form


def test_unknown_format_is_an_error_that_names_the_closest():
    assert choose_format("mistral", None).name == "mistral"
    with pytest.raises(InvalidParameterError, match="hermes"):
        choose_format("hermess", None)
