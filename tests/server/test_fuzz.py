"""Mutated bodies: never a 500, never a stuck request, and the engine goes on."""

import copy
import json
import random
from typing import Any

import pytest

from octavo.server.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TemplateBody,
    TokenizeBody,
)
from tests.server.serving import Calls, ProcessServer, ThreadServer, chat, completion
from tests.server.test_process import wait_for
from tests.server.test_staying_up import until_idle

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": EmbeddingBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/apply-template": TemplateBody,
}


def nested(depth: int) -> Any:
    """Return lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    -0.5,
    1e308,
    "",
    "x",
    "\x00",
    "\ud800",
    "\U0001f336" * 50,
    [],
    [None],
    [[]],
    [-1],
    [300],
    [2**64],
    {},
    {"a": {}},
    {"type": "function"},
    [{}],
    [{"role": "user", "content": "x"}],
    float("nan"),
    float("inf"),
    ["x"] * 300,
    "x" * 3000,
    {"$ref": "#"},
    nested(50),
    nested(200),
    {"type": "array", "minItems": 10**9},
    {"pattern": "(a*)*b", "type": "string"},
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", completion(max_tokens=3, logprobs=1, stop=["x"], n=2)),
    (
        "/v1/completions",
        completion(
            [[1, 2], [3]],
            max_tokens=3,
            stream=True,
            echo=True,
            prompt_logprobs=1,
            logit_bias={"5": 1.5},
            stop_token_ids=[7],
            allowed_token_ids=[5, 6],
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
    ),
    ("/v1/completions", completion(max_tokens=3, structured_outputs={"choice": ["a", "b"]})),
    ("/v1/completions", completion(max_tokens=3, structured_outputs={"json": SCHEMA})),
    ("/v1/completions", completion(max_tokens=3, guided_regex="[ab]+", bad_words=["a"])),
    ("/v1/chat/completions", chat(max_tokens=3, logprobs=True, top_logprobs=2, tools=[])),
    ("/v1/chat/completions", chat(max_tokens=3, stream=True, response_format=JSON_SCHEMA)),
    (
        "/v1/chat/completions",
        {"messages": TALK, "max_tokens": 3, "tools": TOOLS, "tool_choice": "required"},
    ),
    ("/v1/embeddings", {"input": ["x", [1, 2]], "dimensions": 5, "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "a b"}),
    ("/tokenize", {"messages": TALK, "tools": TOOLS, "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/apply-template", {"messages": TALK, "tools": TOOLS}),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value, as its container and key."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return []
    inner = [place for key in keys for place in places(value[key])]
    return [(value, key) for key in keys] + inner


def mutate(chance: random.Random, fields: dict[str, Any], known: list[str]) -> None:
    """Put one odd value somewhere, or leave something out."""
    container, key = chance.choice([*places(fields), *((fields, name) for name in known)])
    if chance.random() < 0.1:
        if isinstance(container, dict):
            container.pop(key, None)
        else:
            del container[key]
    else:
        container[key] = copy.deepcopy(chance.choice(ODD))


def mutated(chance: random.Random) -> tuple[str, bytes]:
    """Return a path and a body with one to three odd places, or with its bytes damaged."""
    path, base = chance.choice(BASES)
    known = list(BODIES[path].model_fields)
    fields = copy.deepcopy(base)
    for _ in range(chance.randint(1, 3)):
        mutate(chance, fields, known)
    if "max_tokens" in known and fields.get("max_tokens") in (None, 2**31, 2**63, 10**30):
        fields["max_tokens"] = 3  # odd enough; answers that fill the context take long
    body = json.dumps(fields).encode()
    if chance.random() < 0.1:
        place = chance.randrange(len(body))
        body = body[:place] + bytes([chance.randrange(256)]) + body[place + 1 :]
    if chance.random() < 0.02:
        body = body.replace(b'"x"', b"[" * 100_000 + b"]" * 100_000, 1)
    return path, body


def run(calls: Calls, number: int, seed: int) -> None:
    chance = random.Random(seed)
    headers = {"content-type": "application/json"}
    for _ in range(number):
        path, body = mutated(chance)
        reply = calls.post(path, content=body, headers=headers)
        assert reply.status_code in (200, 400, 404, 429, 504), (path, body, reply.text)
        if reply.status_code != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        elif reply.headers["content-type"].startswith("text/event-stream"):
            assert reply.text.endswith("data: [DONE]\n\n"), (path, body, reply.text)
    assert calls.complete()["choices"]


@pytest.mark.case("V48", "S40")
def test_mutated_bodies_never_break_the_server() -> None:
    with ThreadServer() as server, server.calls() as calls:
        run(calls, 400, seed=1)
        until_idle(server)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_mutated_bodies_never_break_the_server(seed: int) -> None:
    with ProcessServer() as server, server.calls() as calls:
        run(calls, 1000, seed=100 + seed)
        wait_for(lambda: calls.get("/load").json()["kv_cache_usage"] == 0, "every block is free")
        load = calls.get("/load").json()
        assert load["server_load"] == load["num_waiting"] == load["num_restarts"] == 0
