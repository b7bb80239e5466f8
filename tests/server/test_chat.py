"""/v1/chat/completions: the reply streamed and whole, templates, log-probabilities."""

from typing import Any

import pytest

from tests.engines import greedy, tiny
from tests.server.serving import Calls, chat, checked

PATH = "/v1/chat/completions"


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Join the choices of one index, with code of its own."""
    found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    assert found[0]["delta"]["role"] == "assistant"
    assert all("role" not in c["delta"] for c in found[1:])
    assert all(c["finish_reason"] is None for c in found[:-1])
    whole: dict[str, Any] = {
        "content": "".join(c["delta"].get("content", "") for c in found),
        "finish_reason": found[-1]["finish_reason"],
        "stop_reason": found[-1]["stop_reason"],
        "logprobs": None,
    }
    if found[0]["logprobs"] is not None:
        whole["logprobs"] = {"content": [e for c in found for e in c["logprobs"]["content"]]}
    return whole


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3, "n": 2, "temperature": 0.9, "seed": 2},
    {"stop": ["e"], "max_tokens": 40, "temperature": 1.0, "seed": 5},
    {"ignore_eos": False, "max_completion_tokens": 60},
    {"return_token_ids": True},
    {"presence_penalty": 1.5, "frequency_penalty": 1.0, "max_tokens": 30},
    {"logprobs": True, "top_logprobs": 0, "stop": ["a"], "temperature": 1.0, "seed": 8},
]


@pytest.mark.case("V37", "V47", "S52", "S53", "V41")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whole_reply_is_the_joined_stream(calls: Calls, options: dict[str, Any]) -> None:
    whole = checked(calls.post(PATH, json=chat(**options)))
    chunks = calls.events(PATH, chat(**options, stream_options={"include_usage": True}))
    usage = chunks.pop()["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    for choice in whole["choices"]:
        expected = joined(chunks, choice["index"])
        assert choice["message"]["content"] == expected.pop("content")
        assert {name: choice[name] for name in expected} == expected


@pytest.mark.case("S52", "V41")
def test_logprobs_hold_the_chosen_token_and_so_many_others(calls: Calls) -> None:
    for top in (0, 2, 20):
        fields = chat(logprobs=True, top_logprobs=top, temperature=1.0, seed=1)
        (choice,) = checked(calls.post(PATH, json=fields))["choices"]
        entries = choice["logprobs"]["content"]
        assert len(entries) == 8
        for entry in entries:
            assert len(entry["top_logprobs"]) == top
            assert entry["logprob"] > -9999
        text = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert text.decode("utf-8", "replace") == choice["message"]["content"]


@pytest.mark.case("V43", "S22")
def test_chat_uses_the_prompt_that_tokenize_and_the_engine_in_process_tell(calls: Calls) -> None:
    fields = chat("Hello", return_token_ids=True)
    reply = checked(calls.post(PATH, json=fields))
    told = checked(calls.post("/tokenize", json={"messages": fields["messages"]}))
    with tiny(block_size=16) as llm:
        output = llm.chat(fields["messages"], greedy(8), use_tqdm=False)[0]
    assert reply["prompt_token_ids"] == told["tokens"] == output.prompt_token_ids
    assert reply["usage"]["prompt_tokens"] == told["count"]
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == output.outputs[0].text


@pytest.mark.case("S42")
def test_max_completion_tokens_is_honoured(calls: Calls) -> None:
    reply = checked(calls.post(PATH, json=chat(max_tokens=50, max_completion_tokens=3)))
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.case("S18", "S19")
def test_history_without_content_is_accepted(calls: Calls) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "assistant", "content": "y", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "z"}]},
    ]
    checked(calls.post(PATH, json=chat(messages=messages)))


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "A message's role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "A message's content"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"chat_template": "{{ messages }}"}, None),
    ({"chat_template_kwargs": {"allow_special": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "A template variable"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
]


@pytest.mark.parametrize(("wrong", "field"), BAD, ids=str)
def test_wrong_field_is_named(calls: Calls, wrong: dict[str, Any], field: str | None) -> None:
    for stream in (False, True):
        error = calls.refusal(PATH, chat(**wrong, stream=stream))
        assert error["param"] == field, error


@pytest.mark.case("S36")
def test_long_conversation_is_refused_and_not_cut(calls: Calls) -> None:
    error = calls.refusal(PATH, chat("word " * 2000))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.case("S43")
def test_whole_reply_is_json_and_stream_is_events(calls: Calls) -> None:
    reply = calls.post(PATH, json=chat(stream=False))
    assert reply.headers["content-type"] == "application/json"
    with calls.stream("POST", PATH, json=chat(stream=True)) as stream:
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        body = stream.read().decode("utf-8")
    assert body.endswith("data: [DONE]\n\n")


@pytest.mark.case("V45", "S38")
def test_answer_without_a_limit_ends_with_the_context(calls: Calls) -> None:
    reply = checked(calls.post(PATH, json=chat(max_tokens=None)))
    assert reply["usage"]["total_tokens"] == 1024
    assert reply["choices"][0]["finish_reason"] == "length"
