"""/v1/completions: shapes of prompts and replies, and the same reply streamed and whole."""

import itertools
import json
from typing import Any

import pytest

from tests.engines import greedy, only, tiny
from tests.server.serving import Calls, completion

PATH = "/v1/completions"


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Join the choices of one index, with code of its own."""
    found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    whole: dict[str, Any] = {"text": "".join(c["text"] for c in found)}
    whole["finish_reason"] = found[-1]["finish_reason"]
    whole["stop_reason"] = found[-1]["stop_reason"]
    assert all(c["finish_reason"] is None for c in found[:-1])
    whole["logprobs"] = None
    if found[0]["logprobs"] is not None:
        whole["logprobs"] = {
            name: [entry for c in found for entry in c["logprobs"][name]]
            for name in found[0]["logprobs"]
        }
    if "token_ids" in found[0]:
        whole["token_ids"] = [i for c in found for i in c["token_ids"]]
    return whole


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"logprobs": 2},
    {"logprobs": 0, "n": 2, "temperature": 0.8, "seed": 1},
    {"echo": True},
    {"echo": True, "logprobs": 1},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"stop": ["e", "\n"], "max_tokens": 40, "temperature": 1.0, "seed": 5},
    {"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 40, "seed": 5},
    {"return_token_ids": True},
    {"return_token_ids": True, "echo": True, "logprobs": 1},
    {"prompt_logprobs": 1},
    {"ignore_eos": False, "max_tokens": 60},
    {"min_tokens": 5, "stop": ["a"], "max_tokens": 30, "temperature": 1.0, "seed": 2},
    {"logit_bias": {"72": 20}, "max_tokens": 5},
    {"truncate_prompt_tokens": 2, "echo": True},
    {"prompt": [5, 6, 7]},
    {"prompt": ["The sky", "A lake"], "logprobs": 1},
    {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "temperature": 1.0, "seed": 3},
    {"prompt": ["The sky", [8, 9]]},
    {"skip_special_tokens": False, "allowed_token_ids": [296, 72, 73], "logprobs": 3},
]


@pytest.mark.case("V37", "V40", "V47", "S45", "S50", "S51", "S53")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whole_reply_is_the_joined_stream(calls: Calls, options: dict[str, Any]) -> None:
    fields = completion(**options)
    whole = calls.complete(**fields)
    chunks = calls.events(PATH, {**fields, "stream_options": {"include_usage": True}})
    last = chunks.pop()
    assert last["choices"] == []
    whole_usage, usage = whole["usage"], last["usage"]
    whole_usage.pop("prompt_tokens_details"), usage.pop("prompt_tokens_details")
    assert usage == whole_usage
    assert all("usage" not in chunk for chunk in chunks)
    for choice in whole["choices"]:
        expected = joined(chunks, choice["index"])
        assert {name: choice[name] for name in expected} == expected
    assert "timings" in chunks[-1]
    assert not any("timings" in chunk for chunk in chunks[:-1])


@pytest.mark.case("V38")
def test_no_chunk_of_a_stream_is_empty(calls: Calls) -> None:
    stop = ["x" * 200]
    chunks = calls.events(PATH, completion(max_tokens=30, temperature=1.0, seed=4, stop=stop))
    assert all(c["text"] or c["finish_reason"] for chunk in chunks for c in chunk["choices"])
    assert len(chunks) > 10, "a stop string that does not match holds nothing back"


def test_reply_equals_the_engine_in_process(calls: Calls) -> None:
    with tiny(block_size=16) as llm:
        expected = only(llm, "The sky", greedy(8))
    (choice,) = calls.complete("The sky", return_token_ids=True)["choices"]
    assert choice["text"] == expected.text
    assert choice["token_ids"] == expected.token_ids


@pytest.mark.case("S51")
def test_logprobs_have_the_legacy_shape(calls: Calls) -> None:
    (choice,) = calls.complete("ab", echo=True, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    lengths = {len(value) for value in logprobs.values()}
    assert lengths == {len(logprobs["tokens"])}
    assert logprobs["token_logprobs"][0] is None, "nothing comes before the first token"
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][-1] <= len(choice["text"])
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:])


@pytest.mark.case("S55")
def test_echo_without_tokens_returns_the_prompt_alone(calls: Calls) -> None:
    reply = calls.complete("The sky", echo=True, max_tokens=0)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("The sky", "length")
    assert reply["usage"]["completion_tokens"] == 0


def test_choices_of_several_prompts_come_in_their_order(calls: Calls) -> None:
    together = calls.complete(["The sky", "A lake", "Why"], n=2, temperature=1.0, seed=9)
    assert [c["index"] for c in together["choices"]] == list(range(6))
    for number, prompt in enumerate(["The sky", "A lake", "Why"]):
        alone = calls.complete(prompt, n=2, temperature=1.0, seed=9)
        texts = [c["text"] for c in together["choices"][2 * number : 2 * number + 2]]
        assert texts == [c["text"] for c in alone["choices"]]


@pytest.mark.case("V47")
def test_continuous_usage_never_falls_and_ends_at_the_total(calls: Calls) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = completion(max_tokens=20, n=2, temperature=1.0, seed=3, stream_options=options)
    chunks = calls.events(PATH, fields)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 40
    assert all("cached_tokens" in c["usage"]["prompt_tokens_details"] for c in chunks)


@pytest.mark.case("V01")
def test_usage_tells_the_cached_tokens(calls: Calls) -> None:
    prompt = [int(i) for i in range(40, 80)]
    calls.complete(prompt, cache_salt="usage")
    again = calls.complete(prompt, cache_salt="usage")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 39
    other = calls.complete(prompt, cache_salt="other")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_timings_tell_where_the_time_went(calls: Calls) -> None:
    timings = calls.complete(max_tokens=12)["timings"]
    for name in ("queued_ms", "prompt_ms", "generation_ms", "tokens_per_second"):
        assert timings[name] > 0, name
    assert timings["num_preemptions"] == 0


@pytest.mark.case("V03")
def test_prompt_logprobs_begin_with_null_and_have_each_token(calls: Calls) -> None:
    (choice,) = calls.complete([5, 6, 7], prompt_logprobs=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for token, entry in zip(("6", "7"), rest, strict=True):
        assert {"logprob", "rank", "decoded_token"} == set(entry[token])


def test_progress_of_a_long_prompt_is_streamed(calls: Calls) -> None:
    prompt = [i % 250 for i in range(1000)]  # two steps of 512 tokens
    chunks = calls.events(PATH, completion(prompt, return_progress=True))
    found = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert found
    assert found[0]["total"] == 1000
    assert all(a["processed"] < b["processed"] for a, b in itertools.pairwise(found))


# --- what is refused ----------------------------------------------------------------------------


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": ""}, None),
    ({"prompt": []}, None),
    ({"prompt": [[]]}, None),
    ({"prompt": [-1]}, "prompt_token_ids"),
    ({"prompt": [10**9]}, "prompt_token_ids"),
    ({"prompt": [2**63 - 1]}, "prompt_token_ids"),
    ({"prompt": [2**70]}, "prompt_token_ids"),
    ({"prompt": 4}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**63 - 1], "min_tokens": 2}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**9]}, "allowed_token_ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000000": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 10**6}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"best_of": 4}, "best_of"),
    ({"suffix": "x"}, None),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"timeout": 0}, "timeout"),
    ({"priority": "first"}, "priority"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
]


@pytest.mark.case("V48", "S41", "S43")
@pytest.mark.parametrize(("wrong", "field"), BAD, ids=str)
def test_wrong_field_is_named(calls: Calls, wrong: dict[str, Any], field: str | None) -> None:
    fields = completion(**wrong)
    body = json.dumps(fields)
    for streamed in (body, body[:-1] + ', "stream": true}'):
        if "stream_options" in wrong and 'stream":' in streamed:
            continue
        headers = {"content-type": "application/json"}
        reply = calls.post(PATH, content=streamed, headers=headers)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == field, error
        assert error["message"].endswith(".")
    assert calls.complete()["choices"][0]["text"], "the engine goes on"


@pytest.mark.parametrize("bias", ["Infinity", "-Infinity", "NaN"])
@pytest.mark.case("V48")
def test_bias_that_is_no_number_is_refused(calls: Calls, bias: str) -> None:
    body = '{"prompt": "x", "logit_bias": {"5": ' + bias + "}}"
    reply = calls.post(PATH, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '"text"', '{"prompt": "a"', "\xff\xfe"])
def test_body_that_is_no_object_is_refused(calls: Calls, body: str) -> None:
    headers = {"content-type": "application/json"}
    reply = calls.post(PATH, content=body.encode("latin-1"), headers=headers)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.case("V45", "S36", "S37")
@pytest.mark.parametrize("stream", [False, True])
def test_context_length_is_told_with_both_numbers(calls: Calls, stream: bool) -> None:
    prompt = [5] * 1024
    error = calls.refusal(PATH, completion(prompt, max_tokens=1, stream=stream))
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 1024 tokens" in error["message"]
    assert "resulted in 1024 tokens" in error["message"]
    error = calls.refusal(PATH, completion([5] * 1000, max_tokens=100, stream=stream))
    assert "requested 1100 tokens (1000 in the messages, 100 in the completion)" in error["message"]
    reply = calls.complete([5] * 1023, max_tokens=1)
    assert reply["usage"]["completion_tokens"] == 1


@pytest.mark.case("S42")
def test_unknown_field_is_named_and_ignored(calls: Calls) -> None:
    fields = completion(foo=1, stream_options=None, **{"bär\n": 2, "\x00\x1f\x7f": 3})
    reply = calls.post(PATH, json=fields)
    assert reply.status_code == 200
    ignored = reply.headers["x-octavo-ignored"]
    assert ignored == r"foo, b\xe4r\n, \x00\x1f\x7f"


def test_unknown_model_is_404(calls: Calls) -> None:
    error = calls.refusal(PATH, completion(model="gpt-5"), 404)
    assert error["code"] == "model_not_found"
    assert "tiny" in error["message"]
