"""Errors in OpenAI's shape, with their status and headers.

Decides how an exception is told over HTTP. Knows no route. Invariant: a user's mistake names its
field where there is one, and no text of a request or an internal error is ever shown.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.errors import (
    BadRequestError,
    ContextLengthError,
    InvalidParameterError,
    OctavoError,
    RetryLaterError,
    shorten,
)

_log = logging.getLogger("octavo.server")

_TYPE_TAG = re.compile(r"str|int|float|bool|dict|list\[.*|dict\[.*")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


# The shape of every error, for the OpenAPI page.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class JSONReply(Response):
    """A JSON document."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of `content`."""
        return msgspec.json.encode(content)


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers for an exception."""
    if not isinstance(error, OctavoError):
        return 500, body(500, "The server failed; its log says how."), {}
    headers = {}
    if isinstance(error, RetryLaterError) and error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    field = error.field if isinstance(error, InvalidParameterError) else None
    return error.status, body(error.status, _message(error), field, error.code), headers


def body(
    status: int, message: str, field: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def reply(error: Exception) -> Response:
    """Return the response that tells an exception."""
    status, content, headers = describe(error)
    return JSONReply(content, status, headers)


def log_unexpected(error: Exception) -> None:
    """Write the traceback of an error that is none of ours to the log."""
    if not isinstance(error, OctavoError):
        _log.error("A request failed unexpectedly", exc_info=error)


def validation_error(problems: Sequence[Mapping[str, Any]]) -> BadRequestError:
    """Return the first of pydantic's problems as an error that names field, value and limit."""
    problem = problems[0]
    field = _field(problem)
    if problem["type"] == "json_invalid":
        reason = problem.get("ctx", {}).get("error", "it does not parse")
        return BadRequestError(f"The body is not valid JSON: {reason}.")
    if problem["type"] == "missing":
        if not field:
            return BadRequestError("The request has no body. Send a JSON object.")
        return MissingFieldError(f"{field} is missing.", field)
    if not field:
        return BadRequestError("The body is not a JSON object. Send one as application/json.")
    # A field of several types has a problem for each of them.
    same = [p for p in problems if _field(p).startswith(field)]
    allowed = " or ".join(dict.fromkeys(map(_allowed, same)))
    value = problem.get("input") if len(same) == 1 else _value_of(problems, field)
    return InvalidParameterError(field, _sample(value), allowed)


def _field(problem: Mapping[str, Any]) -> str:
    """Return the field's name, without the parts that name one of its types."""
    parts = [str(part) for part in problem["loc"] if part != "body"]
    return ".".join(p for i, p in enumerate(parts) if i == 0 or not _TYPE_TAG.fullmatch(p))


def _allowed(problem: Mapping[str, Any]) -> str:
    message: str = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return message.partition(", ")[0]


def _value_of(problems: Sequence[Mapping[str, Any]], field: str) -> Any:
    """Return the value of a field itself, where problems within it were found too."""
    return next((p.get("input") for p in problems if _field(p) == field), None)


class MissingFieldError(InvalidParameterError):
    """A field that must be given is not there."""

    code = "missing_required_parameter"

    def __init__(self, message: str, field: str) -> None:
        BadRequestError.__init__(self, message)
        self.field = field


def _sample(value: Any) -> Any:
    """Numbers are shown as they are; texts of a caller may be private and long."""
    if isinstance(value, (int, float, bool)) or value is None:
        return value
    return _Kind(f"a {type(value).__name__}") if len(shorten(value)) > 40 else value


class _Kind:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _message(error: OctavoError) -> str:
    if not isinstance(error, ContextLengthError) or error.limit is None:
        return str(error)
    # Agents read these numbers with OpenAI's wording.
    beginning = f"This model's maximum context length is {error.limit} tokens. However, "
    asked = error.num_prompt_tokens or 0
    if error.max_tokens is None:
        numbers = f"your messages resulted in {asked} tokens. "
    else:
        numbers = (
            f"you requested {asked + error.max_tokens} tokens ({asked} in the messages, "
            f"{error.max_tokens} in the completion). "
        )
    return beginning + numbers + str(error)
