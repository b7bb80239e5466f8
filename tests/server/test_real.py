"""The real model through the real server: the default way to use it."""

import json
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.weights.fetch import cached_path
from tests.server.serving import ProcessServer, checked

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        cached_path("smollm2-135m") is None,
        reason="smollm2-135m has not been fetched; `octavo pull` does it",
    ),
]
MODEL = "smollm2-135m"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server():
    with ProcessServer(reference=MODEL) as server:
        yield server


def test_chat_answers_and_equals_the_engine_in_process(server: ProcessServer) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    with server.calls() as calls:
        whole = checked(calls.post("/v1/chat/completions", json=fields))
        chunks = calls.events("/v1/chat/completions", fields)
    text = whole["choices"][0]["message"]["content"]
    joined = "".join(c["delta"].get("content", "") for k in chunks for c in k["choices"])
    assert joined == text
    with LLM(MODEL, max_model_len=1024, num_gpu_blocks_override=128, block_size=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
    assert output.outputs[0].text == text


@pytest.mark.case("V32", "S09")
def test_required_tool_is_called(server: ProcessServer) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
    city["required"] = ["city"]
    tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    fields = {
        "messages": messages,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 100,
    }
    with server.calls() as calls:
        (choice,) = checked(calls.post("/v1/chat/completions", json=fields))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert isinstance(json.loads(call["function"]["arguments"])["city"], str)
    assert choice["finish_reason"] == "tool_calls"
