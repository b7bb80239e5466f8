"""The OpenAPI document: what it promises of replies holds for any request it allows, and others."""

import copy
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.server.app import create_app
from tests.engines import assert_idle
from tests.server.serving import ThreadServer
from tests.server.test_staying_up import until_idle

PATHS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/v1/requests/{request_id}/explain"),
    ("POST", "/tokenize"),
    ("GET", "/tokenizer_info"),
    ("POST", "/detokenize"),
    ("POST", "/apply-template"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/load"),
    ("GET", "/health"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("POST", "/reset_prefix_cache"),
]
# A 500 is in no document, so the first finds it; 504 is right for a request with hardly any time.
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def document(shared_server: ThreadServer) -> dict[str, Any]:
    return create_app(shared_server.service).openapi()


def test_document_lists_every_route(document: dict[str, Any]) -> None:
    listed = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert listed == set(PATHS)


def test_document_tells_errors_as_they_are(document: dict[str, Any]) -> None:
    for item in document["paths"].values():
        for operation in item.values():
            assert set(operation["responses"]) == {"200", "4XX", "503", "504"}


def test_checks_see_a_reply_that_the_document_does_not_allow(
    shared_server: ThreadServer, document: dict[str, Any]
) -> None:
    told = copy.deepcopy(document)
    del told["paths"]["/v1/completions"]["post"]["responses"]["4XX"]
    operation = schemathesis.openapi.from_dict(told)["/v1/completions"]["POST"]
    case = operation.Case(body={"prompt": 5}, media_type="application/json")
    with pytest.raises(FailureGroup, match="Undocumented status code"):
        case.call_and_validate(base_url=shared_server.address, checks=CHECKS)


def hold(server: ThreadServer, document: dict[str, Any], method: str, path: str, n: int) -> None:
    """Send `n` requests that the document allows and `n` that it does not."""
    operation = schemathesis.openapi.from_dict(document)[path][method]
    # Of a request without a body, only one kind exists.
    for mode in list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]:
        strategy = operation.as_strategy(generation_mode=mode)

        @hypothesis.settings(
            max_examples=n,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def check(case: schemathesis.Case) -> None:
            if path.startswith("/v1/c") and isinstance(case.body, dict):
                case.body.setdefault("max_tokens", 3)  # answers that fill the context take long
            case.call_and_validate(base_url=server.address, checks=CHECKS)

        check()
    until_idle(server)
    assert_idle(server.engine)


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_replies_are_as_documented(
    shared_server: ThreadServer, document: dict[str, Any], method: str, path: str
) -> None:
    hold(shared_server, document, method, path, 15)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_replies_to_many_requests_are_as_documented(
    shared_server: ThreadServer, document: dict[str, Any], method: str, path: str
) -> None:
    hold(shared_server, document, method, path, 300)
