"""Every keyword is enforced, or refused with its name and place; none is dropped in silence."""

import json

import pytest

from octavo.engine.schema import (
    ENFORCED,
    MAX_DEPTH,
    REFUSED,
    checked_schema,
    parsed_schema,
    patterns,
)
from octavo.errors import BadRequestError


def refusal(schema):
    with pytest.raises(BadRequestError) as caught:
        checked_schema(schema)
    return str(caught.value)


@pytest.mark.case("V29")
@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_keyword_that_is_not_enforced_is_refused_with_its_place(keyword):
    line = refusal({"properties": {"a": {"items": [{"anyOf": [{}, {keyword: {}}]}]}}})
    assert line.startswith("json.properties.a.items[0].anyOf[1]:")
    assert repr(keyword) in line


def test_annotations_are_dropped_and_change_nothing():
    schema = {"title": "t", "type": "string", "default": 1, "x-mine": 2, "uniqueItems": False}
    assert checked_schema({**schema, "examples": [{"not": 1}]}) == {"type": "string"}


def test_names_of_properties_are_no_keywords():
    schema = {"properties": {"not": {"type": "null"}, "title": {"enum": [{"if": 1}]}}}
    assert checked_schema(schema) == schema


@pytest.mark.parametrize("slip", ["minLenght", "propertys", "additionalproperties", "uniqueItem"])
def test_slip_of_a_keyword_is_refused_with_what_was_meant(slip):
    assert "Did you mean" in refusal({slip: 1})


def test_options_of_the_compiler_cannot_be_set_from_a_schema():
    assert "x-guidance" in refusal({"properties": {"a": {"x-guidance": {"lenient": True}}}})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strang"}, "json.type"),
        ({"type": []}, "json.type"),
        ({"minimum": "3"}, "json.minimum"),
        ({"exclusiveMinimum": True}, "json.exclusiveMinimum"),
        ({"maxLength": -1}, "json.maxLength"),
        ({"maxLength": 1.5}, "json.maxLength"),
        ({"required": "a"}, "json.required"),
        ({"required": [1]}, "json.required"),
        ({"enum": []}, "json.enum"),
        ({"anyOf": []}, "json.anyOf"),
        ({"properties": []}, "json.properties"),
        ({"items": 3}, "json.items"),
        ({"pattern": 3}, "json.pattern"),
        ({"format": "email address"}, "json.format"),
        ({"$ref": "other.json"}, "json.$ref"),
        ({"minProperties": 2}, "json: minProperties"),
        ({3: 4}, "json: the keyword 3"),
        ({"const": float("nan")}, "json is not JSON"),
        ({"const": object()}, "json is not JSON"),
    ],
)
def test_value_of_the_wrong_kind_is_refused_with_its_place(schema, place):
    assert refusal(schema).startswith(place)


def test_schema_is_bounded_in_depth_and_size():
    schema, wide = {}, {"enum": list(range(100_000))}
    for _ in range(MAX_DEPTH + 1):
        schema = {"items": schema}
    assert "deep" in refusal(schema)
    assert "characters" in refusal(wide)
    assert "10,000" in refusal({"anyOf": [{}] * 10_001})


def chain(length, **beside):
    """Schemas of which each holds together with the one within it."""
    schema = {"pattern": "a"}
    for number in range(length):
        schema = {"pattern": f"a{number}", "anyOf": [schema], **beside}
    return schema


@pytest.mark.case("V26")
@pytest.mark.parametrize(
    "schema",
    [
        chain(30),
        {"allOf": [{"properties": {"q": {"pattern": f"{i}x"}}} for i in range(30)]},
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}", "pattern": f"{i}x"} for i in range(30)},
        },
    ],
    ids=["anyOf", "allOf", "$ref"],
)
def test_expressions_that_hold_at_once_are_bounded(schema):
    line = refusal(schema)
    assert "at most 8" in line
    checked_schema(chain(7))


def test_expressions_that_hold_one_by_one_are_not_bounded():
    schema = {"properties": {str(i): {"anyOf": [{"pattern": "a"}]} for i in range(100)}}
    assert checked_schema(schema) == schema


def test_text_of_a_schema_is_a_schema():
    assert parsed_schema(json.dumps({"type": "null"})) == {"type": "null"}
    assert parsed_schema(True) == {}
    for bad in ("{", "3", "[" * 100_000, None, False):
        with pytest.raises(BadRequestError):
            parsed_schema(bad)


def test_every_expression_is_found_with_its_place():
    schema = {"properties": {"a": {"pattern": "x"}}, "patternProperties": {"y": {"pattern": "z"}}}
    assert list(patterns(schema)) == [
        ("x", "json.properties.a.pattern"),
        ("z", "json.patternProperties.y.pattern"),
        ("y", "json.patternProperties"),
    ]


def test_no_keyword_is_both_enforced_and_refused():
    assert not ENFORCED & REFUSED
