"""A model that must call a tool does: its output parses as calls with valid arguments."""

import json

import jsonschema
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import BadRequestError
from octavo.server.tools import FORMATS, calls_constraint
from octavo.server.tools.requests import tools_constraint
from octavo.weights.fetch import cached_path
from tests.engines import tiny, tokens
from tests.server.tools.test_parser import parse

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F", None]}},
}
OPTIONAL = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"type": "integer"}},
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "optional": OPTIONAL, "nothing": NOTHING}


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", WEATHER), tool("optional", OPTIONAL), tool("nothing", None)]


def generate(llm, constraint, seed=1, max_tokens=500, favoured=""):
    params = SamplingParams(
        seed=seed,
        temperature=5,  # a random model is stubborn otherwise
        max_tokens=max_tokens,
        structured_outputs=constraint,
        skip_special_tokens=False,
        logit_bias={llm.tokenizer.encode(c, add_bos=False)[-1]: 40.0 for c in favoured},
    )
    (output,) = llm.generate(tokens(4), params, use_tqdm=False)
    return output.outputs[0]


@pytest.mark.parametrize("form", FORMATS)
def test_forced_calls_parse_and_fit_their_schemas(form):
    constraint = calls_constraint(FORMATS[form], TOOLS, special={}, parallel=False)
    with tiny() as llm:
        answers = [generate(llm, constraint, seed) for seed in range(6)]
    called = set()
    for answer in answers:
        content, calls = parse(form, answer.text, names=SCHEMAS)
        assert content == ""
        ((index, _, name, arguments),) = calls
        assert index == 0
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        called.add(name)
    assert len(called) > 1


@pytest.mark.parametrize("form", FORMATS)
def test_several_calls_may_be_forced_at_once(form):
    constraint = calls_constraint(FORMATS[form], TOOLS[1:], special={})
    num_calls = 0
    with tiny() as llm:
        for seed in range(6):
            answer = generate(llm, constraint, seed, favoured=";[")
            content, calls = parse(form, answer.text, names=SCHEMAS)
            assert content == ""
            assert calls
            num_calls = max(num_calls, len(calls))
            for *_, name, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert num_calls > 1


def test_marker_that_is_a_token_is_written_as_that_token():
    with tiny() as llm:
        token = max(llm.tokenizer.special_ids - set(llm.tokenizer.eos_ids))
        constraint = calls_constraint(
            FORMATS["mistral"], TOOLS, special={"[TOOL_CALLS]": token}, parallel=False
        )
        assert generate(llm, constraint).token_ids[0] == token


def test_named_tool_is_the_one_called_and_only_once():
    constraint = tools_constraint(FORMATS["json"], "named", TOOLS[:1], special={})
    with tiny() as llm:
        _, calls = parse("json", generate(llm, constraint).text, names=SCHEMAS)
    assert [call[2] for call in calls] == ["weather"]


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_free_choice_constrains_nothing(mode):
    assert tools_constraint(FORMATS["json"], mode, TOOLS, special={}) is None


def test_schema_that_cannot_be_enforced_names_tool_and_keyword():
    bad = tool("bad", {"type": "object", "properties": {"a": {"uniqueItems": True}}})
    with pytest.raises(BadRequestError, match=r"tools\[1\]\.function\.parameters\.properties\.a"):
        calls_constraint(FORMATS["hermes"], [TOOLS[0], bad], special={})


@pytest.mark.real
def test_the_default_model_calls_the_weather_of_a_city():
    if cached_path("smollm2-135m") is None:
        pytest.skip("smollm2-135m has not been fetched; `octavo pull` does it")
    constraint = calls_constraint(FORMATS["hermes"], TOOLS[:1], special={}, parallel=False)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=constraint)
    with LLM("smollm2-135m", max_model_len=512) as llm:
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        (output,) = llm.chat(messages, params, use_tqdm=False)
    _, ((_, _, name, arguments),) = parse("hermes", output.outputs[0].text, names=SCHEMAS)
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), WEATHER)
