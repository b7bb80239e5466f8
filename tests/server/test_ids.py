"""Token ids that the model does not have, in every field that takes ids."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.serving import Calls, ThreadServer, chat, completion
from tests.server.test_staying_up import until_idle

VOCABULARY = 300
OUTSIDE = [-1, VOCABULARY, 10**9, 2**63 - 1, 2**64]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def bodies(token: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return path, field and body for each place where an id may stand."""
    fields: dict[str, dict[str, Any]] = {
        "stop_token_ids": {"stop_token_ids": [5, token]},
        "stop_token_ids with min_tokens": {"stop_token_ids": [token], "min_tokens": 4},
        "allowed_token_ids": {"allowed_token_ids": [5, token]},
        "logit_bias": {"logit_bias": {str(token): 1.0}},
    }
    both = [
        (path, name.partition(" ")[0], make(**extra))
        for path, make in ((TEXT, completion), (CHAT, chat))
        for name, extra in fields.items()
    ]
    prompts = [
        (TEXT, "prompt_token_ids", completion(prompt))
        for prompt in ([token], [5, token], [[5], [6, token]], ["a", [token]])
    ]
    return [
        *both,
        *prompts,
        ("/detokenize", "tokens", {"tokens": [5, token]}),
        ("/v1/embeddings", "prompt_token_ids", {"input": [[5], [token]]}),
    ]


@pytest.mark.case("V48")
@pytest.mark.parametrize("token", OUTSIDE)
def test_id_outside_the_vocabulary_is_refused_and_harms_nobody(token: int) -> None:
    with ThreadServer() as server, server.calls() as calls, ThreadPoolExecutor(1) as pool:
        healthy: dict[str, Any] = {"max_tokens": 300, "logprobs": 2}
        expected = calls.complete("A lake", **healthy)["choices"]
        beside = pool.submit(calls.complete, "A lake", **healthy)
        for path, field, body in bodies(token):
            error = calls.refusal(path, body)
            assert field in error["message"], error
            told = f"from 0 to {VOCABULARY - 1}" if token >= 0 else "from 0 "
            assert told in error["message"], error
            assert error["param"] == field
        assert beside.result()["choices"] == expected
        until_idle(server)


@pytest.mark.case("V48")
@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "101", "1e400", '"a"', "null"])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_bias_that_is_no_allowed_number_is_refused(calls: Calls, path: str, value: str) -> None:
    body = json.dumps(completion() if path == TEXT else chat())[:-1]
    body += ', "logit_bias": {"5": ' + value + "}}"
    reply = calls.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert "logit_bias" in reply.json()["error"]["param"]


@pytest.mark.case("V48")
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_empty_list_of_allowed_ids_is_refused(calls: Calls, path: str) -> None:
    fields = (completion if path == TEXT else chat)(allowed_token_ids=[])
    assert calls.refusal(path, fields)["param"] == "allowed_token_ids"
