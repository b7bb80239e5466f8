"""`langchain-openai`: chat models, streams, tools, structured outputs."""

import asyncio

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from serving import LiveServer

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20, description="Its name.")
    inhabitants: int = Field(ge=0, le=99_999_999)


@tool
def get_weather(city: str) -> str:
    """Tell the current weather of a city."""
    return f"Sunny in {city}"


@pytest.fixture(scope="module")
def chat(server: LiveServer, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=model,
        base_url=server.api,
        api_key="unused",
        temperature=0,
        max_tokens=100,
        max_retries=0,
    )


def test_invoke_answers_with_usage(chat: ChatOpenAI, model: str) -> None:
    message = chat.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert message.content
    assert message.usage_metadata["output_tokens"] > 0
    assert "cache_read" in message.usage_metadata["input_token_details"]
    assert message.response_metadata["model_name"] == model
    assert message.response_metadata["finish_reason"] in {"stop", "length"}


def test_stream_joins_to_what_invoke_answers(chat: ChatOpenAI) -> None:
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    whole = chat.invoke(QUESTION)
    assert joined.content == whole.content
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_async_batch_equals_single_calls(chat: ChatOpenAI) -> None:
    questions = [f"Name a city in {land}." for land in ("Italy", "Spain", "Japan", "Peru")]
    together = asyncio.run(chat.abatch(questions, max_tokens=16))
    alone = [chat.invoke(question, max_tokens=16) for question in questions]
    assert [m.content for m in together] == [m.content for m in alone]


def test_logprobs_come_with_the_message(chat: ChatOpenAI) -> None:
    message = chat.bind(logprobs=True, top_logprobs=2, max_tokens=5).invoke(QUESTION)
    assert len(message.response_metadata["logprobs"]["content"]) == 5


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_the_pydantic_model(chat: ChatOpenAI, method: str) -> None:
    found = chat.with_structured_output(City, method=method).invoke(QUESTION)
    assert isinstance(found, City)


def test_json_mode_is_json(chat: ChatOpenAI) -> None:
    found = chat.with_structured_output(None, method="json_mode").invoke(f"{QUESTION} As JSON.")
    assert isinstance(found, dict)


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_bound_tool_is_called_and_its_result_goes_back(chat: ChatOpenAI, choice: str) -> None:
    bound = chat.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    question = HumanMessage("What is the weather in Rome?")
    asked = bound.invoke([question])
    (call,) = asked.tool_calls
    assert call["name"] == "get_weather"
    told: ToolMessage = get_weather.invoke(call)
    answer = chat.bind_tools([get_weather]).invoke([question, asked, told])
    assert isinstance(answer, AIMessage)


def test_streamed_tool_call_is_the_whole_one(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    joined = None
    for chunk in bound.stream("What is the weather in Rome?"):
        joined = chunk if joined is None else joined + chunk
    (whole,) = bound.invoke("What is the weather in Rome?").tool_calls
    (streamed,) = joined.tool_calls
    assert (streamed["name"], streamed["args"]) == (whole["name"], whole["args"])


def test_completions_model_continues_a_text(server: LiveServer, model: str) -> None:
    llm = OpenAI(model=model, base_url=server.api, api_key="unused", temperature=0, max_tokens=8)
    text = llm.invoke("Once upon a time")
    assert text
    assert "".join(llm.stream("Once upon a time")) == text


def test_too_long_a_prompt_is_told(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192"):
        chat.invoke("word " * 20_000)
