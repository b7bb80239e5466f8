"""`litellm`, by its providers `openai` and `hosted_vllm`."""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from serving import LiveServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it asks the network
import litellm

ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(params=["openai", "hosted_vllm"])
def fields(request: pytest.FixtureRequest, server: LiveServer, model: str) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{model}",
        "api_base": server.api,
        "api_key": "unused",
        "temperature": 0,
        "max_tokens": 24,
        "num_retries": 0,
    }


def joined(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_completion_and_stream_agree(fields: dict[str, Any]) -> None:
    whole = litellm.completion(messages=ASK, **fields)
    options = {"include_usage": True}
    chunks = list(litellm.completion(messages=ASK, **fields, stream=True, stream_options=options))
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert litellm.stream_chunk_builder(chunks).usage.prompt_tokens == whole.usage.prompt_tokens


def test_async_completion_and_stream_agree(fields: dict[str, Any]) -> None:
    async def both() -> tuple[str, str]:
        whole = await litellm.acompletion(messages=ASK, **fields)
        stream = await litellm.acompletion(messages=ASK, **fields, stream=True)
        return whole.choices[0].message.content, joined([chunk async for chunk in stream])

    whole, streamed = asyncio.run(both())
    assert whole == streamed


def test_required_tool_is_called(fields: dict[str, Any]) -> None:
    fields["max_tokens"] = 100
    reply = litellm.completion(
        messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **fields
    )
    (call,) = reply.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}
    back = [*ASK, reply.choices[0].message]
    back += [{"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}]
    assert litellm.completion(messages=back, tools=[TOOL], **fields).usage.completion_tokens


def test_schema_is_followed(fields: dict[str, Any]) -> None:
    schema = TOOL["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    fields["max_tokens"] = 100
    reply = litellm.completion(messages=ASK, response_format=form, **fields)
    assert "city" in json.loads(reply.choices[0].message.content)


def test_text_completion_continues(server: LiveServer, model: str) -> None:
    reply = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        prompt="Once upon a time",
        api_base=server.api,
        api_key="unused",
        max_tokens=8,
    )
    assert reply.choices[0].text


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"temperature": -1}, litellm.BadRequestError),
        (
            {"messages": [{"role": "user", "content": "a " * 20_000}]},
            litellm.ContextWindowExceededError,
        ),
        ({"model": "openai/no-such-model"}, litellm.NotFoundError),
        ({"extra_body": {"timeout": 0.001}, "max_tokens": 4000}, litellm.Timeout),
    ],
)
def test_errors_are_litellms_own(
    server: LiveServer, model: str, change: dict[str, Any], error: type[Exception]
) -> None:
    call: Callable[..., Any] = litellm.completion
    fields = {"model": f"openai/{model}", "messages": ASK, "num_retries": 0, "max_retries": 0}
    with pytest.raises(error):
        call(**{**fields, "api_base": server.api, "api_key": "unused", **change})
