"""The `openai` package, as its users call it."""

import asyncio
import base64
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from serving import LiveServer

ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """What `parse` is to return."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


class GetWeather(BaseModel):
    """Current weather of a city."""

    city: str = Field(max_length=20)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.api, api_key="unused", max_retries=0) as client:
        yield client


# --- models -------------------------------------------------------------------------------------


def test_models_are_listed_and_described(client: OpenAI, model: str) -> None:
    assert [m.id for m in client.models.list()] == [model]
    assert client.models.retrieve(model).owned_by == "octavo"


# --- chat ---------------------------------------------------------------------------------------


def test_chat_answers_with_usage(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_completion_tokens=10
    )
    (choice,) = reply.choices
    assert choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    usage = reply.usage
    assert usage.completion_tokens == 10
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_stream_joins_to_the_whole_answer(client: OpenAI, model: str) -> None:
    fields = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks)
        == whole.choices[0].message.content
    )
    assert [c.choices[0].finish_reason for c in chunks][-1] == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_async_client_streams_many_answers_at_once(server: LiveServer, model: str) -> None:
    async def answer(client: AsyncOpenAI, name: str) -> str:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Greet {name}."}],
            temperature=0,
            max_tokens=12,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def both() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=server.api, api_key="unused", max_retries=0) as client:
            names = ["Ada", "Grace", "Emmy", "Sofia", "Mary", "Rosa", "Lise", "Marie"]
            alone = [await answer(client, name) for name in names]
            return alone, list(await asyncio.gather(*(answer(client, name) for name in names)))

    alone, together = asyncio.run(both())
    assert alone == together
    assert all(alone)


def test_stream_that_is_left_early_frees_its_request(client: OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    load = {}
    while load.get("num_running") != 0:
        load = client.get("/../load", cast_to=object)


def test_stream_of_events_accumulates_the_answer(client: OpenAI, model: str) -> None:
    choose = {"structured_outputs": {"choice": ["a red house", "a blue house"]}}
    with client.chat.completions.stream(
        model=model, messages=ASK, logprobs=True, top_logprobs=2, extra_body=choose
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert "".join(deltas) == choice.message.content
    assert choice.message.content in choose["structured_outputs"]["choice"]
    told = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert told.decode().startswith(choice.message.content)


def test_n_answers_are_numbered_and_follow_the_seed(client: OpenAI, model: str) -> None:
    def texts(seed: int) -> list[str]:
        reply = client.chat.completions.create(
            model=model, messages=ASK, n=3, temperature=1.5, seed=seed, max_tokens=16
        )
        assert [c.index for c in reply.choices] == [0, 1, 2]
        return [c.message.content for c in reply.choices]

    first = texts(7)
    assert texts(7) == first
    assert texts(8) != first
    assert len(set(first)) == 3


def test_stream_of_n_answers_keeps_them_apart(client: OpenAI, model: str) -> None:
    fields = {"model": model, "messages": ASK, "n": 2, "seed": 3, "max_tokens": 12}
    whole = client.chat.completions.create(**fields, temperature=1.0)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**fields, temperature=1.0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {c.index: c.message.content for c in whole.choices}


def test_stop_string_ends_the_answer_and_stays_out(client: OpenAI, model: str) -> None:
    fields = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    stop = whole.split()[3]
    choice = client.chat.completions.create(**fields, stop=[stop, "never"]).choices[0]
    assert choice.message.content == whole.partition(stop)[0]
    assert choice.finish_reason == "stop"


def test_logprobs_tell_each_token_with_its_bytes(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    entries = reply.choices[0].logprobs.content
    told = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert told.startswith(reply.choices[0].message.content)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_messages_of_parts_and_all_roles_are_taken(client: OpenAI, model: str) -> None:
    parts = [
        {"type": "text", "text": "What is the capital"},
        {"type": "text", "text": " of France?"},
    ]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    reply = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=20
    )
    assert reply.choices[0].message.content


def test_every_parameter_of_the_reference_is_taken(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model,
        messages=ASK,
        frequency_penalty=0.5,
        logit_bias={"100": -100},
        max_completion_tokens=4,
        metadata={"purpose": "test"},
        modalities=["text"],
        parallel_tool_calls=True,
        presence_penalty=0.5,
        prompt_cache_key="key",
        reasoning_effort="low",
        response_format={"type": "text"},
        safety_identifier="someone",
        seed=1,
        service_tier="auto",
        stop=None,
        store=False,
        stream=False,
        temperature=0.5,
        top_p=0.9,
        user="someone",
        verbosity="low",
    )
    assert reply.usage.completion_tokens == 4


def test_extra_body_reaches_the_sampler(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model,
        messages=ASK,
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["red", "blue"]}, "top_k": 5, "min_p": 0.1},
    )
    assert reply.choices[0].message.content in {"red", "blue"}


# --- structured outputs -------------------------------------------------------------------------


def test_parse_returns_the_pydantic_model(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.parse(
        model=model, messages=ASK, response_format=City, temperature=0, max_tokens=100
    )
    assert isinstance(reply.choices[0].message.parsed, City)


def test_stream_of_parsed_events_ends_with_the_model(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=ASK, response_format=City, temperature=0, max_tokens=100
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, City)


def test_parse_raises_the_clients_own_error_at_the_length_limit(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=model, messages=ASK, response_format=City, temperature=0, max_tokens=1
        )


def test_json_object_is_json(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model,
        messages=ASK,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=60,
    )
    assert isinstance(json.loads(reply.choices[0].message.content), dict)


# --- tools --------------------------------------------------------------------------------------


def call_weather(client: OpenAI, model: str, **fields: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    return client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=100, **fields
    )


def test_required_tool_is_called_and_its_result_goes_back(client: OpenAI, model: str) -> None:
    reply = call_weather(client, model, tool_choice="required", parallel_tool_calls=False)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    answer = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "user", "content": "What is the weather in Rome?"},
            message,
            {"role": "tool", "tool_call_id": call.id, "content": "22 degrees, sunny"},
        ],
        tools=[WEATHER],
        temperature=0,
        max_tokens=30,
    )
    assert answer.usage.prompt_tokens > reply.usage.prompt_tokens


def test_named_tool_is_called(client: OpenAI, model: str) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    (call,) = call_weather(client, model, tool_choice=choice).choices[0].message.tool_calls
    assert call.function.name == "get_weather"


def test_tools_may_be_left_alone(client: OpenAI, model: str) -> None:
    for choice in ("auto", "none"):
        reply = call_weather(client, model, tool_choice=choice)
        message = reply.choices[0].message
        assert message.content or message.tool_calls
    assert message.tool_calls is None


def test_streamed_call_is_the_whole_one(client: OpenAI, model: str) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = call_weather(client, model, **fields).choices[0].message.tool_calls
    names, arguments, finish = [], "", None
    for chunk in call_weather(client, model, **fields, stream=True):
        finish = chunk.choices[0].finish_reason or finish
        for call in chunk.choices[0].delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments
    assert names == ["get_weather"]
    assert arguments == whole.function.arguments
    assert finish == "tool_calls"


def test_pydantic_tool_is_parsed_from_a_stream(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model,
        messages=ASK,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    ) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(call.function.parsed_arguments, GetWeather)


# --- completions --------------------------------------------------------------------------------


def test_completion_takes_texts_and_ids(client: OpenAI, model: str) -> None:
    fields = {"model": model, "temperature": 0, "max_tokens": 5}
    prompts = ["The sky is", "Two and two are"]
    ids = [
        client.post("/../tokenize", cast_to=object, body={"prompt": p})["tokens"] for p in prompts
    ]
    of_texts = client.completions.create(prompt=prompts, **fields)
    of_ids = client.completions.create(prompt=ids, **fields)
    assert [c.text for c in of_texts.choices] == [c.text for c in of_ids.choices]
    assert (
        client.completions.create(prompt=ids[1], **fields).choices[0].text == of_ids.choices[1].text
    )


def test_completion_echoes_with_legacy_logprobs(client: OpenAI, model: str) -> None:
    reply = client.completions.create(
        model=model, prompt="The sky is", echo=True, logprobs=2, max_tokens=3, temperature=0
    )
    (choice,) = reply.choices
    told = choice.logprobs
    assert choice.text.startswith("The sky is")
    assert "".join(told.tokens) == choice.text
    assert told.token_logprobs[0] is None
    assert all(value <= 0 for value in told.token_logprobs[1:])
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


def test_streamed_completion_joins_to_the_whole(client: OpenAI, model: str) -> None:
    fields = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
    whole = client.completions.create(**fields)
    chunks = client.completions.create(**fields, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


# --- errors -------------------------------------------------------------------------------------


def test_mistakes_are_bad_requests_that_name_the_field(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ASK, temperature=-1)
    error = caught.value
    assert (error.status_code, error.type, error.param) == (
        400,
        "invalid_request_error",
        "temperature",
    )
    assert "-1" in error.message


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt_has_openais_code(client: OpenAI, model: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192") as caught:
        client.chat.completions.create(model=model, messages=messages, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=ASK)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_unknown_path_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="text")


def test_bad_schema_and_bad_image_are_bad_requests(client: OpenAI, model: str) -> None:
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "colour"}}}}
    with pytest.raises(openai.BadRequestError, match="colour"):
        client.chat.completions.create(
            model=model,
            messages=ASK,
            response_format={"type": "json_schema", "json_schema": schema},
        )
    pixel = "data:image/png;base64," + base64.b64encode(b"png").decode()
    parts = [{"type": "image_url", "image_url": {"url": pixel}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": parts}])


def test_client_side_timeout_ends_the_request(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(
            model=model, messages=ASK, max_tokens=4000, extra_body={"ignore_eos": True}
        )


def test_deadline_is_an_error_of_the_server_or_of_the_stream(client: OpenAI, model: str) -> None:
    fields = {"model": model, "messages": ASK, "max_tokens": 7000}
    extra = {"ignore_eos": True, "timeout": 0.5}
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**fields, extra_body=extra)
    assert caught.value.status_code == 504
    with pytest.raises(openai.APIError, match="did not finish"):
        list(client.chat.completions.create(**fields, stream=True, extra_body=extra))


@pytest.fixture(scope="module")
def guarded(octavo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with keys and room for one running and one waiting request."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("good-key\nreader read\n")
    keys.chmod(0o600)
    with LiveServer(
        octavo,
        *("--api-key-file", str(keys), "--max-num-seqs", "1", "--max-waiting-requests", "1"),
        *("--num-gpu-blocks-override", "128"),
    ) as server:
        yield server


def test_keys_decide_between_authentication_and_permission(guarded: LiveServer, model: str) -> None:
    def chat(key: str) -> None:
        client = OpenAI(base_url=guarded.api, api_key=key, max_retries=0)
        client.chat.completions.create(model=model, messages=ASK, max_tokens=2)

    chat("good-key")
    with pytest.raises(openai.AuthenticationError):
        chat("bad-key")
    with pytest.raises(openai.PermissionDeniedError):
        chat("reader")


def test_full_queue_is_a_rate_limit_that_a_retry_outlasts(guarded: LiveServer, model: str) -> None:
    async def scenario() -> tuple[openai.RateLimitError, str]:
        async with AsyncOpenAI(base_url=guarded.api, api_key="good-key", max_retries=0) as client:
            fields = {"model": model, "messages": ASK}
            running = await client.chat.completions.create(
                **fields, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            await anext(aiter(running))
            waiting = asyncio.create_task(client.chat.completions.create(**fields, max_tokens=2))
            load = {}
            while load.get("num_waiting") != 1:
                load = await client.get("/../load", cast_to=object)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**fields, max_tokens=2)
            patient = asyncio.create_task(
                client.with_options(max_retries=5).chat.completions.create(**fields, max_tokens=2)
            )
            await running.close()
            await waiting
            return caught.value, (await patient).choices[0].finish_reason

    refused, finish = asyncio.run(scenario())
    assert refused.type == "rate_limit_error"
    assert int(refused.response.headers["retry-after"]) >= 1
    assert finish == "length"


def is_ready(client: OpenAI) -> bool:
    try:
        client.get("/../readyz", cast_to=object)
    except openai.InternalServerError:
        return False
    return True


def test_server_that_stops_finishes_streams_and_refuses_the_rest(octavo: Path, model: str) -> None:
    with LiveServer(octavo, "--num-gpu-blocks-override", "128") as server:
        client = OpenAI(base_url=server.api, api_key="unused", max_retries=0)
        fields = {"model": model, "messages": ASK, "max_tokens": 600}
        extra = {"ignore_eos": True}
        chunks = iter(client.chat.completions.create(**fields, stream=True, extra_body=extra))
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        while is_ready(client):
            continue
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            client.chat.completions.create(**fields)
        assert caught.value.status_code == 503
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert server.stop() == 0
