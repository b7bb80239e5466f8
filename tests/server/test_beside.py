"""What takes long is done beside the event loop: the server answers others meanwhile."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.engine.client import LONG_TEXT
from octavo.server import turns
from tests.server.serving import Calls, ThreadServer, chat, completion

LONG = "a " * LONG_TEXT
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TALK = {"messages": [{"role": "user", "content": LONG}]}


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadServer]:
    with ThreadServer() as server:
        yield server


@pytest.mark.parametrize(
    ("slow", "path", "body"),
    [
        ("encode", "/tokenize", {"prompt": "short"}),
        ("encode", "/tokenize", TALK),
        ("encode", "/v1/completions", completion(LONG)),
        ("encode", "/v1/completions", completion([5], bad_words=["x"])),
        ("encode", "/v1/chat/completions", chat(LONG)),
        ("encode", "/v1/embeddings", {"input": LONG}),
        ("decode", "/detokenize", {"tokens": [5, 6, 7]}),
        ("token_text", "/tokenize", {"prompt": "short", "return_token_strs": True}),
        ("render", "/apply-template", TALK),
        ("tools_constraint", "/v1/chat/completions", chat(tools=TOOLS, tool_choice="required")),
    ],
)
def test_others_are_answered_while_a_text_is_worked_at(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch, slow: str, path: str, body: Any
) -> None:
    begun, gate = threading.Event(), threading.Event()
    face = server.client.face
    owners: dict[str, Any] = {"render": face.chat, "tools_constraint": turns}
    owner = owners.get(slow, face.tokenizer)
    work = getattr(owner, slow)

    def work_later(*args: Any, **options: Any) -> Any:
        begun.set()
        assert gate.wait(60)
        return work(*args, **options)

    monkeypatch.setattr(owner, slow, work_later)
    with ThreadPoolExecutor(1) as pool, server.calls() as calls, server.calls() as others:
        reply = pool.submit(calls.post, path, json=body)
        try:
            assert begun.wait(60)
            assert Calls.get(others, "/livez").status_code == 200
        finally:
            gate.set()
        assert reply.result().status_code in (200, 400), reply.result().text
