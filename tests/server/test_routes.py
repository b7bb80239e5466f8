"""The routes beside generation, request ids, keys, limits and the shape of every error."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from octavo import __version__
from octavo.errors import AccessError, ForbiddenError, SettingError
from octavo.server.app import routes
from octavo.server.keys import read_keys
from tests.server.serving import Calls, ThreadServer, chat, checked, completion


def test_models_lists_every_served_name() -> None:
    with ThreadServer(served_model_name="one, two") as server, server.calls() as calls:
        listed = checked(calls.get("/v1/models"))["data"]
        assert [model["id"] for model in listed] == ["one", "two"]
        assert listed[0]["max_model_len"] == 1024
        assert checked(calls.get("/v1/models/two"))["id"] == "two"
        assert checked(calls.post("/v1/completions", json=completion(model="two")))
        assert calls.get("/v1/models/three").status_code == 404


def test_version_and_load(calls: Calls) -> None:
    assert checked(calls.get("/version")) == {"version": __version__}
    load = checked(calls.get("/load"))
    assert load["server_load"] == load["num_waiting"] == load["num_running"] == 0


def test_tokenize_and_detokenize_are_inverse(calls: Calls) -> None:
    told = checked(calls.post("/tokenize", json={"prompt": "a b é", "return_token_strs": True}))
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 1024
    back = checked(calls.post("/detokenize", json={"tokens": told["tokens"]}))
    assert back["prompt"] == "a b é"


def test_tokenizer_info_tells_what_prompts_are_made_of(
    calls: Calls, shared_server: ThreadServer
) -> None:
    told = checked(calls.get("/tokenizer_info"))
    tokenizer = shared_server.client.face.tokenizer
    assert tokenizer is not None
    assert told["eos_token"] == tokenizer.token_text(told["eos_token_id"])
    assert told["bos_token"] == tokenizer.bos_token
    assert told["chat_template"] == tokenizer.chat_template
    assert told["model_max_length"] == 1024


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "messages": []},
        {"prompt": "a", "messages": [{"role": "user", "content": "x"}]},
        {"messages": [], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_tokenize_needs_prompt_or_messages(calls: Calls, body: dict[str, Any]) -> None:
    calls.refusal("/tokenize", body)


@pytest.mark.case("V48")
@pytest.mark.parametrize("token", [-1, 300, 2**63 - 1, 2**70])
def test_detokenize_refuses_ids_without_a_token(calls: Calls, token: int) -> None:
    error = calls.refusal("/detokenize", {"tokens": [token]})
    assert error["param"] == "tokens"


@pytest.mark.case("S21")
def test_rendered_prompt_is_exposed(calls: Calls) -> None:
    fields = {"messages": chat("Hello")["messages"]}
    prompt = checked(calls.post("/apply-template", json=fields))["prompt"]
    assert "Hello" in prompt


def test_rendered_prompt_that_is_no_unicode_is_refused(calls: Calls) -> None:
    fields = {"messages": [{"role": "user", "content": "\ud800"}]}
    body = json.dumps(fields)
    headers = {"content-type": "application/json"}
    for path in ("/apply-template", "/tokenize", "/v1/chat/completions"):
        reply = calls.post(path, content=body, headers=headers)
        assert reply.status_code == 400, reply.text
        assert "not" in reply.json()["error"]["message"]
        assert "valid Unicode" in reply.json()["error"]["message"]


@pytest.mark.case("V06")
def test_reset_prefix_cache_forgets(calls: Calls) -> None:
    prompt = list(range(100, 160))
    calls.complete(prompt)
    assert calls.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    checked(calls.post("/reset_prefix_cache"))
    assert calls.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# --- every request ------------------------------------------------------------------------------


def test_request_id_is_honoured_and_echoed(calls: Calls) -> None:
    reply = calls.post("/v1/completions", json=completion(), headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert reply.json()["id"] == "cmpl-abc-1"
    other = calls.get("/nowhere", headers={"x-request-id": "abc-2"})
    assert other.headers["x-request-id"] == "abc-2"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é".encode("latin-1")])
def test_request_id_that_fits_no_log_is_replaced(calls: Calls, given: Any) -> None:
    reply = calls.get("/version", headers={"x-request-id": given})
    assert len(reply.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/version", 405)],
)
def test_unknown_path_and_method_have_the_shape_of_errors(
    calls: Calls, method: str, path: str, status: int
) -> None:
    reply = calls.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.case("S40")
def test_body_beyond_the_limit_is_413() -> None:
    with ThreadServer(max_body_bytes=1000) as server, server.calls() as calls:
        body = json.dumps(completion("x" * 2000))
        headers = {"content-type": "application/json"}
        told = calls.post("/v1/completions", content=body, headers=headers)
        untold = calls.post("/v1/completions", content=iter([body.encode()]), headers=headers)
        for reply in (told, untold):
            assert reply.status_code == 413, reply.text
            assert "1,000 bytes" in reply.json()["error"]["message"]
        assert calls.complete("short")["choices"]


@pytest.mark.case("S42")
def test_strict_server_refuses_unknown_fields() -> None:
    with ThreadServer(strict=True) as server, server.calls() as calls:
        error = calls.refusal("/v1/completions", completion(foo=1))
        assert "foo" in error["message"]
        nested = completion(stream=True, stream_options={"bar": 1})
        assert "stream_options.bar" in calls.refusal("/v1/completions", nested)["message"]
        assert calls.complete()["choices"]


def test_openapi_page_has_every_route(calls: Calls, shared_server: ThreadServer) -> None:
    document = checked(calls.get("/openapi.json"))
    for route in routes(shared_server.service):
        path = route.path.replace(":path", "")
        assert route.method.lower() in document["paths"][path], path
        assert route.handler.__doc__
    body = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "top_k", "cache_salt"} <= set(body)


def test_browsers_of_other_origins_are_let_in_only_by_setting() -> None:
    origin = {"origin": "https://example.org"}
    with ThreadServer() as server, server.calls() as calls:
        reply = calls.get("/version", headers=origin)
        assert "access-control-allow-origin" not in reply.headers
    with ThreadServer(allowed_origins="https://example.org") as server, server.calls() as calls:
        reply = calls.get("/version", headers=origin)
        assert reply.headers["access-control-allow-origin"] == "https://example.org"


def test_log_has_one_line_per_request_and_no_text_of_it(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "octavo.server"):
        calls.post(
            "/v1/completions",
            json=completion("secret words", temperature=0),
            headers={"x-request-id": "told", "authorization": "Bearer hidden"},
        )
        calls.get("/readyz")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("told POST /v1/completions status=200")
    assert "generated_tokens=8" in line
    assert "finish=length" in line
    assert "secret" not in line
    assert "hidden" not in line


# --- keys ---------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# team\nboth\nonly-read read\nroot admin\nwork inference # x\n")
    return path


def test_key_opens_what_its_scopes_allow(key_file: Path) -> None:
    with ThreadServer(api_key_file=str(key_file)) as server, server.calls() as calls:

        def status(path: str, key: str | None, body: Any = None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            method = "GET" if body is None else "POST"
            return calls.request(method, path, json=body, headers=headers).status_code

        for key, models, completions, reset in (
            (None, 401, 401, 401),
            ("wrong", 401, 401, 401),
            ("both", 200, 200, 403),
            ("only-read", 200, 403, 403),
            ("work", 403, 200, 403),
            ("root", 200, 200, 200),
        ):
            assert status("/v1/models", key) == models, key
            assert status("/v1/completions", key, completion()) == completions, key
            assert status("/reset_prefix_cache", key, {}) == reset, key
            assert status("/readyz", key) == status("/livez", key) == 200
            assert status("/openapi.json", None) == 401
        reply = calls.post("/v1/completions", json=completion())
        assert reply.headers["www-authenticate"] == "Bearer"
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_path_below_a_proxy_needs_the_same_scope(key_file: Path) -> None:
    options = {"api_key_file": str(key_file), "root_path": "/llm"}
    with ThreadServer(**options) as server, server.calls() as calls:
        for key, status in (("only-read", 403), ("root", 200)):
            headers = {"authorization": f"Bearer {key}"}
            reply = calls.post("/reset_prefix_cache", headers=headers)
            assert reply.status_code == status, key
        assert calls.get("/readyz").status_code == 200


def test_failure_of_the_server_itself_tells_nothing_and_is_logged(
    shared_server: ThreadServer, caplog: pytest.LogCaptureFixture
) -> None:
    with shared_server.calls() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(shared_server.service), "check_model", lambda *_: 1 / 0)
        reply = calls.post("/v1/completions", json=completion(), headers={"x-request-id": "odd"})
    assert reply.status_code == 500
    assert reply.headers["x-request-id"] == "odd"
    assert "division" not in reply.text
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("header", ["", "Basic both", "Bearer", "Bearer  ", "both"])
def test_header_that_is_no_bearer_key_is_refused(key_file: Path, header: str) -> None:
    with pytest.raises(AccessError):
        read_keys(key_file).check(header, "read")


def test_refusal_does_not_tell_the_key(key_file: Path) -> None:
    keys = read_keys(key_file)
    for key, scope, kind in (
        ("guess", "read", AccessError),
        ("only-read", "admin", ForbiddenError),
    ):
        with pytest.raises(kind) as caught:
            keys.check(f"Bearer {key}", scope)
        assert key not in str(caught.value)
    assert "both" not in repr(keys)


@pytest.mark.parametrize("content", ["", "# nothing\n", "key everything\n"])
def test_key_file_without_keys_or_with_unknown_scopes_is_refused(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(SettingError, match="api_key_file"):
        read_keys(path)


def test_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot read"):
        read_keys(tmp_path / "none")
