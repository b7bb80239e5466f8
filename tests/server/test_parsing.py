"""The bound on a body's values: what it counts, and what a route says beyond it."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from octavo.server.bodies import CompletionBody, DetokenizeBody
from octavo.server.parsing import check_values
from tests.server.serving import Calls, ThreadServer, completion

ODD_TEXT = st.text(st.sampled_from('",[]{}:\\\né x'), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | ODD_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD_TEXT, inner, max_size=4),
    max_leaves=20,
)


def is_taken(body: bytes, limit: int) -> bool:
    try:
        check_values(body, limit)
    except HTTPException as error:
        return told(error, limit)
    return True


def told(error: HTTPException, limit: int) -> bool:
    """Return False for the refusal that it must be."""
    assert error.status_code == 413
    assert f"{limit:,} values and names" in error.detail
    return False


def num_values(value: Any) -> int:
    """Return the values within one, with itself. Each may have a name, which counts too."""
    inner = value.values() if isinstance(value, dict) else value
    return 1 + (sum(map(num_values, inner)) if isinstance(value, (dict, list)) else 0)


@given(value=JSON, ascii_only=st.booleans())
@example(value={"": [], ":": [], "::": []}, ascii_only=False)
@example(value=[["[]"], ["{}"], ["a"]], ascii_only=True)
def test_bound_counts_values_whatever_texts_hold(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    number = num_values(value)
    assert is_taken(body, 2 * number)
    assert number < 2 or not is_taken(body, number - 2)


@pytest.mark.parametrize(
    "text", ["," * 5000, "[{" * 5000, '\\",' * 5000, "\\\\" * 5000 + ",", '"a","b",' * 5000]
)
def test_letters_of_a_text_are_no_values(text: str) -> None:
    assert is_taken(json.dumps({"prompt": text}).encode(), 3)


@pytest.mark.parametrize(
    "values", [b"1," * 100, b"[]," * 100, b'"",' * 100, b'"\\\\",' * 100, b'"\\"",' * 100]
)
def test_many_values_are_refused(values: bytes) -> None:
    assert not is_taken(b"[" + values + b"0]", 99)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/detokenize"])
def test_body_of_many_values_is_413_before_it_is_read(path: str) -> None:
    with ThreadServer(max_body_values=1000) as server, server.calls() as calls:
        for values in ([1] * 2000, ["x"] * 2000, [[]] * 2000, {str(i): {} for i in range(2000)}):
            error = calls.refusal(path, {"unknown": values}, status=413)
            assert "1,000 values" in error["message"]
            assert "--max-body-values" in error["message"]
        assert calls.complete(", [ { " * 100)["choices"], "letters do not count"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, "x", "y"]}, "prompt"),
        ({"prompt": [[1, "x"], [1]]}, "prompt"),
        ({"stop_token_ids": ["x"] * 9}, "stop_token_ids.0"),
        ({"logit_bias": {"5": 1, "6": "x", "7": None}}, "logit_bias.6"),
        ({"logit_bias": {"5": "1.5"}}, "logit_bias.5"),
    ],
)
def test_first_wrong_entry_is_named(fields: dict[str, Any], param: str) -> None:
    with ThreadServer() as server, server.calls() as calls:
        error = calls.refusal("/v1/completions", completion() | fields)
        assert error["param"].startswith(param), error


@pytest.mark.parametrize("number", [10, 1000])
def test_many_wrong_entries_cost_no_more_than_one(number: int) -> None:
    bad: list[tuple[Any, dict[str, Any]]] = [
        (CompletionBody, {"prompt": [1] + ["x"] * number}),
        (CompletionBody, {"prompt": "x", "bad_words": [1] * number}),
        (CompletionBody, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(number)}}),
        (DetokenizeBody, {"tokens": ["x"] * number}),
    ]
    for model, fields in bad:
        with pytest.raises(ValueError) as found:
            model.model_validate(fields)
        assert found.value.error_count() <= 4  # type: ignore[attr-defined]


def test_deep_nesting_is_refused(calls: Calls) -> None:
    body = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    reply = calls.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
