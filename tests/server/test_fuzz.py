"""Mutated bodies: never a 500, never a stuck request, and the engine goes on."""

import json
import random
from typing import Any

import pytest

from tests.engines import assert_idle
from tests.server.serving import ThreadServer, chat, completion
from tests.server.test_staying_up import until_idle

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
]
BASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", completion(max_tokens=3, logprobs=1, stop=["x"], n=2)),
    ("/v1/chat/completions", chat(max_tokens=3, logprobs=True, top_logprobs=2, tools=[])),
    ("/tokenize", {"prompt": "a b"}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/apply-template", {"messages": [{"role": "user", "content": "x"}]}),
]


def mutated(chance: random.Random, server: ThreadServer) -> tuple[str, bytes]:
    """Return a path and a body with one to three odd fields, or with its bytes damaged."""
    path, base = chance.choice(BASES)
    route = next(r for r in server.service_routes if r.path == path)
    known = list(route.handler.__annotations__["body"].model_fields)
    fields = dict(base)
    for _ in range(chance.randint(1, 3)):
        fields[chance.choice(known)] = chance.choice(ODD)
    if "max_tokens" in known and fields.get("max_tokens") in (None, 2**31, 2**63, 10**30):
        fields["max_tokens"] = 3  # odd enough; answers that fill the context take long
    body = json.dumps(fields).encode()
    if chance.random() < 0.1:
        place = chance.randrange(len(body))
        body = body[:place] + bytes([chance.randrange(256)]) + body[place + 1 :]
    return path, body


def run(number: int, seed: int) -> None:
    chance = random.Random(seed)
    headers = {"content-type": "application/json"}
    with ThreadServer() as server, server.calls() as calls:
        for _ in range(number):
            path, body = mutated(chance, server)
            reply = calls.post(path, content=body, headers=headers)
            assert reply.status_code in (200, 400, 404, 429, 504), (body, reply.text)
            if reply.status_code != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        until_idle(server)
        assert_idle(server.engine)
        assert calls.complete()["choices"]


@pytest.mark.case("V48", "S40")
def test_mutated_bodies_never_break_the_server() -> None:
    run(400, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_mutated_bodies_never_break_the_server(seed: int) -> None:
    run(1000, seed=100 + seed)
