"""The server's application: a table of routes, and what surrounds them.

Decides which path does what and which scope it needs. Knows no field of a body and no engine.

Invariant: a path that is not in the table is 404, in the same shape as every other error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import compile_path

from octavo.errors import OctavoError
from octavo.server import failures
from octavo.server.answering import ClientGoneError
from octavo.server.embeddings import Embeddings
from octavo.server.explaining import Explaining
from octavo.server.gate import Gate
from octavo.server.generation import IGNORED, QUEUE_POSITION, Generation
from octavo.server.keys import read_keys
from octavo.server.parsing import bounded_route
from octavo.server.service import Service
from octavo.server.state import State
from octavo.server.texts import Texts

STREAMED = ("application/json", "text/event-stream")


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table. scope: what a key must allow; None is open to all.

    is_quiet: asked all the time, and not logged. media: content types of a good reply.
    """

    method: str
    path: str
    handler: Callable[..., Any]
    scope: str | None = "inference"
    is_quiet: bool = False
    media: tuple[str, ...] = ("application/json",)


def routes(service: Service) -> list[Route]:
    """Return the table."""
    generation, texts, state = Generation(service), Texts(service), State(service)
    return [
        Route("POST", "/v1/completions", generation.completions, media=STREAMED),
        Route("POST", "/v1/chat/completions", generation.chat, media=STREAMED),
        Route("POST", "/v1/embeddings", Embeddings(service).embeddings),
        Route("GET", "/v1/models", state.models, "read"),
        Route("GET", "/v1/models/{name:path}", state.model, "read"),
        Route("GET", "/v1/requests/{request_id:path}/explain", Explaining(service).explain),
        Route("POST", "/tokenize", texts.tokenize),
        Route("POST", "/detokenize", texts.detokenize),
        Route("POST", "/apply-template", texts.apply_template),
        Route("GET", "/tokenizer_info", texts.tokenizer_info, "read"),
        Route("GET", "/version", state.version, "read"),
        Route("GET", "/metrics", state.metrics, "read", is_quiet=True, media=("text/plain",)),
        Route("GET", "/load", state.load, "read", is_quiet=True),
        Route("GET", "/health", state.readyz, None, is_quiet=True),
        Route("GET", "/livez", state.livez, None, is_quiet=True),
        Route("GET", "/readyz", state.readyz, None, is_quiet=True),
        Route("POST", "/reset_prefix_cache", state.reset_prefix_cache, "admin"),
    ]


def create_app(service: Service) -> FastAPI:
    """Return the application."""
    config, table = service.config, routes(service)
    app = FastAPI(
        title="Octavo",
        version=version_of("octavo"),
        redirect_slashes=False,
    )
    app.router.route_class = bounded_route(config.max_body_values)
    for route in table:
        app.add_api_route(
            route.path,
            route.handler,
            methods=[route.method],
            response_model=None,
            response_class=_RESPONSES[route.media[0]],
            responses=_replies(route),
        )
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(OctavoError, _on_error)
    app.add_exception_handler(ClientGoneError, _on_gone)
    app.add_middleware(
        Gate,
        keys=read_keys(Path(config.api_key_file)) if config.api_key_file else None,
        scope_of=_scopes(table),
        max_body_bytes=config.max_body_bytes,
        quiet=frozenset(route.path for route in table if route.is_quiet),
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip() for origin in config.allowed_origins.split(",")],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", IGNORED, QUEUE_POSITION, "retry-after"],
        )
    return app


# What FastAPI documents as the reply's type; the routes return responses of their own.
_RESPONSES = {"application/json": JSONResponse, "text/plain": PlainTextResponse}


def _replies(route: Route) -> dict[int | str, dict[str, Any]]:
    """Return what the OpenAPI page tells of a route's replies: their types, and every error."""
    error = {"description": "Error", "content": {"application/json": {"schema": failures.SCHEMA}}}
    return {
        200: {"content": {media: {} for media in route.media}},
        **dict.fromkeys(("4XX", 503, 504), error),
    }


def _scopes(table: list[Route]) -> Callable[[str], str | None]:
    """Return what tells a path's scope; unknown paths need the one to read."""
    known = [(compile_path(route.path)[0], route.scope) for route in table]

    def scope_of(path: str) -> str | None:
        return next((scope for pattern, scope in known if pattern.match(path)), "read")

    return scope_of


async def _on_invalid(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return failures.reply(failures.validation_error(error.errors()))


async def _on_http(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = "There is no such path. /docs lists those that are."
    elif error.status_code == 405:
        message = f"{http.method} is not what this path is for. /docs says what is."
    else:
        message = str(error.detail)
    content = failures.body(error.status_code, message)
    return failures.JSONReply(content, error.status_code, error.headers)


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    failures.log_unexpected(error)
    return failures.reply(error)


async def _on_gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)
