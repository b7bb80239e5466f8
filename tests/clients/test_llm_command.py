"""The `llm` command, with the server in its list of OpenAI-compatible models."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import LiveServer

MODELS = """
- model_id: octavo
  model_name: {model}
  api_base: "{api}"
  supports_schema: true
  supports_tools: true
- model_id: octavo-text
  model_name: {model}
  api_base: "{api}"
  completion: true
"""
QUESTION = "What is the capital of France?"
Llm = Callable[..., str]


@pytest.fixture(scope="module")
def llm(server: LiveServer, model: str, tmp_path_factory: pytest.TempPathFactory) -> Llm:
    """Runs the command in a user directory of its own; returns what it printed."""
    home = tmp_path_factory.mktemp("llm")
    (home / "extra-openai-models.yaml").write_text(MODELS.format(model=model, api=server.api))
    environment = {**os.environ, "LLM_USER_PATH": str(home)}
    command = Path(sys.executable).with_name("llm")

    def run(*words: str, given: str = "") -> str:
        done = subprocess.run(
            [command, *words],
            env=environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "24")


def test_model_is_listed(llm: Llm) -> None:
    assert "OpenAI Chat: octavo" in llm("models")


def test_prompt_is_answered_streamed_or_not(llm: Llm) -> None:
    streamed = llm("-m", "octavo", *GREEDY, QUESTION)
    assert streamed.strip()
    assert llm("-m", "octavo", *GREEDY, "--no-stream", QUESTION) == streamed


def test_usage_and_texts_are_logged(llm: Llm) -> None:
    answer = llm("-m", "octavo", *GREEDY, "-s", "Be brief.", QUESTION)
    (entry,) = json.loads(llm("logs", "-n", "1", "--json"))
    assert entry["response"].strip() == answer.strip()
    assert entry["input_tokens"] > 0
    assert entry["output_tokens"] > 0


def test_conversation_goes_on(llm: Llm) -> None:
    llm("-m", "octavo", *GREEDY, QUESTION)
    (first,) = json.loads(llm("logs", "-n", "1", "--json"))
    assert llm("-c", *GREEDY, "And of Italy?").strip()
    second = json.loads(llm("logs", "-n", "2", "--json"))[-1]
    assert second["conversation_id"] == first["conversation_id"]
    assert second["input_tokens"] > first["input_tokens"]


def test_schema_is_followed(llm: Llm) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    told = llm("-m", "octavo", "-o", "temperature", "0", "--schema", json.dumps(schema), "A dog")
    assert set(json.loads(told)) == {"name", "age"}


def test_tools_are_offered(llm: Llm) -> None:
    assert llm("-m", "octavo", *GREEDY, "-T", "llm_version", "Which version of llm is this?")


def test_completion_model_continues_a_text(llm: Llm) -> None:
    assert llm("-m", "octavo-text", "-o", "max_tokens", "8", "Once upon a time").strip()
